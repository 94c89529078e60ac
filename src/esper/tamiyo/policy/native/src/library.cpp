// What Python calls: each function for float and for double. 0 says that all went well.

#include <memory>

#include "guarded.h"
#include "network.h"

namespace esper {
namespace {

// *network is what `backward` needs; null asks for it not to be kept.
template <class T>
int forward(const PolicySpec* spec, const T* const* parameters, const PolicyCall<T>* call,
            int threads, void** network) {
  return guarded([&] {
    auto made = std::make_unique<PolicyNetwork<T>>(*spec, parameters, *call);
    made->forward(threads);
    if (network) *network = made.release();
  });
}

template <class T>
int again(void* network, const PolicyCall<T>* call, int threads) {
  return guarded([&] { static_cast<PolicyNetwork<T>*>(network)->again(*call, threads); });
}

template <class T>
int backward(void* network, const T* d_log_prob, const T* d_entropy, const T* d_value,
             T* const* gradients, int threads) {
  return guarded([&] {
    static_cast<PolicyNetwork<T>*>(network)->backward(d_log_prob, d_entropy, d_value, gradients,
                                                      threads);
  });
}

}  // namespace
}  // namespace esper

extern "C" {

int esper_policy_forward_f32(const esper::PolicySpec* spec, const float* const* parameters,
                             const esper::PolicyCall<float>* call, int threads, void** network) {
  return esper::forward(spec, parameters, call, threads, network);
}
int esper_policy_forward_f64(const esper::PolicySpec* spec, const double* const* parameters,
                             const esper::PolicyCall<double>* call, int threads, void** network) {
  return esper::forward(spec, parameters, call, threads, network);
}

int esper_policy_again_f32(void* network, const esper::PolicyCall<float>* call, int threads) {
  return esper::again(network, call, threads);
}
int esper_policy_again_f64(void* network, const esper::PolicyCall<double>* call, int threads) {
  return esper::again(network, call, threads);
}

int esper_policy_backward_f32(void* network, const float* d_log_prob, const float* d_entropy,
                              const float* d_value, float* const* gradients, int threads) {
  return esper::backward(network, d_log_prob, d_entropy, d_value, gradients, threads);
}
int esper_policy_backward_f64(void* network, const double* d_log_prob, const double* d_entropy,
                              const double* d_value, double* const* gradients, int threads) {
  return esper::backward(network, d_log_prob, d_entropy, d_value, gradients, threads);
}

void esper_policy_free_f32(void* network) {
  delete static_cast<esper::PolicyNetwork<float>*>(network);
}
void esper_policy_free_f64(void* network) {
  delete static_cast<esper::PolicyNetwork<double>*>(network);
}

}  // extern "C"
