// Loads and stores a seed and its signals, whose fields are in separate blocks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>

#include "calls.h"

namespace esper::step {

constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();

// Order of the fields in the blocks.
constexpr int64_t Seed::*kNumbers[] = {
    &Seed::stage,      &Seed::blueprint,  &Seed::style,     &Seed::tempo, &Seed::ramp_mode,
    &Seed::ramp_curve, &Seed::ramp_steps, &Seed::ramp_done, &Seed::age,   &Seed::stage_age};
constexpr float Seed::*kAmounts[] = {&Seed::goal, &Seed::alpha, &Seed::alpha_velocity,
                                     &Seed::ramp_start, &Seed::ramp_target};

constexpr float Signals::*kSignals[] = {
    &Signals::contribution,   &Signals::contribution_velocity, &Signals::health,
    &Signals::previous_health, &Signals::gradient_norm,        &Signals::gradient_ratio,
    &Signals::baseline,       &Signals::improvement,           &Signals::birth_accuracy};

// Fails if a field of calls.h is missing above and so would not be copied.
static_assert(sizeof(Seed) == sizeof(int64_t) * std::size(kNumbers) +
                                  sizeof(float) * (std::size(kAmounts) + 1));
static_assert(sizeof(Signals) == sizeof(float) * (std::size(kSignals) + 1));

constexpr Signals kNothingMeasured = {kUnknown, 0.0f,     kUnknown, kUnknown, kUnknown,
                                      kUnknown, kUnknown, kUnknown, kUnknown, false};

// `size` is the number of elements of a field, `place` the index of the seed in it.
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

}  // namespace esper::step
