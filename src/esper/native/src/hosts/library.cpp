// Functions that Python calls, which return a result code: for float, and in a unit of their own,
// so that both are compiled side by side, for double.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "worker.h"

namespace esper::hosts {
namespace {

// Result codes of functions that Python calls; library.py repeats the numbers.
constexpr int kDone = 0, kOutOfMemory = 1, kFailed = 2;

// Runs work() and returns a result code: no exception may leave the library.
template <class Work>
int guarded(Work work) {
  try {
    work();
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  } catch (...) {
    return kFailed;
  }
  return kDone;
}

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

template <class T>
struct Network {
  Network(const HostSpec& spec, int threads) {
    for (int i = 0; i < threads; ++i) workers.push_back(std::make_unique<Worker<T>>(spec));
  }

  // Calls work(worker, row) for every row.
  template <class Work>
  int run(int64_t rows, Work work) {
    return guarded([&] {
      const int threads = int(std::min(int64_t(workers.size()), std::max(rows, int64_t(1))));
      in_parallel(rows, threads, [&](int w, int64_t row) { work(*workers[size_t(w)], row); });
    });
  }

  std::vector<std::unique_ptr<Worker<T>>> workers;
};

template <class T>
int create(const HostSpec* spec, int threads, void** network) {
  return guarded([&] { *network = new Network<T>(*spec, threads); });
}

template <class T>
int free(void* network) {
  return guarded([&] { delete static_cast<Network<T>*>(network); });
}

template <class T>
int train(void* network, const TrainCall<T>* call) {
  return static_cast<Network<T>*>(network)->run(
      call->rows, [&](Worker<T>& worker, int64_t n) { worker.train(*call, n); });
}

template <class T>
int evaluate(void* network, const EvaluateCall<T>* call) {
  return static_cast<Network<T>*>(network)->run(
      call->rows, [&](Worker<T>& worker, int64_t r) { worker.evaluate(*call, r); });
}

// Sizes that Python compares with its own layouts: for slot -1 the host's numbers of parameters and
// running statistics or, for a slot, a blueprint's numbers of parameters and of tensors.
template <class T>
int sizes(void* network, int slot, int kind, int32_t* result) {
  return guarded([&] {
    Worker<T>& worker = *static_cast<Network<T>*>(network)->workers[0];
    result[0] = slot < 0 ? worker.parameters() : worker.branch(slot, kind).parameters();
    result[1] = slot < 0 ? worker.buffers() : int(worker.branch(slot, kind).fields().size());
  });
}

}  // namespace
}  // namespace esper::hosts

// Python reads the addresses of the functions from these variables.
#ifdef ESPER_DOUBLE
#define ESPER_EXPORT(NAME) auto* esper_hosts_##NAME##_f64 = &esper::hosts::NAME<double>;
#else
#define ESPER_EXPORT(NAME) auto* esper_hosts_##NAME##_f32 = &esper::hosts::NAME<float>;
#endif

extern "C" {
ESPER_EXPORT(create)
ESPER_EXPORT(free)
ESPER_EXPORT(sizes)
ESPER_EXPORT(train)
ESPER_EXPORT(evaluate)
#ifndef ESPER_DOUBLE
int esper_vector_bytes = esper::kVectorBytes;
int esper_has_bfloat16 = esper::hosts::has_pairs();
int esper_has_matrix_unit = esper::hosts::has_matrix_unit();
#endif
}
