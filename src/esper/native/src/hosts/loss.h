// Cross-entropy of logits [classes, 1, predictions, lanes], and the scores of a batch.

#pragma once

#include <cmath>
#include <cstdint>

#include "maps.h"

namespace esper::hosts {

// Sums over predictions.
template <class T>
struct Score {
  T loss = 0, hits = 0, expected = 0;  // nats, correct predictions, probability of the true class

  void add(const Score& other) {
    loss += other.loss;
    hits += other.hits;
    expected += other.expected;
  }
};

// The score of a batch. `labels` are [predictions, lanes], negative in lanes without an image.
// Overwrites the logits: with the gradient of the mean cross-entropy, if that is needed. Several
// registers at a time, because the comparisons of one wait for each other.
// Twin of tolaria.backends.torch._ScoreSums.
// Twin of tolaria.backends.torch.cross_entropy.
template <class T>
Score<T> score_batch(Maps<T> logits, const int64_t* labels, bool needs_gradient) {
  const ptrdiff_t plane = logits.plane();
  const T share = T(1) / (T(logits.images) * T(logits.pixels()));
  Score<T> score;
  in_registers(int(plane / kLanes<T>), [&](auto count, int first) {
    T* const block = logits.data + ptrdiff_t(first) * kLanes<T>;
    const int64_t* const truth = labels + ptrdiff_t(first) * kLanes<T>;
    const auto each_class = [&](auto f) {
      for (int k = 0; k < logits.channels; ++k)
        for (int n = 0; n < count(); ++n) f(k, n, block + k * plane + n * kLanes<T>);
    };
    const auto each_truth = [&](auto f) {
      for (int i = 0; i < count() * kLanes<T>; ++i)
        if (truth[i] >= 0) f(i, block[truth[i] * plane + i], i / kLanes<T>, i % kLanes<T>);
    };
    // The first maximum, where NaN is larger than any number, and not at most any.
    Vector<T> most[count()], best[count()] = {}, total[count()] = {}, inverse[count()];
    for (int n = 0; n < count(); ++n) most[n] = load(block + n * kLanes<T>);
    each_class([&](int k, int n, const T* logit) {
      const Vector<T> other = load(logit);
      const auto above = ~(other <= most[n]) & (most[n] == most[n]);
      most[n] = above ? other : most[n];
      best[n] = above ? broadcast(T(k)) : best[n];
    });
    T below[count() * kLanes<T>], softmax[count() * kLanes<T>];
    each_truth([&](int i, T logit, int n, int lane) { below[i] = logit - most[n][lane]; });
    each_class([&](int, int n, T* logit) {
      const Vector<T> weight = exponential<T>(load(logit) - most[n]);
      store(logit, weight);
      total[n] += weight;
    });
    for (int n = 0; n < count(); ++n) inverse[n] = T(1) / total[n];
    each_truth([&](int i, T weight, int n, int lane) {
      softmax[i] = weight * inverse[n][lane];
      score.loss -= below[i] - std::log(total[n][lane]);
      score.hits += best[n][lane] == T(truth[i]) ? T(1) : T(0);
      score.expected += softmax[i];
    });
    if (!needs_gradient) return;
    each_class([&](int, int n, T* weight) { store(weight, load(weight) * inverse[n] * share); });
    each_truth([&](int i, T& gradient, int, int) { gradient = (softmax[i] - T(1)) * share; });
  });
  if (needs_gradient) clear_tail(logits);
  return score;
}

}  // namespace esper::hosts
