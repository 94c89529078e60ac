// Effects of an action and of an environment step on a seed; see kasmina.lifecycle.

#pragma once

#include <algorithm>
#include <cmath>

#include "seeds.h"

namespace esper::step {

// Moves the seed to `stage`; a change of stage resets its stage age.
// Twin of kasmina.lifecycle._in_stage.
inline void enter(Seed& seed, int64_t stage) {
  if (seed.stage != stage) seed.stage_age = 0;
  seed.stage = stage;
}

// Twin of kasmina.lifecycle._at_rest.
inline void stop(const StepSpec& spec, Seed& seed) {
  seed.alpha = 0;
  seed.ramp_mode = spec.mode.hold;
  seed.pruning = false;
}

// A ramp of 0 steps, or to the current alpha, ends immediately.
// Twin of kasmina.lifecycle._ramp.
inline void begin_ramp(const StepSpec& spec, Seed& seed, float target, int64_t steps,
                       int64_t curve) {
  const float alpha = seed.alpha;
  const bool jump = steps == 0 || std::abs(target - alpha) <= spec.tolerance;
  seed.ramp_start = alpha;
  seed.ramp_target = target;
  seed.ramp_mode = jump ? spec.mode.hold : target > alpha ? spec.mode.up : spec.mode.down;
  seed.ramp_curve = curve;
  seed.ramp_steps = steps;
  seed.ramp_done = 0;
  if (jump) seed.alpha = target;
}

// Applies a legal action; `choice` [heads] holds the option of each head.
// Twin of kasmina.lifecycle._done.
inline void operate(const StepSpec& spec, Seed& seed, const int64_t* choice) {
  const Heads& head = spec.head;
  const int64_t op = choice[head.op], stage = seed.stage;
  const float target = spec.targets[choice[head.alpha_target]];
  const int64_t steps = spec.speeds[choice[head.alpha_speed]];
  const bool retargets = op == spec.op.set_alpha_target, prunes = op == spec.op.prune;
  const bool slowly = prunes && steps > 0 && seed.alpha > 0;
  const bool blends = op == spec.op.advance && stage == spec.stage.training;
  const bool lowered =
      stage == spec.stage.holding && (slowly || (retargets && target < spec.full));

  if (op == spec.op.germinate) {
    seed.blueprint = choice[head.blueprint];
    seed.style = choice[head.style];
    seed.tempo = spec.tempos[choice[head.tempo]];
    seed.goal = target;
  }
  if (blends) {
    begin_ramp(spec, seed, seed.goal, seed.tempo, spec.first_curve[seed.style]);
  } else if (retargets || slowly) {
    begin_ramp(spec, seed, slowly ? 0.0f : target, steps, choice[head.alpha_curve]);
  }
  if (slowly) seed.pruning = true;
  const int64_t moved = slowly ? stage : spec.moved[op * spec.stage_count + stage];
  enter(seed, lowered ? spec.stage.blending : moved);
  if (prunes && !slowly) stop(spec, seed);
}

// Whether the action of row n is legal; checks ranges first, so options are safe as indices.
// Twin of kasmina.lifecycle.apply.
inline bool is_legal(const StepSpec& spec, const ActCall& call, int64_t n) {
  const int64_t* choice = call.actions + n * spec.heads;
  for (int64_t h = 0; h < spec.heads; ++h)
    if (choice[h] < 0 || choice[h] > spec.last_option[h]) return false;
  const int64_t op = choice[spec.head.op], slot = choice[spec.head.slot];
  if (!call.legal[(n * spec.ops + op) * spec.slots + slot]) return false;
  return op != spec.op.germinate ||
         spec.kinds[slot * spec.blueprints + choice[spec.head.blueprint]];
}

// Twin of kasmina.lifecycle.apply.
inline void act(const StepSpec& spec, ActCall& call) {
  call.germinated = call.fossilised = 0;
  const int64_t slots = spec.slots, size = spec.rows * slots;
  for (int64_t i = 0; i < size; ++i) store(load(call.before, size, i), call.after, size, i);
  for (int64_t n = 0; n < spec.rows; ++n) {
    const int64_t* choice = call.actions + n * spec.heads;
    call.success[n] = is_legal(spec, call, n);
    if (!call.success[n] || choice[spec.head.op] == spec.op.wait) continue;
    const int64_t place = n * slots + choice[spec.head.slot];
    Seed seed = load(call.after, size, place);
    const int64_t before = seed.stage;
    operate(spec, seed, choice);
    store(seed, call.after, size, place);
    if (seed.stage == before) continue;
    call.germinated += seed.stage == spec.stage.germinated;
    call.fossilised += seed.stage == spec.stage.fossilised;
  }
}

// Twin of kasmina.lifecycle.roll_back.
inline void roll_back(const StepSpec& spec, Seed& seed) {
  if (!spec.prunable[seed.stage]) return;
  enter(seed, spec.stage.pruned);
  stop(spec, seed);
}

// Completed fraction of a ramp at `time` in [0, 1].
// Twin of kasmina.lifecycle.progress.
inline float progress(const StepSpec& spec, int64_t curve, float time) {
  if (curve == spec.curve.linear) return time;
  if (curve == spec.curve.cosine) return 0.5f * (1.0f - std::cos(spec.pi * time));
  const float* sigmoid = spec.sigmoids + 3 * curve;
  const float risen = 1.0f / (1.0f + std::exp(-(sigmoid[0] * (time - 0.5f))));
  return (risen - sigmoid[1]) / sigmoid[2];
}

// Advances a seed by one environment step.
// Twin of kasmina.lifecycle.tick.
inline void tick(const StepSpec& spec, Seed& seed) {
  const Stages& stages = spec.stage;
  const int64_t stage = seed.stage;
  if (stage == stages.resetting) {
    seed = Seed{};
    seed.stage = stages.dormant;
    return;
  }
  const float before = seed.alpha;
  // Only seeds in BLENDING have another mode.
  const bool ramping = seed.ramp_mode != spec.mode.hold;
  seed.ramp_done += ramping;
  const bool finished = ramping && seed.ramp_done >= seed.ramp_steps;
  if (finished) {
    seed.alpha = seed.ramp_target;
    seed.ramp_mode = spec.mode.hold;
  } else if (ramping) {
    const float time = float(seed.ramp_done) / float(std::max(seed.ramp_steps, int64_t(1)));
    const float part = progress(spec, seed.ramp_curve, time);
    seed.alpha = seed.ramp_start + (seed.ramp_target - seed.ramp_start) * part;
  }
  seed.alpha_velocity = seed.alpha - before;
  seed.age += spec.living[stage] != 0;
  seed.stage_age += stage != stages.dormant;
  if (stage == stages.pruned) enter(seed, stages.embargoed);
  if (stage == stages.embargoed && seed.stage_age >= spec.rules.embargo)
    enter(seed, stages.resetting);
  if (finished && seed.pruning) {
    enter(seed, stages.pruned);
    stop(spec, seed);
  }
}

}  // namespace esper::step
