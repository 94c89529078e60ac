// What Python calls: each function for float and for double. 0 says that all went well.

#include <algorithm>
#include <memory>
#include <vector>

#include "guarded.h"
#include "parallel.h"
#include "worker.h"

namespace esper {
namespace {

template <class T>
struct Network {
  Network(const HostSpec& spec, int threads) {
    for (int i = 0; i < threads; ++i) workers.push_back(std::make_unique<Worker<T>>(spec));
  }

  // work(worker, row) for every row.
  template <class Work>
  int run(int64_t rows, Work work) {
    return guarded([&] {
      const int threads = int(std::min(int64_t(workers.size()), std::max(rows, int64_t(1))));
      in_parallel(rows, threads, [&](int w, int64_t row) { work(*workers[size_t(w)], row); });
    });
  }

  std::vector<std::unique_ptr<Worker<T>>> workers;
};

// Null where there is no memory for it.
template <class T>
void* create(const HostSpec* spec, int threads) {
  try {
    return new Network<T>(*spec, threads);
  } catch (...) {
    return nullptr;
  }
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

// Sizes by which Python checks that both sides mean the same rows: parameters and running statistics
// of the host, or with a slot the parameters and tensors of a blueprint there.
template <class T>
void sizes(void* network, int slot, int kind, int32_t* result) {
  Worker<T>& worker = *static_cast<Network<T>*>(network)->workers[0];
  result[0] = worker.parameters();
  result[1] = worker.buffers();
  if (slot < 0) return;
  const std::vector<int> fields = worker.seed_fields(slot, kind);
  result[0] = 0;
  for (int size : fields) result[0] += size;
  result[1] = int(fields.size());
}

}  // namespace
}  // namespace esper

extern "C" {

int esper_lanes_f32() { return esper::kLanes<float>; }
int esper_lanes_f64() { return esper::kLanes<double>; }

void* esper_create_f32(const esper::HostSpec* spec, int threads) {
  return esper::create<float>(spec, threads);
}
void* esper_create_f64(const esper::HostSpec* spec, int threads) {
  return esper::create<double>(spec, threads);
}

void esper_destroy_f32(void* network) { delete static_cast<esper::Network<float>*>(network); }
void esper_destroy_f64(void* network) { delete static_cast<esper::Network<double>*>(network); }

void esper_sizes_f32(void* network, int slot, int kind, int32_t* result) {
  esper::sizes<float>(network, slot, kind, result);
}
void esper_sizes_f64(void* network, int slot, int kind, int32_t* result) {
  esper::sizes<double>(network, slot, kind, result);
}

int esper_train_f32(void* network, const esper::TrainCall<float>* call) {
  return esper::train(network, call);
}
int esper_train_f64(void* network, const esper::TrainCall<double>* call) {
  return esper::train(network, call);
}

int esper_evaluate_f32(void* network, const esper::EvaluateCall<float>* call) {
  return esper::evaluate(network, call);
}
int esper_evaluate_f64(void* network, const esper::EvaluateCall<double>* call) {
  return esper::evaluate(network, call);
}

}  // extern "C"
