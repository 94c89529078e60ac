// A seed and what was measured of it, out of the blocks in which fields lie one after another.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "calls.h"

namespace esper {

constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();

// See kasmina.seeds.SeedState.
struct Seed {
  int64_t stage, blueprint, style, tempo, ramp_mode, ramp_curve, ramp_steps, ramp_done, age, stage_age;
  float goal, alpha, alpha_velocity, ramp_start, ramp_target;
  bool pruning;
};

// The order of the blocks.
constexpr int64_t Seed::*kNumbers[] = {
    &Seed::stage,      &Seed::blueprint,  &Seed::style,     &Seed::tempo, &Seed::ramp_mode,
    &Seed::ramp_curve, &Seed::ramp_steps, &Seed::ramp_done, &Seed::age,   &Seed::stage_age};
constexpr float Seed::*kAmounts[] = {&Seed::goal, &Seed::alpha, &Seed::alpha_velocity,
                                     &Seed::ramp_start, &Seed::ramp_target};

// See kasmina.seeds.SeedSignals.
struct Signals {
  float contribution, contribution_velocity, health, previous_health, gradient_norm, gradient_ratio;
  float baseline, improvement, birth_accuracy;
  bool exploding;
};

constexpr float Signals::*kSignals[] = {
    &Signals::contribution,   &Signals::contribution_velocity, &Signals::health,
    &Signals::previous_health, &Signals::gradient_norm,        &Signals::gradient_ratio,
    &Signals::baseline,       &Signals::improvement,           &Signals::birth_accuracy};

constexpr Signals kNothingMeasured = {kUnknown, 0.0f,     kUnknown, kUnknown, kUnknown,
                                      kUnknown, kUnknown, kUnknown, kUnknown, false};

// `size` is the number of places of a field.
inline Seed load(const SeedBlocks& blocks, ptrdiff_t size, ptrdiff_t place) {
  Seed seed;
  const int64_t* numbers = blocks.numbers + place;
  for (const auto field : kNumbers) seed.*field = *numbers, numbers += size;
  const float* amounts = blocks.amounts + place;
  for (const auto field : kAmounts) seed.*field = *amounts, amounts += size;
  seed.pruning = blocks.flags[place] != 0;
  return seed;
}

inline void store(const Seed& seed, const SeedBlocks& blocks, ptrdiff_t size, ptrdiff_t place) {
  int64_t* numbers = blocks.numbers + place;
  for (const auto field : kNumbers) *numbers = seed.*field, numbers += size;
  float* amounts = blocks.amounts + place;
  for (const auto field : kAmounts) *amounts = seed.*field, amounts += size;
  blocks.flags[place] = seed.pruning;
}

inline Signals load(const SignalBlocks& blocks, ptrdiff_t size, ptrdiff_t place) {
  Signals signals;
  const float* amounts = blocks.amounts + place;
  for (const auto field : kSignals) signals.*field = *amounts, amounts += size;
  signals.exploding = blocks.flags[place] != 0;
  return signals;
}

inline void store(const Signals& signals, const SignalBlocks& blocks, ptrdiff_t size,
                  ptrdiff_t place) {
  float* amounts = blocks.amounts + place;
  for (const auto field : kSignals) *amounts = signals.*field, amounts += size;
  blocks.flags[place] = signals.exploding;
}

}  // namespace esper
