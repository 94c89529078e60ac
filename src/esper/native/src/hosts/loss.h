// Cross-entropy of logits [classes, 1, 1, lanes], and the scores of a batch.

#pragma once

#include <cmath>
#include <cstdint>

#include "maps.h"

namespace esper::hosts {

// Sums over images.
template <class T>
struct Score {
  T loss = 0, hits = 0, expected = 0;  // nats, correct predictions, probability of the true class

  void add(const Score& other) {
    loss += other.loss;
    hits += other.hits;
    expected += other.expected;
  }
};

// The score of a batch. Replaces the logits by their softmax.
// Twin of tolaria.backends.torch._ScoreSums.
template <class T>
Score<T> score_batch(Maps<T> logits, const int64_t* labels) {
  const int classes = logits.channels, lanes = logits.lanes;
  Score<T> score;
  for (int lane = 0; lane < lanes; lane += kLanes<T>) {
    Vector<T> most = load(logits.data + lane);
    for (int k = 1; k < classes; ++k) {
      const Vector<T> other = load(logits.channel(k) + lane);
      most = ((other > most) | (other != other)) ? other : most;
    }
    T truth[kLanes<T>];
    for (int i = 0; i < kLanes<T> && lane + i < logits.images; ++i) {
      const T* mine = logits.data + lane + i;
      truth[i] = mine[labels[lane + i] * lanes] - most[i];
      int best = 0;
      // The first maximum, where NaN is larger than any number.
      const auto is_most = [&](T logit) { return logit == most[i] || logit != logit; };
      while (best < classes && !is_most(mine[ptrdiff_t(best) * lanes])) ++best;
      score.hits += best == labels[lane + i] ? T(1) : T(0);
    }
    Vector<T> total = {};
    for (int k = 0; k < classes; ++k) {
      const Vector<T> weight = exponential<T>(load(logits.channel(k) + lane) - most);
      store(logits.channel(k) + lane, weight);
      total += weight;
    }
    for (int k = 0; k < classes; ++k)
      store(logits.channel(k) + lane, load(logits.channel(k) + lane) / total);
    for (int i = 0; i < kLanes<T> && lane + i < logits.images; ++i) {
      const T log_likelihood = truth[i] - std::log(total[i]);
      score.loss -= log_likelihood;
      score.expected += logits.data[labels[lane + i] * lanes + lane + i];
    }
  }
  return score;
}

// Gradient of the mean cross-entropy with respect to the logits; overwrites the softmax.
// Twin of tolaria.backends.torch.cross_entropy.
template <class T>
void cross_entropy_back(Maps<T> softmax, const int64_t* labels) {
  for (int i = 0; i < softmax.images; ++i) softmax.data[labels[i] * softmax.lanes + i] -= T(1);
  const T share = T(1) / T(softmax.images);
  transform(softmax, [share](Vector<T> value) { return value * share; });
  clear_tail(softmax);
}

}  // namespace esper::hosts
