// Detects hosts that diverge or collapse; see tolaria.governor.

#pragma once

#include <algorithm>
#include <cmath>

#include "calls.h"

namespace esper::step {

// Number, mean and standard deviation of the losses in the history.
struct Remembered {
  int64_t count;
  float mean, deviation;
};

inline Remembered remembered(const float* losses, int64_t history) {
  int64_t count = 0;
  float total = 0, squares = 0;
  for (int64_t i = 0; i < history; ++i) {
    if (std::isnan(losses[i])) continue;
    ++count;
    total += losses[i];
  }
  count = std::max(count, int64_t(1));
  const float mean = total / float(count);
  for (int64_t i = 0; i < history; ++i) {
    if (std::isnan(losses[i])) continue;
    const float distance = losses[i] - mean;
    squares += distance * distance;
  }
  return {count, mean, std::sqrt(squares / float(count))};
}

inline bool is_finite(const CheckCall& call, int64_t n) {
  bool finite = std::isfinite(call.loss[n]) && std::isfinite(call.train_loss[n]) &&
                std::isfinite(call.host_norm[n]);
  for (int64_t i = n * call.slots; i < (n + 1) * call.slots; ++i)
    finite &= !call.computes[call.stage[i]] || std::isfinite(call.seed_norm[i]);
  return finite;
}

// Twin of tolaria.governor.DivergenceDetector.check.
inline void check_row(const CheckCall& call, int64_t n) {
  const float loss = call.loss[n];
  float* losses = call.losses + n * call.history;
  const Remembered past = remembered(losses, call.history);
  const bool experienced = past.count >= call.least_history;
  const bool collapsed = experienced && past.mean < call.collapse_mean &&
                         std::abs(loss - call.guessing) < call.collapse_band &&
                         call.expected[n] <= call.collapse_expected;
  const bool runaway = experienced && loss > call.runaway_loss &&
                       loss > past.mean + call.runaway_deviations * past.deviation &&
                       loss > call.runaway_factor * past.mean;
  int64_t strikes = runaway ? call.strikes[n] + 1 : 0;

  const Reasons& reasons = call.reasons;
  const int64_t reason = !is_finite(call, n)                ? reasons.not_finite
                         : collapsed                        ? reasons.collapse
                         : strikes >= call.strikes_allowed ? reasons.runaway
                                                            : reasons.none;
  const bool panic = reason != reasons.none;
  call.reason[n] = reason;
  call.strikes[n] = panic ? 0 : strikes;
  call.healthy[n] = !panic && !runaway;
  if (!call.healthy[n]) return;
  std::copy(losses + 1, losses + call.history, losses);
  losses[call.history - 1] = loss;
}

inline void check(const CheckCall& call) {
  for (int64_t n = 0; n < call.rows; ++n) check_row(call, n);
}

}  // namespace esper::step
