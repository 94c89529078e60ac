// Functions that Python calls, each for float and for double. They return a code of guarded.h.

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

template <class T>
int free(void* network) {
  return guarded([&] { delete static_cast<PolicyNetwork<T>*>(network); });
}

}  // namespace
}  // namespace esper::policy

// Python reads the addresses of the functions from these variables.
#define ESPER_EXPORT(NAME)                                      \
  auto* esper_policy_##NAME##_f32 = &esper::policy::NAME<float>; \
  auto* esper_policy_##NAME##_f64 = &esper::policy::NAME<double>;

extern "C" {
ESPER_EXPORT(forward)
ESPER_EXPORT(forward_again)
ESPER_EXPORT(backward)
ESPER_EXPORT(free)
}
