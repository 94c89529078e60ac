// Arguments of the calls from Python. Python parses this file for the structures (see structures.py).
// Arrays are contiguous. N is the number of rows, S the number of slots of each.

#pragma once

#include <cstdint>

namespace esper::step {

// Column of each head in a row of actions.
struct Heads {
  int64_t op, slot, blueprint, style, tempo, alpha_target, alpha_speed, alpha_curve;
};

// Values of the enumerations in Python.
struct Ops {
  int64_t wait, germinate, set_alpha_target, prune, fossilise, advance;
};
struct Stages {
  int64_t dormant, germinated, training, blending, holding, fossilised, pruned, embargoed, resetting;
};
struct Modes {
  int64_t hold, up, down;
};
struct Curves {
  int64_t linear, cosine;
};
struct Reasons {
  int64_t none, not_finite, collapse, runaway;
};

struct Rules {
  int64_t training_age, blending_age, prune_age, embargo, max_seeds, strict, one_at_a_time;
};

// Constants of a shard, valid for all of its steps. The first rows are environments, the others twins.
struct StepSpec {
  int64_t rows, environments, slots;
  int64_t heads, ops, blueprints, styles, stage_count;
  int64_t stage_features, style_features, op_features;  // columns of the one-hot tables
  int64_t host_width, slot_width;                       // numbers of features
  int64_t slot_measures, active_share;  // numbers measured per slot; index of the one without logarithm
  int64_t history;                                      // number of past scores in the observation

  Heads head;
  Ops op;
  Stages stage;
  Modes mode;
  Curves curve;
  Rules rules;

  float tolerance, full;  // tolerance of alpha; 1 minus the tolerance
  float healthy, least_improvement, least_gradient_ratio, least_contribution;
  float vanishing_norm, exploding_norm, vanishing_weight, exploding_weight;
  float velocity_kept, velocity_new, ratio_kept, ratio_new, ratio_floor;
  float pi;
  float host_root;        // square root of the host's parameter count
  float host_parameters, log_host, most_seeds, episode_length;
  float points, infinite_norm;  // factor of differences of scores; replaces an infinite norm
  float least_measure, most_measure, measure_unit;  // bounds of a slot's measurement; logarithm's unit

  const int64_t* last_option;         // [heads], largest index of an option
  const int64_t* moved;               // [ops, stages], stage after a legal op
  const int64_t* first_curve;         // [styles], curve of the first blend
  const float* targets;               // alpha of each option
  const int64_t *speeds, *tempos;     // steps of each option
  const float* sigmoids;              // [curves, 3], see lifecycle.sigmoids
  const uint8_t *living, *computing;  // bool by stage
  const uint8_t *developing, *prunable, *blended;
  const uint8_t* kinds;               // [S, blueprints]
  const int64_t* parameters;          // [S, blueprints, styles]
  const int64_t* tensor_counts;       // [S, blueprints]
  const int64_t* tensors;             // [S], columns of the tables of norms
  const float *stage_table, *share_table, *ramp_table, *style_table, *op_table;
  const float* place;                 // [S, 2]
};

// See kasmina.seeds.SeedState.
struct Seed {
  int64_t stage, blueprint, style, tempo, ramp_mode, ramp_curve, ramp_steps, ramp_done, age, stage_age;
  float goal, alpha, alpha_velocity, ramp_start, ramp_target;
  bool pruning;
};

// See kasmina.seeds.SeedSignals.
struct Signals {
  float contribution, contribution_velocity, health, previous_health, gradient_norm, gradient_ratio;
  float baseline, improvement, birth_accuracy;
  bool exploding;
};

// The fields of many seeds; the fields of each type form a block, in order of declaration.
struct SeedBlocks {
  int64_t* numbers;  // [10, N, S]
  float* amounts;    // [5, N, S]
  uint8_t* flags;    // [1, N, S]
};

// Signals of the same seeds, likewise.
struct SignalBlocks {
  float* amounts;  // [9, N, S]
  uint8_t* flags;  // [1, N, S]
};

struct ActCall {
  SeedBlocks before;
  const int64_t* actions;          // [N, heads]
  const uint8_t* legal;            // [N, ops, S]
  SeedBlocks after;
  uint8_t* success;                // [N]
  int64_t germinated, fossilised;  // number of seeds in this call
};

// The governor's limits, scaled to its task, and its history, which is updated in place.
struct CheckCall {
  int64_t rows, slots, history, least_history, strikes_allowed;
  float guessing, collapse_mean, collapse_band, collapse_expected;
  float runaway_loss, runaway_deviations, runaway_factor;
  Reasons reasons;
  float* losses;                                // [N, history]
  int64_t* strikes;                             // [N]
  uint8_t* healthy;                             // [N]
  const float *train_loss, *loss, *expected;    // [N]
  const float *host_norm, *seed_norm;           // [N], [N, S]
  const uint8_t* computes;                      // by stage
  const int64_t* stage;                         // [N, S]
  int64_t* reason;                              // [N]
};

struct PassCall {
  SeedBlocks before, acted;
  SignalBlocks previous;
  const uint8_t* rolled_back;                         // [N], null if no row was rolled back
  const int64_t* seed_parameters;                     // [N, S], before
  const float *accuracy_before, *accuracy;            // [N]
  const float *train_loss, *host_norm, *seed_norm;    // [N], [N], [N, S]
  const float* const* tensor_norms;                   // S arrays [N, tensors]
  const float* contribution;                          // [N, S]
  SeedBlocks after;
  SignalBlocks signals;
  float* birth_accuracy;                              // [N, S], also of seeds removed in this step
  uint8_t* legal;                                     // [N, ops, S]
  int64_t *parameters, *seed_parameters_max;          // [N, S], after; maximum of before and after
};

struct ObserveCall {
  SeedBlocks seeds;
  SignalBlocks signals;
  const int64_t* seed_parameters;                     // [N, S]
  float part;                                         // elapsed part of the episode
  const float *losses, *expected;                     // [N, history + 1]
  const float *train_loss, *train_accuracy;           // [N]
  const float* slot_measures;                         // [N, S, measures]
  const int64_t* last_op;                             // [N]
  const uint8_t *success, *rolled_back;               // [N]
  const float *log_price, *remaining;                  // [N]
  const float *score, *twin_score;                    // [environments]
  float *host, *slot, *critic;                        // [environments, F], [.., S, F], [.., F]
  int64_t* blueprints;                                // [environments, S]
};

}  // namespace esper::step
