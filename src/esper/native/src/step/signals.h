// Signals of a seed; see tolaria.health and SeedSignals.entered.

#pragma once

#include <algorithm>
#include <cmath>

#include "seeds.h"

namespace esper::step {

struct Health {
  float value;
  bool exploding;
};

// Health from the first `count` norms of parameter tensors.
// Twin of tolaria.health.gradient_health.
inline Health gradient_health(const StepSpec& spec, const float* norms, int64_t count) {
  int64_t vanishing = 0, exploding = 0;
  bool infinite = false;
  for (int64_t i = 0; i < count; ++i) {
    const bool finite = std::isfinite(norms[i]);
    infinite |= !finite;
    vanishing += norms[i] < spec.vanishing_norm;
    exploding += !finite || norms[i] > spec.exploding_norm;
  }
  const float vanished = float(vanishing) / float(count), exploded = float(exploding) / float(count);
  const float health =
      1.0f - spec.vanishing_weight * vanished - spec.exploding_weight * exploded;
  return {infinite ? 0.0f : std::max(health, 0.0f), exploding > 0};
}

// Updates the signals after an action that moved the seed from stage `before` to `after`.
// Twin of kasmina.seeds.SeedSignals.entered.
inline void enter(const StepSpec& spec, Signals& signals, int64_t before, int64_t after,
                  float accuracy) {
  if (!spec.living[after] || before == after) return;
  const bool born = before == spec.stage.dormant;
  if (born) signals = kNothingMeasured;
  signals.baseline = accuracy;
  if (born) signals.birth_accuracy = accuracy;
}

// Twin of tolaria.health._smoothed_ratio.
inline float smoothed_ratio(const StepSpec& spec, float previous, float seed_norm, float host_norm,
                            int64_t parameters) {
  const float seed = seed_norm / std::sqrt(float(std::max(parameters, int64_t(1))));
  const float ratio = seed / (host_norm / spec.host_root + spec.ratio_floor);
  const float smoothed = spec.ratio_kept * previous + spec.ratio_new * ratio;
  return std::isfinite(smoothed) ? smoothed : ratio;
}

// The signals of slot s of row n after an epoch in which its seed was in `stage`.
// Twin of tolaria.health.updated_signals.
inline Signals measured(const StepSpec& spec, const PassCall& call, const Signals& previous,
                        int64_t n, int64_t s, int64_t stage, int64_t blueprint,
                        int64_t parameters) {
  const int64_t place = n * spec.slots + s;
  const Health health =
      gradient_health(spec, call.tensor_norms[s] + n * spec.tensors[s],
                      spec.tensor_counts[s * spec.blueprints + blueprint]);
  const bool known = spec.computing[stage] && !std::isnan(call.train_loss[n]);
  Signals now = previous;
  now.contribution = call.contribution[place];
  const float change = now.contribution - previous.contribution;
  const float velocity =
      spec.velocity_kept * previous.contribution_velocity + spec.velocity_new * change;
  now.contribution_velocity = std::isfinite(velocity) ? velocity : 0.0f;
  now.previous_health = previous.health;
  now.health = known ? health.value : kUnknown;
  now.exploding = known && health.exploding;
  now.gradient_norm = call.seed_norm[place];
  now.gradient_ratio = smoothed_ratio(spec, previous.gradient_ratio, now.gradient_norm,
                                      call.host_norm[n], parameters);
  now.improvement = call.accuracy[n] - previous.baseline;
  return now;
}

}  // namespace esper::step
