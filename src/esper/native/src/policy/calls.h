// Arguments of the calls from Python. Python parses this file for the structures and enumerations (see
// structures.py). Arrays are contiguous.

#pragma once

#include <cstdint>

namespace esper::policy {

// Layer widths of the network, and the table of relevant heads.
struct PolicySpec {
  int32_t host_features, slot_features, critic_features;
  int32_t blueprints, kind_width;  // of the blueprint embedding
  int32_t slot_width, hidden;      // of a slot's embedding, of the LSTM
  int32_t ops, op_width;           // of the op embedding
  int32_t op_hidden, slot_hidden, trunk, value_hidden;
  int32_t choices;                 // number of choice heads
  const int32_t* widths;           // [choices], options of each choice head
  const uint8_t* relevant;         // [ops, 2 + choices], heads relevant for each op
  const int32_t* canonical;        // [2 + choices], option of an irrelevant head
};

// Indices of the parameters in the order of Python, followed by weight and bias of each choice head.
enum Parameter : int {
  kKindEmbedding,
  kSlotFirst, kSlotFirstBias, kSlotSecond, kSlotSecondBias,
  kEncoder, kEncoderBias, kNorm, kNormBias,
  kInput, kRecurrent, kInputBias, kRecurrentBias,
  kOpEmbedding,
  kOpHidden, kOpHiddenBias, kOpOut, kOpOutBias,
  kSlotHidden, kSlotHiddenBias, kSlotOut, kSlotOutBias,
  kTrunk, kTrunkBias,
  kValueHidden, kValueHiddenBias, kValueOut, kValueOutBias,
  kChoices,
};

enum class Choose : int32_t { given, sampled, most_probable };

// Sequences of T steps of N environments with S slots, heads = 2 + choices.
template <class T>
struct PolicyCall {
  int64_t steps, environments, slots;
  const T *host, *slot, *critic;         // [T, N, F], [T, N, S, F], [T, N, F]
  const int64_t* blueprint;              // [T, N, S]
  const uint8_t *may, *kinds;            // legal: [T, N, ops, S] and [T, N, S, blueprints]
  const T *hidden, *cell;                // [N, H], before the first step
  Choose choose;
  const float* uniform;                  // [N, heads, widest], if actions are sampled (T is 1)
  int64_t widest;
  int64_t* actions;                      // [T, N, heads], input if they are given
  T *log_prob, *entropy, *value;         // [T, N], [T, N, heads], [T, N]
  uint8_t* choice;                       // [T, N, heads], relevant with several legal options
  T *hidden_after, *cell_after;          // [N, H]
};

}  // namespace esper::policy
