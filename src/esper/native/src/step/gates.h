// Gates for advancing a seed, and the legal ops of each slot; see kasmina.gates.

#pragma once

#include <cmath>

#include "seeds.h"

namespace esper::step {

// Gate G0: whether the environment may germinate another seed.
// Twin of kasmina.gates.open_gates.
inline bool may_germinate(const StepSpec& spec, const int64_t* stages) {
  int64_t living = 0;
  bool developing = false;
  for (int64_t s = 0; s < spec.slots; ++s) {
    living += spec.living[stages[s]] != 0;
    developing |= spec.developing[stages[s]] != 0;
  }
  return living < spec.rules.max_seeds && !(spec.rules.one_at_a_time && developing);
}

// Gates G1 to G3. A comparison with NaN is false.
// Twin of kasmina.gates.open_gates.
inline bool may_advance(const StepSpec& spec, const Seed& seed, const Signals& signals,
                        bool healthy) {
  const Rules& rules = spec.rules;
  if (seed.stage == spec.stage.germinated) return true;
  if (seed.stage == spec.stage.training) {
    return seed.stage_age >= rules.training_age && healthy &&
           (!rules.strict || (signals.improvement >= spec.least_improvement &&
                              signals.gradient_ratio >= spec.least_gradient_ratio));
  }
  return seed.stage == spec.stage.blending && seed.ramp_mode == spec.mode.hold &&
         std::abs(seed.alpha - 1.0f) <= spec.tolerance && seed.ramp_target >= spec.full &&
         (!rules.strict || seed.stage_age >= rules.blending_age);
}

// Gate G5.
// Twin of kasmina.gates.open_gates.
inline bool may_fossilise(const StepSpec& spec, const Seed& seed, const Signals& signals,
                          bool healthy) {
  return seed.stage == spec.stage.holding && std::isfinite(signals.contribution) && healthy &&
         (!spec.rules.strict || signals.contribution >= spec.least_contribution);
}

// `legal` points to the slot's element for the first op, in the array [ops, S] of its row.
// Twin of kasmina.gates.legal_slots.
inline void mark_legal(const StepSpec& spec, const Seed& seed, const Signals& signals,
                       bool germinates, uint8_t* legal) {
  const Ops& op = spec.op;
  const bool healthy = signals.health >= spec.healthy && !signals.exploding;
  const bool at_rest = seed.ramp_mode == spec.mode.hold;
  const auto mark = [&](int64_t which, bool may) { legal[which * spec.slots] = may; };
  mark(op.wait, true);
  mark(op.germinate, germinates && seed.stage == spec.stage.dormant);
  mark(op.set_alpha_target, spec.blended[seed.stage] && at_rest);
  mark(op.prune, spec.prunable[seed.stage] && seed.age >= spec.rules.prune_age && at_rest);
  mark(op.fossilise, may_fossilise(spec, seed, signals, healthy));
  mark(op.advance, may_advance(spec, seed, signals, healthy));
}

}  // namespace esper::step
