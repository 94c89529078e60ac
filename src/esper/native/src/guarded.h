// Result codes of functions that Python calls; library.py repeats the numbers.

#pragma once

#include <new>

namespace esper {

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

}  // namespace esper
