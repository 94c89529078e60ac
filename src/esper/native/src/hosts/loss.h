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

// The score of a batch. Replaces the logits by their softmax. `labels` are [predictions, lanes],
// negative in lanes without an image.
// Twin of tolaria.backends.torch._ScoreSums.
template <class T>
Score<T> score_batch(Maps<T> logits, const int64_t* labels) {
  const int classes = logits.channels;
  const ptrdiff_t plane = logits.plane();
  Score<T> score;
  for (ptrdiff_t lane = 0; lane < plane; lane += kLanes<T>) {
    // The first maximum, where NaN is larger than any number.
    Vector<T> most = load(logits.data + lane), best = {};
    for (int k = 1; k < classes; ++k) {
      const Vector<T> other = load(logits.channel(k) + lane);
      const auto above = (other > most) | ((other != other) & (most == most));
      most = above ? other : most;
      best = above ? broadcast(T(k)) : best;
    }
    T truth[kLanes<T>];
    for (int i = 0; i < kLanes<T>; ++i) {
      const int64_t label = labels[lane + i];
      if (label < 0) continue;
      truth[i] = logits.data[label * plane + lane + i] - most[i];
      score.hits += best[i] == T(label) ? T(1) : T(0);
    }
    Vector<T> total = {};
    for (int k = 0; k < classes; ++k) {
      const Vector<T> weight = exponential<T>(load(logits.channel(k) + lane) - most);
      store(logits.channel(k) + lane, weight);
      total += weight;
    }
    const Vector<T> inverse = T(1) / total;
    for (int k = 0; k < classes; ++k)
      store(logits.channel(k) + lane, load(logits.channel(k) + lane) * inverse);
    for (int i = 0; i < kLanes<T>; ++i) {
      if (labels[lane + i] < 0) continue;
      const T log_likelihood = truth[i] - std::log(total[i]);
      score.loss -= log_likelihood;
      score.expected += logits.data[labels[lane + i] * plane + lane + i];
    }
  }
  return score;
}

// Gradient of the mean cross-entropy with respect to the logits; overwrites the softmax.
// Twin of tolaria.backends.torch.cross_entropy.
template <class T>
void cross_entropy_back(Maps<T> softmax, const int64_t* labels) {
  for (ptrdiff_t i = 0; i < softmax.plane(); ++i)
    if (labels[i] >= 0) softmax.data[labels[i] * softmax.plane() + i] -= T(1);
  const T share = T(1) / (T(softmax.images) * T(softmax.pixels()));
  transform(softmax, [share](Vector<T> value) { return value * share; });
  clear_tail(softmax);
}

}  // namespace esper::hosts
