// Features of environments and slots for the policy; see tamiyo.policy.features.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "seeds.h"

namespace esper::step {

// Thrown if the number of features written differs from the number that Python expects.
struct OtherFeatures {};

// Writes the features of one row in order.
struct Writer {
  float *at, *end;

  Writer(float* begin, int64_t width) : at(begin), end(begin + width) {}
  void put(float value) { put(&value, 1); }
  void put(const float* values, int64_t count) {
    if (count > end - at) throw OtherFeatures();
    at = std::copy(values, values + count, at);
  }
  void close() const {
    if (at != end) throw OtherFeatures();
  }
};

// Twin of tamiyo.policy.features.symlog.
inline float symlog(float x) {
  return (x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f) * std::log1p(std::abs(x));
}

// -1 where the value is NaN.
// Twin of tamiyo.policy.features._known.
inline float known(float x) { return std::isnan(x) ? -1.0f : x; }

inline float or_zero(float x) { return std::isnan(x) ? 0.0f : x; }

// symlog of a norm; NaN counts as 0, infinity as `infinite_norm`.
inline float norm_feature(const StepSpec& spec, float x) {
  using Limits = std::numeric_limits<float>;
  if (x == Limits::infinity()) return symlog(spec.infinite_norm);
  return symlog(std::max(or_zero(x), Limits::lowest()));
}

// Twin of tamiyo.policy.features.host_features.
inline void host_features(const StepSpec& spec, const ObserveCall& call, int64_t n, Writer out) {
  const int64_t slots = spec.slots, history = spec.history;
  const float *losses = call.losses + n * (history + 1), *scores = call.expected + n * (history + 1);
  float shares[3] = {};
  int64_t living = 0, parameters = 0;
  for (int64_t i = n * slots; i < (n + 1) * slots; ++i) {
    const int64_t stage = call.seeds.numbers[i];
    for (int k = 0; k < 3; ++k) shares[k] += spec.share_table[3 * stage + k];
    living += spec.living[stage] != 0;
    parameters += call.seed_parameters[i];
  }
  out.put(call.part);
  out.put(call.remaining[n]);
  out.put(known(symlog(losses[history])));
  out.put(known(scores[history]));
  for (int64_t i = 0; i < history; ++i) out.put(known(symlog(losses[i])));
  for (int64_t i = 0; i < history; ++i) out.put(known(scores[i]));
  out.put(known(symlog(call.train_loss[n])));
  out.put(known(call.train_accuracy[n]));
  for (const float share : shares) out.put(share / float(slots));
  out.put(call.success[n]);
  out.put(spec.op_table + call.last_op[n] * spec.op_features, spec.op_features);
  out.put(spec.log_host);
  out.put(std::log1p(float(parameters) / spec.host_parameters));
  out.put(1.0f - float(living) / spec.most_seeds);
  out.put(call.rolled_back[n]);
  out.put(call.log_price[n]);
  out.close();
}

// Writes the features of a seed, which are 0 in an empty slot.
inline void seed_features(const StepSpec& spec, const Seed& seed, const Signals& signals,
                          int64_t parameters, Writer& out) {
  const auto time = [&](int64_t steps) { return float(steps) / spec.episode_length; };
  const auto points = [&](float score) { return spec.points * or_zero(score); };
  out.put(seed.alpha);
  out.put(seed.alpha_velocity);
  out.put(seed.goal);
  out.put(seed.ramp_target);
  out.put(spec.ramp_table + 2 * seed.ramp_mode, 2);
  out.put(time(seed.ramp_steps));
  out.put(time(seed.ramp_done));
  out.put(time(seed.tempo));
  out.put(spec.style_table + seed.style * spec.style_features, spec.style_features);
  out.put(points(signals.contribution));
  out.put(points(signals.contribution_velocity));
  out.put(std::isfinite(signals.contribution));
  out.put(norm_feature(spec, signals.gradient_norm));
  out.put(known(signals.health));
  out.put(known(signals.previous_health));
  out.put(signals.exploding);
  out.put(norm_feature(spec, signals.gradient_ratio));
  out.put(points(signals.improvement));
  out.put(time(seed.age));
  out.put(time(seed.stage_age));
  out.put(std::log1p(float(parameters) / spec.host_parameters));
}

// Writes what an empty slot shows; `measures` are those of the slot.
// Twin of tamiyo.policy.features._empty_slot_signals.
inline void empty_slot_signals(const StepSpec& spec, const float* measures, Writer& out) {
  const bool known = std::isfinite(measures[0]);
  out.put(known);
  for (int64_t i = 0; i < spec.slot_measures; ++i) {
    const float bounded = std::min(std::max(measures[i], spec.least_measure), spec.most_measure);
    const float value = i == spec.active_share ? measures[i] : std::log(bounded) / spec.measure_unit;
    out.put(known && !std::isnan(measures[i]) ? value : 0.0f);
  }
}

// Twin of tamiyo.policy.features.slot_features.
inline void slot_features(const StepSpec& spec, const ObserveCall& call, int64_t n, int64_t s,
                          Writer out) {
  const int64_t size = spec.rows * spec.slots, place = n * spec.slots + s;
  const Seed seed = load(call.seeds, size, place);
  const bool living = spec.living[seed.stage];
  call.blueprints[place] = living ? seed.blueprint : 0;
  out.put(living);
  out.put(spec.stage_table + seed.stage * spec.stage_features, spec.stage_features);
  float* const begin = out.at;
  seed_features(spec, seed, load(call.signals, size, place), call.seed_parameters[place], out);
  if (!living) std::fill(begin, out.at, 0.0f);
  float* const signals = out.at;
  empty_slot_signals(spec, call.slot_measures + place * spec.slot_measures, out);
  if (living) std::fill(signals, out.at, 0.0f);
  out.put(spec.place + 2 * s, 2);
  out.close();
}

// Twin of tamiyo.policy.features.critic_features.
inline void critic_features(const StepSpec& spec, const ObserveCall& call, int64_t n) {
  Writer critic(call.critic + 3 * n, 3);
  critic.put(call.twin_score[n]);
  critic.put(spec.points * (call.score[n] - call.twin_score[n]));
  critic.put(1.0f);
}

// Twin of simic.growth.step_functions.TorchStep.observe.
inline void observe(const StepSpec& spec, const ObserveCall& call) {
  for (int64_t n = 0; n < spec.environments; ++n) {
    host_features(spec, call, n, {call.host + n * spec.host_width, spec.host_width});
    for (int64_t s = 0; s < spec.slots; ++s)
      slot_features(spec, call, n, s,
                    {call.slot + (n * spec.slots + s) * spec.slot_width, spec.slot_width});
    critic_features(spec, call, n);
  }
}

}  // namespace esper::step
