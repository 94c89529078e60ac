// The end of a step: updates alphas, ages, signals and legal ops.

#pragma once

#include "gates.h"
#include "lifecycle.h"
#include "signals.h"

namespace esper::step {

// Twin of tolaria.engine.Engine.seed_parameters.
inline int64_t seed_parameters(const StepSpec& spec, int64_t s, const Seed& seed) {
  if (!spec.living[seed.stage]) return 0;
  return spec.parameters[(s * spec.blueprints + seed.blueprint) * spec.styles + seed.style];
}

inline void pass_slot(const StepSpec& spec, const PassCall& call, int64_t n, int64_t s) {
  const int64_t size = spec.rows * spec.slots, place = n * spec.slots + s;
  const bool rolled_back = call.rolled_back && call.rolled_back[n];
  const Seed acted = load(call.acted, size, place);
  Seed lived = acted, seed = acted;
  tick(spec, seed);
  if (rolled_back) {
    roll_back(spec, lived);
    roll_back(spec, seed);
  }
  const int64_t parameters = seed_parameters(spec, s, seed);
  call.parameters[place] = parameters;
  call.seed_parameters_max[place] = std::max(parameters, call.seed_parameters[place]);

  Signals previous = load(call.previous, size, place);
  enter(spec, previous, call.before.numbers[place], acted.stage, call.accuracy_before[n]);
  const Signals now = measured(spec, call, previous, n, s, lived.stage, lived.blueprint,
                               call.seed_parameters_max[place]);
  call.birth_accuracy[place] = now.birth_accuracy;
  store(seed, call.after, size, place);
  store(spec.living[seed.stage] ? now : kNothingMeasured, call.signals, size, place);
}

// Twin of tamiyo.step_functions.TorchStep.advance_lifecycle.
inline void advance_lifecycle(const StepSpec& spec, const PassCall& call) {
  const int64_t slots = spec.slots, size = spec.rows * slots;
  for (int64_t n = 0; n < spec.rows; ++n) {
    for (int64_t s = 0; s < slots; ++s) pass_slot(spec, call, n, s);
    const bool germinates = may_germinate(spec, call.after.numbers + n * slots);
    for (int64_t s = 0; s < slots; ++s) {
      const int64_t place = n * slots + s;
      mark_legal(spec, load(call.after, size, place), load(call.signals, size, place), germinates,
                 call.legal + n * spec.ops * slots + s);
    }
  }
}

}  // namespace esper::step
