// Functions that Python calls, each for float and for double. They return 0 on success.

#include <memory>

#include "guarded.h"
#include "network.h"

namespace esper::policy {
namespace {

// If `network` is not null, *network receives the policy network for `backward`; otherwise the policy
// network is freed at once.
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
int forward_again(void* network, const PolicyCall<T>* call, int threads) {
  return guarded([&] { static_cast<PolicyNetwork<T>*>(network)->forward_again(*call, threads); });
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
}  // namespace esper::policy

#define ESPER_FUNCTIONS(T, SUFFIX)                                                               \
  int esper_policy_forward_##SUFFIX(const esper::policy::PolicySpec* spec,                       \
                                    const T* const* parameters,                                  \
                                    const esper::policy::PolicyCall<T>* call, int threads,       \
                                    void** network) {                                            \
    return esper::policy::forward(spec, parameters, call, threads, network);                     \
  }                                                                                              \
  int esper_policy_forward_again_##SUFFIX(void* network,                                         \
                                          const esper::policy::PolicyCall<T>* call,            \
                                  int threads) {                                                 \
    return esper::policy::forward_again(network, call, threads);                                 \
  }                                                                                              \
  int esper_policy_backward_##SUFFIX(void* network, const T* d_log_prob, const T* d_entropy,     \
                                     const T* d_value, T* const* gradients, int threads) {       \
    return esper::policy::backward(network, d_log_prob, d_entropy, d_value, gradients, threads); \
  }                                                                                              \
  void esper_policy_free_##SUFFIX(void* network) {                                               \
    delete static_cast<esper::policy::PolicyNetwork<T>*>(network);                               \
  }

extern "C" {
ESPER_FUNCTIONS(float, f32)
ESPER_FUNCTIONS(double, f64)
}
