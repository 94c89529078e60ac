// Distributes independent pieces of work over a few threads.

#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace esper {

// Calls work(worker, index) for every index below `count`; each worker is one thread. After an
// exception no further piece starts; it is rethrown when all threads have stopped.
template <class Work>
void in_parallel(int64_t count, int threads, Work work) {
  std::atomic<int64_t> next{0};
  std::vector<std::exception_ptr> failures(static_cast<size_t>(threads));
  const auto run = [&](int worker) {
    try {
      for (int64_t i = next++; i < count; i = next++) work(worker, i);
    } catch (...) {
      failures[size_t(worker)] = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> others;
  try {
    for (int worker = 1; worker < threads; ++worker) others.emplace_back(run, worker);
  } catch (const std::system_error&) {
    // The system refuses more threads: the existing ones share the work.
  }
  run(0);
  for (std::thread& other : others) other.join();
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace esper
