// Arguments of the calls from Python. Python parses this file for the structures and enumerations (see
// structures.py). Arrays are contiguous; scalars of type T are passed as double.

#pragma once

#include <cstdint>

namespace esper::hosts {

// Instructions of a host's program.
enum class Step : int32_t { input, block, norm, slot, pool, head };

// The families of hosts and slots, in the order of kasmina.blueprints.FAMILIES.
enum class Family : int32_t { conv, mlp, sequence };

// The blueprints, named as in Python.
enum class Kind : int32_t {
  conv_light,
  attention,
  norm,
  depthwise,
  bottleneck,
  conv_small,
  conv_heavy,
  mlp_small,
  mlp,
  lora,
  lora_large,
};

// The ways to tune a host, in the order of runtime.tasks.TUNINGS.
enum class Tuning : int32_t { all, last, auto_rgn };

// What the last layer of a newborn seed multiplies; see kasmina.blueprints.LastLayer.
enum class LastLayer : int32_t { scale, norm, linear, pointwise, spatial, hidden };

// The first measurements of a slot without a seed; the gain of each LastLayer follows.
enum class SlotStatistic : int32_t { gradient, gradient_ratio, activation, active_share };

struct HostSpec {
  Family family;
  int32_t height, width, channels, classes;
  int32_t kernel;                 // kernel size of convolutional blocks
  int32_t heads;                  // of the attention of a sequence's layers; 0 if they have none
  int32_t least_rounded;          // channels from which factors are rounded to bfloat16; 0: never
  int32_t has_matrix_unit;        // whether the matrix unit multiplies rounded factors
  int32_t steps, slots, blocks;
  const int32_t* program;         // [steps, 2]: Step and its index
  const int32_t* block_channels;  // [blocks without the head], output channels
  const int32_t* block_sizes;     // [blocks], parameters
  const int32_t* slot_channels;   // [slots]
  const int32_t* slot_span;       // [slots], the first block that the slot spans; negative: none
  const int32_t* span_layers;     // [slots], how many consecutive blocks it spans
  const int32_t* slot_width;      // [slots], row length of the slot's store
  const int32_t* gate_offset;     // [slots]
  const int32_t* last_layers;     // [slots], bits of LastLayer
  int32_t hidden_units;
  const double* const* hidden_weights;  // slots of [units, inputs, k, k] by layer, see newborns.h
};

// N rows with S slots; parameters and optimizer state are changed in place.
template <class T>
struct TrainCall {
  int64_t rows, batches, batch_size;
  T *host, *host_first, *host_second, *host_step;              // [N, P] and [N]
  T* buffers;                                                  // [N, Q]
  T *const *seed, *const *seed_first, *const *seed_second, *const *seed_step;  // S of [N, P_s], [N]
  const int32_t *kind, *form;                                  // [N, S], kind -1: none to compute
  const T* alpha;                                              // [N, S]
  const uint8_t* frozen;                                       // [N, S]
  const T* images;                                             // [samples, height, width, channels]
  const int64_t* labels;                                       // [samples, predictions]
  const int64_t* drawn;                                        // [N, batches, batch_size], indices
  const int64_t* poses;                                        // as drawn; null: no augmentation
  int64_t reach;                                               // largest shift of a pose, in pixels
  const T *host_rate, *seed_rate;                              // [N], [N, S]
  const int32_t* tuning;                                       // [N]: Tuning; null: all
  double weight_decay, momentum, most_norm;
  int32_t rule;
  const int32_t* tensor_counts;                                // [S]
  T *loss, *accuracy, *host_norm, *seed_norm;                  // [N], ..., [N, S]
  T* const* tensor_norms;                                      // S of [N, tensors]
  T* slot_measures;                                            // [N, S, measures]; null: not wanted
};

// R rows to evaluate and M variants that differ from their row only in alpha, sorted by row.
template <class T>
struct EvaluateCall {
  int64_t rows, images, lanes, chunks;
  const T *host, *buffers;               // [N, P], [N, Q]
  const T* const* seed;                  // S of [N, P_s]
  const int64_t* row;                    // [R], index into the N rows
  const int32_t *kind, *form;            // [R, S]
  const T* alpha;                        // [R, S]
  const T* packed;                       // [D, chunks, channels, height, width, lanes]
  const int64_t *labels, *dataset;       // [D, images, predictions], [R]
  const int64_t* variants;               // [R + 1], where each row's variants begin
  const int32_t* start;                  // [M], first slot whose alpha differs
  const T* variant_alpha;                // [M, S]
  T *scores, *variant_scores;            // [R, 3] and [M, 3]: loss, accuracy, expected
};

}  // namespace esper::hosts
