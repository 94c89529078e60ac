// A categorical distribution over the legal options of a head.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace esper::policy {

// `logits` are `step` elements apart; `normalise` replaces them by log-probabilities. An illegal option
// has probability 0 and the logit kMasked, which is finite: -infinity could lead to NaN.
template <class T>
struct Categorical {
  static constexpr T kMasked = T(std::numeric_limits<float>::lowest());

  T* logits;
  ptrdiff_t step;
  const uint8_t* legal;
  int count;

  T& at(int i) const { return logits[i * step]; }

  // Twin of tamiyo.policy.action_masks.MaskedCategorical.__init__.
  void normalise() const {
    T most = kMasked;
    for (int i = 0; i < count; ++i)
      if (legal[i] && at(i) > most) most = at(i);
    T total = 0;
    for (int i = 0; i < count; ++i)
      if (legal[i]) total += std::exp(at(i) - most);
    const T whole = most + std::log(total);
    for (int i = 0; i < count; ++i) at(i) = (legal[i] ? at(i) : kMasked) - whole;
  }

  // Entropy in nats.
  // Twin of tamiyo.policy.action_masks.MaskedCategorical.entropy.
  T entropy() const {
    T total = 0;
    for (int i = 0; i < count; ++i)
      if (legal[i]) total -= std::exp(at(i)) * at(i);
    return total;
  }

  // Whether more than one option is legal.
  bool free() const {
    int options = 0;
    for (int i = 0; i < count; ++i) options += legal[i] != 0;
    return options > 1;
  }

  // Draws a legal option by the Gumbel-max trick from `uniform`, numbers in (0, 1). If `uniform` is
  // null, returns the most probable legal option.
  // Twin of tamiyo.policy.action_masks.MaskedCategorical.sample.
  int choose(const float* uniform) const {
    int best = 0;
    T most = -std::numeric_limits<T>::infinity();
    for (int i = 0; i < count; ++i) {
      if (!legal[i]) continue;
      const T value = uniform ? at(i) - std::log(-std::log(T(uniform[i]))) : at(i);
      if (value > most) {
        most = value;
        best = i;
      }
    }
    return best;
  }

  // Replaces the log-probabilities by the gradient of the logits, given the gradients of the
  // log-probability of `taken` and of the entropy.
  void backward(int taken, T d_log_prob, T d_entropy) const {
    const T whole = entropy();
    for (int i = 0; i < count; ++i) {
      if (!legal[i]) {
        at(i) = 0;
        continue;
      }
      const T p = std::exp(at(i));
      at(i) = d_log_prob * (T(i == taken) - p) - d_entropy * p * (at(i) + whole);
    }
  }

  void clear() const {
    for (int i = 0; i < count; ++i) at(i) = 0;
  }
};

}  // namespace esper::policy
