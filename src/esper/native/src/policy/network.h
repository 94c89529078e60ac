// The policy network on whole sequences: forward, and backward to its parameters.
//
// Environments are split into blocks. One thread computes a whole block, and one thread sums the
// gradient of a parameter over all blocks in order. So results are bitwise independent of the number of
// threads, and the outputs of an environment are bitwise independent of the other environments.
//
// Rows of a block: [steps, block]; rows of slots: [slots, steps, block].

#pragma once

#include <functional>
#include <stdexcept>
#include <vector>

#include "calls.h"
#include "categorical.h"
#include "parallel.h"
#include "sequence.h"

namespace esper::policy {

template <class T>
class PolicyNetwork {
 public:
  PolicyNetwork(const PolicySpec& spec, const T* const* parameters, const PolicyCall<T>& call)
      : spec_(spec), call_(call), parameters_(parameters), heads_(2 + spec.choices),
        block_(spec.hidden > kNarrow ? 2 * kRows : kRows),
        blocks_((call.environments + block_ - 1) / block_), rows_(call.steps * block_),
        slot_rows_(rows_ * call.slots), context_width_(spec.hidden + spec.op_width) {
    make_maps();
    take_forward();
  }

  void forward(int threads) {
    threads = worthwhile(threads);
    const auto all = maps();
    in_parallel(int64_t(all.size()), threads,
                [&](int, int64_t map) { all[size_t(map)]->prepare_forward(); });
    compute(threads);
  }

  // Runs forward again with other inputs of the same shape and unchanged parameters.
  void forward_again(const PolicyCall<T>& call, int threads) {
    call_ = call;
    compute(worthwhile(threads));
  }

  // Adds the gradients of the parameters to `gradients`, given those of log_prob [T, N], entropy
  // [T, N, heads] and value [T, N]. May be called only once.
  void backward(const T* d_log_prob, const T* d_entropy, const T* d_value, T* const* gradients,
                int threads) {
    threads = worthwhile(threads);
    take_backward();
    const auto all = maps();
    in_parallel(int64_t(all.size()), threads,
                [&](int, int64_t map) { all[size_t(map)]->prepare_backward(); });
    in_parallel(blocks_, int(std::min<int64_t>(threads, blocks_)), [&](int, int64_t block) {
      heads_back(block, d_log_prob, d_entropy, d_value);
      backward(block);
    });
    const auto gradient_tasks = all_gradient_tasks(gradients);
    in_parallel(int64_t(gradient_tasks.size()), threads, [&](int, int64_t task) {
      for (int64_t block = 0; block < blocks_; ++block) gradient_tasks[size_t(task)](block);
    });
  }

 private:
  // Every step reads the weights of a wide LSTM from memory; larger blocks amortise that.
  static constexpr int kNarrow = 256;
  // Minimum rows per thread; below it, waking a thread costs more than it saves.
  static constexpr int64_t kRowsOfAThread = 128;

  // A matrix with `rows` rows of each block, and its gradient where `backward` needs one.
  struct Blocks {
    Matrix<T> values, gradient;
    ptrdiff_t rows = 0;
    int columns = 0;

    Matrix<T> operator[](int64_t block) const { return values.from(block * rows); }
    Matrix<T> d(int64_t block) const { return gradient.from(block * rows); }
  };

  int worthwhile(int threads) const {
    return int(std::clamp<int64_t>(blocks_ * rows_ / kRowsOfAThread, 1, threads));
  }

  void compute(int threads) {
    in_parallel(blocks_, int(std::min<int64_t>(threads, blocks_)),
                [&](int, int64_t block) { forward(block); });
  }

  void make_maps() {
    const int kind_inputs = spec_.slot_features + spec_.kind_width;
    const int whole = context_width_ + spec_.slot_width;
    slot_first_ = linear(kSlotFirst, kind_inputs, spec_.slot_width);
    slot_second_ = linear(kSlotSecond, spec_.slot_width, spec_.slot_width);
    encoder_ = linear(kEncoder, spec_.host_features + 2 * spec_.slot_width, spec_.hidden);
    norm_ = {parameters_[kNorm], parameters_[kNormBias], spec_.hidden, arena_};
    lstm_ = {block_,     spec_.hidden,   spec_.hidden, kInput, kInputBias,
             kRecurrent, kRecurrentBias, parameters_,  arena_};
    op_hidden_ = linear(kOpHidden, spec_.hidden, spec_.op_hidden);
    op_out_ = linear(kOpOut, spec_.op_hidden, spec_.ops);
    // The weight over [memory, op, slot] is split: the part over memory and op serves all slots.
    slot_context_ = {{kSlotHidden, kSlotHiddenBias, 0, 0, whole},
                     context_width_, spec_.slot_hidden, parameters_, arena_};
    slot_place_ = {{kSlotHidden, -1, 0, context_width_, whole},
                   spec_.slot_width, spec_.slot_hidden, parameters_, arena_};
    slot_out_ = linear(kSlotOut, spec_.slot_hidden, 1);
    trunk_ = linear(kTrunk, whole, spec_.trunk);
    for (int k = 0; k < spec_.choices; ++k)
      choices_.push_back(linear(kChoices + 2 * k, spec_.trunk, spec_.widths[k]));
    value_hidden_ = linear(kValueHidden, spec_.hidden + spec_.critic_features, spec_.value_hidden);
    value_out_ = linear(kValueOut, spec_.value_hidden, 1);
  }

  Linear<T> linear(int weight, int inputs, int outputs) {
    return {{weight, weight + 1, 0, 0, inputs}, inputs, outputs, parameters_, arena_};
  }

  std::vector<Linear<T>*> maps() {
    std::vector<Linear<T>*> all{&slot_first_, &slot_second_, &encoder_,  &op_hidden_,
                                &op_out_,     &slot_context_, &slot_place_, &slot_out_,
                                &trunk_,      &value_hidden_, &value_out_};
    for (Linear<T>& map : choices_) all.push_back(&map);
    lstm_.add_maps(all);
    return all;
  }

  void take_forward() {
    const auto of_rows = [&](int columns) { return blocks(rows_, columns); };
    const auto of_slots = [&](int columns) { return blocks(slot_rows_, columns); };
    kinds_in_ = of_slots(spec_.slot_features + spec_.kind_width);
    slots_first_ = of_slots(spec_.slot_width);
    slots_ = of_slots(spec_.slot_width);
    encoder_in_ = of_rows(spec_.host_features + 2 * spec_.slot_width);
    normal_ = of_rows(spec_.hidden);
    scale_ = arena_.take(blocks_ * rows_);
    encoded_ = of_rows(spec_.hidden);
    gates_ = of_rows(Lstm<T>::kGates * padded<T>(spec_.hidden));
    shown_ = of_rows(spec_.hidden);
    cell_ = blocks(rows_ + block_, spec_.hidden);
    hidden_ = blocks(rows_ + block_, spec_.hidden);
    context_ = of_rows(context_width_ + spec_.slot_width);
    seen_ = of_rows(spec_.hidden + spec_.critic_features);
    ops_hidden_ = of_rows(spec_.op_hidden);
    ops_ = of_rows(spec_.ops);
    base_ = of_rows(spec_.slot_hidden);
    places_hidden_ = of_slots(spec_.slot_hidden);
    places_ = of_slots(1);
    trunked_ = of_rows(spec_.trunk);
    for (int k = 0; k < spec_.choices; ++k) chosen_.push_back(of_rows(spec_.widths[k]));
    values_hidden_ = of_rows(spec_.value_hidden);
    values_ = of_rows(1);
    legal_ops_.resize(size_t(call_.steps * call_.environments * spec_.ops));
    all_legal_.resize(size_t(*std::max_element(spec_.widths, spec_.widths + spec_.choices)), 1);
  }

  void take_backward() {
    for (Linear<T>* map : maps()) map->take_backward(arena_);
    for (Blocks* x : {&values_hidden_, &seen_, &ops_hidden_, &trunked_, &context_,
                      &places_hidden_, &base_, &slots_, &encoded_, &normal_, &encoder_in_,
                      &slots_first_, &kinds_in_})
      x->gradient = take(arena_, blocks_ * x->rows, x->columns);
    carried_ = blocks(2 * block_, spec_.hidden);
    weighted_ = blocks(rows_, spec_.hidden);
  }

  Blocks blocks(ptrdiff_t rows, int columns) {
    return {take(arena_, blocks_ * rows, columns), {}, rows, columns};
  }

  // --- forward ------------------------------------------------------------------------------------

  void forward(int64_t block) {
    fill(block);
    encode(block);
    lstm_.forward(encoded_[block], call_.steps, gates_[block], cell_[block], shown_[block],
                  hidden_[block]);
    run_lstm(block);
    decide_op(block);
    decide_slot(block);
    decide_choices(block);
    estimate_value(block);
  }

  // Twin of tamiyo.policy.factored_lstm.FactoredLSTM.encode.
  void encode(int64_t block) {
    rectified_layer(slot_first_, kinds_in_, slots_first_, block);
    rectified_layer(slot_second_, slots_first_, slots_, block);
    pool(block);
    encoder_.forward(encoder_in_[block], rows_, normal_[block]);
    norm_.forward(normal_[block], rows_, scale_ + block * rows_, encoded_[block]);
  }

  void rectified_layer(const Linear<T>& map, const Blocks& x, const Blocks& y, int64_t block) {
    map.forward(x[block], x.rows, y[block]);
    rectify(y[block], y.rows);
  }

  // Copies the inputs of a block; rows beyond the last environment are 0.
  void fill(int64_t block) {
    const Matrix<T> kinds = kinds_in_[block], encoder = encoder_in_[block], seen = seen_[block];
    std::fill_n(kinds.data, slot_rows_ * kinds.stride, T(0));
    std::fill_n(encoder.data, rows_ * encoder.stride, T(0));
    std::fill_n(seen.data, rows_ * seen.stride, T(0));
    each_row(block, [&](ptrdiff_t row, int64_t i) {
      check(i);
      const T* host = call_.host + i * spec_.host_features;
      std::copy_n(host, spec_.host_features, encoder.row(row));
      const T* critic = call_.critic + i * spec_.critic_features;
      std::copy_n(critic, spec_.critic_features, seen.row(row) + spec_.hidden);
      for (int64_t s = 0; s < call_.slots; ++s) {
        T* place = kinds.row(s * rows_ + row);
        const T* features = call_.slot + (i * call_.slots + s) * spec_.slot_features;
        std::copy_n(features, spec_.slot_features, place);
        const T* kind = parameters_[kKindEmbedding] + blueprint(i, s) * spec_.kind_width;
        std::copy_n(kind, spec_.kind_width, place + spec_.slot_features);
      }
      for (int op = 0; op < spec_.ops; ++op) {
        const uint8_t* may = may_of(i, op);
        legal_ops_[size_t(i * spec_.ops + op)] =
            std::any_of(may, may + call_.slots, [](uint8_t yes) { return yes != 0; });
      }
      call_.log_prob[i] = 0;
    });
    for (int e = 0; e < block_; ++e) {
      const int64_t n = block * block_ + e;
      set_state(hidden_[block].row(e), n, call_.hidden);
      set_state(cell_[block].row(e), n, call_.cell);
    }
  }

  // Throws if a value used as an index is out of range.
  void check(int64_t i) const {
    for (int64_t s = 0; s < call_.slots; ++s) within(blueprint(i, s), spec_.blueprints);
    if (call_.choose != Choose::given) return;
    within(action(i, 0), spec_.ops);
    within(action(i, 1), call_.slots);
    for (int k = 0; k < spec_.choices; ++k) within(action(i, 2 + k), spec_.widths[k]);
  }

  static void within(int64_t index, int64_t count) {
    if (index < 0 || index >= count) throw std::out_of_range("an index of the policy's input");
  }

  void set_state(T* row, int64_t environment, const T* source) const {
    std::fill_n(row, padded<T>(spec_.hidden), T(0));
    if (environment < call_.environments)
      std::copy_n(source + environment * spec_.hidden, spec_.hidden, row);
  }

  // Mean and maximum of the embeddings of existing slots; in the maximum, missing slots count as 0.
  void pool(int64_t block) {
    const Matrix<T> slots = slots_[block], encoder = encoder_in_[block];
    each_row(block, [&](ptrdiff_t row, int64_t i) {
      T* mean = encoder.row(row) + spec_.host_features;
      T* most = mean + spec_.slot_width;
      for (int64_t s = 0; s < call_.slots; ++s) {
        if (!exists(i, s)) continue;
        const T* slot = slots.row(s * rows_ + row);
        for (int c = 0; c < spec_.slot_width; ++c) {
          mean[c] += slot[c];
          most[c] = slot[c] > most[c] || slot[c] != slot[c] ? slot[c] : most[c];
        }
      }
      const T share = T(1) / T(existing(i));
      for (int c = 0; c < spec_.slot_width; ++c) mean[c] *= share;
    });
  }

  // Copies the output of the LSTM for the heads, and its state after the last step.
  void run_lstm(int64_t block) {
    const Matrix<T> memory = hidden_[block].from(block_);
    for (ptrdiff_t row = 0; row < rows_; ++row) {
      std::copy_n(memory.row(row), spec_.hidden, context_[block].row(row));
      std::copy_n(memory.row(row), spec_.hidden, seen_[block].row(row));
      std::fill_n(context_[block].row(row) + spec_.hidden, spec_.op_width + spec_.slot_width, T(0));
    }
    const int64_t first = block * block_;
    for (int64_t n = first; n < std::min(first + block_, call_.environments); ++n) {
      const ptrdiff_t row = rows_ + n - first;
      std::copy_n(hidden_[block].row(row), spec_.hidden, call_.hidden_after + n * spec_.hidden);
      std::copy_n(cell_[block].row(row), spec_.hidden, call_.cell_after + n * spec_.hidden);
    }
  }

  void decide_op(int64_t block) {
    const Matrix<T> context = context_[block];
    rectified_layer(op_hidden_, context_, ops_hidden_, block);
    op_out_.forward(ops_hidden_[block], rows_, ops_[block]);
    each_row(block, [&](ptrdiff_t row, int64_t i) {
      decide(op_of(block, row, i), i, 0);
      const T* embedding = parameters_[kOpEmbedding] + action(i, 0) * spec_.op_width;
      std::copy_n(embedding, spec_.op_width, context.row(row) + spec_.hidden);
    });
  }

  // Twin of tamiyo.policy.factored_lstm.FactoredLSTM._slot_logits.
  void decide_slot(int64_t block) {
    const Matrix<T> context = context_[block], slots = slots_[block];
    const Matrix<T> base = base_[block], hidden = places_hidden_[block];
    slot_context_.forward(context, rows_, base);
    for (int64_t s = 0; s < call_.slots; ++s)
      std::copy_n(base.data, rows_ * base.stride, hidden.row(s * rows_));
    slot_place_.forward(slots, slot_rows_, hidden, true);
    rectify(hidden, slot_rows_);
    slot_out_.forward(hidden, slot_rows_, places_[block]);
    each_row(block, [&](ptrdiff_t row, int64_t i) {
      decide(place_of(block, row, i), i, 1);
      std::copy_n(slots.row(action(i, 1) * rows_ + row), spec_.slot_width,
                  context.row(row) + context_width_);
    });
  }

  // Twin of tamiyo.policy.factored_lstm.FactoredLSTM._choices.
  void decide_choices(int64_t block) {
    rectified_layer(trunk_, context_, trunked_, block);
    for (int k = 0; k < spec_.choices; ++k) {
      choices_[size_t(k)].forward(trunked_[block], rows_, chosen_[size_t(k)][block]);
      each_row(block,
               [&](ptrdiff_t row, int64_t i) { decide(choice_of(block, row, i, k), i, 2 + k); });
    }
  }

  // Normalises the logits to log-probabilities; chooses the action unless it is given.
  // Twin of tamiyo.policy.factored_lstm.FactoredLSTM.act.
  // Twin of tamiyo.policy.factored_lstm.FactoredLSTM.evaluate_heads.
  void decide(Categorical<T> options, int64_t i, int head) {
    const bool matters = relevant(i, head), given = call_.choose == Choose::given;
    if (matters) {
      options.normalise();
      if (!given) action(i, head) = options.choose(uniform(i, head));
      call_.log_prob[i] += options.at(int(action(i, head)));
    } else if (!given) {
      action(i, head) = spec_.canonical[head];
    }
    call_.entropy[i * heads_ + head] = matters ? options.entropy() : T(0);
    call_.choice[i * heads_ + head] = matters && options.free();
  }

  // Twin of tamiyo.policy.factored_lstm.FactoredLSTM._value.
  void estimate_value(int64_t block) {
    const Matrix<T> values = values_[block];
    rectified_layer(value_hidden_, seen_, values_hidden_, block);
    value_out_.forward(values_hidden_[block], rows_, values);
    each_row(block, [&](ptrdiff_t row, int64_t i) { call_.value[i] = *values.row(row); });
  }

  // --- backward -----------------------------------------------------------------------------------

  // Gradients of all logits and of the value, in place; 0 in rows beyond the last environment.
  void heads_back(int64_t block, const T* d_log_prob, const T* d_entropy, const T* d_value) {
    const auto clear = [](Matrix<T> x, ptrdiff_t row) { std::fill_n(x.row(row), x.stride, T(0)); };
    for (int64_t n = call_.environments; n < (block + 1) * block_; ++n) {
      for (ptrdiff_t row = n - block * block_; row < rows_; row += block_) {
        clear(values_[block], row);
        clear(ops_[block], row);
        for (const Blocks& logits : chosen_) clear(logits[block], row);
        for (int64_t s = 0; s < call_.slots; ++s) clear(places_[block], s * rows_ + row);
      }
    }
    each_row(block, [&](ptrdiff_t row, int64_t i) {
      const auto grade = [&](Categorical<T> options, int head) {
        if (relevant(i, head))
          options.backward(int(action(i, head)), d_log_prob[i], d_entropy[i * heads_ + head]);
        else
          options.clear();
      };
      grade(op_of(block, row, i), 0);
      grade(place_of(block, row, i), 1);
      for (int k = 0; k < spec_.choices; ++k) grade(choice_of(block, row, i, k), 2 + k);
      *values_[block].row(row) = d_value[i];
    });
  }

  void backward(int64_t block) {
    const Matrix<T> d_context = context_.d(block), d_slots = slots_.d(block);
    through(value_out_, values_hidden_, values_[block], block);
    value_hidden_.backward(values_hidden_.d(block), rows_, seen_.d(block));
    through(op_out_, ops_hidden_, ops_[block], block);
    choices_back(block);
    trunk_.backward(trunked_.d(block), rows_, d_context);
    op_hidden_.backward(ops_hidden_.d(block), rows_, d_context, true);
    slot_head_back(block);
    slot_context_.backward(base_.d(block), rows_, d_context, true);
    each_row(block, [&](ptrdiff_t row, int64_t i) {
      add(d_context.row(row) + context_width_, spec_.slot_width,
          d_slots.row(action(i, 1) * rows_ + row));
    });
    for (ptrdiff_t row = 0; row < rows_; ++row)
      add(seen_.d(block).row(row), spec_.hidden, d_context.row(row));
    lstm_.backward(d_context, call_.steps, gates_[block], cell_[block], shown_[block],
                   carried_[block], encoded_.d(block));
    rectify_back(encoded_[block], encoded_.d(block), rows_);
    norm_.backward(normal_[block], scale_ + block * rows_, rows_, encoded_.d(block),
                   weighted_[block], normal_.d(block));
    encoder_.backward(normal_.d(block), rows_, encoder_in_.d(block));
    pool_back(block);
    rectify_back(slots_[block], d_slots, slot_rows_);
    through(slot_second_, slots_first_, d_slots, block);
    slot_first_.backward(slots_first_.d(block), slot_rows_, kinds_in_.d(block));
  }

  // Backward through a layer of x, given the gradient of its output, and the ReLU before it.
  void through(const Linear<T>& map, const Blocks& x, Matrix<T> dy, int64_t block) {
    map.backward(dy, x.rows, x.d(block));
    rectify_back(x[block], x.d(block), x.rows);
  }

  void choices_back(int64_t block) {
    const Matrix<T> d_trunk = trunked_.d(block);
    for (size_t k = 0; k < choices_.size(); ++k)
      choices_[k].backward(chosen_[k][block], rows_, d_trunk, k > 0);
    rectify_back(trunked_[block], d_trunk, rows_);
  }

  void slot_head_back(int64_t block) {
    const Matrix<T> d_hidden = places_hidden_.d(block), d_base = base_.d(block);
    through(slot_out_, places_hidden_, places_[block], block);
    slot_place_.backward(d_hidden, slot_rows_, slots_.d(block));
    std::fill_n(d_base.data, rows_ * d_base.stride, T(0));
    for (int64_t s = 0; s < call_.slots; ++s)
      add(d_hidden.row(s * rows_), rows_ * d_base.stride, d_base.data);
  }

  // Embeddings that tie for the maximum share its gradient.
  void pool_back(int64_t block) {
    const Matrix<T> slots = slots_[block], d_slots = slots_.d(block);
    each_row(block, [&](ptrdiff_t row, int64_t i) {
      const T* most = encoder_in_[block].row(row) + spec_.host_features + spec_.slot_width;
      const T* d_mean = encoder_in_.d(block).row(row) + spec_.host_features;
      const T* d_most = d_mean + spec_.slot_width;
      const T share = T(1) / T(existing(i));
      for (int c = 0; c < spec_.slot_width; ++c) {
        int equal = 0;
        for (int64_t s = 0; s < call_.slots; ++s)
          equal += exists(i, s) && slots.row(s * rows_ + row)[c] == most[c];
        for (int64_t s = 0; s < call_.slots; ++s) {
          if (!exists(i, s)) continue;
          const ptrdiff_t place = s * rows_ + row;
          d_slots.row(place)[c] += d_mean[c] * share;
          if (slots.row(place)[c] == most[c]) d_slots.row(place)[c] += d_most[c] / T(equal);
        }
      }
    });
  }

  static void add(const T* x, ptrdiff_t count, T* sums) {
    for (ptrdiff_t i = 0; i < count; ++i) sums[i] += x[i];
  }

  // --- gradients of the parameters ----------------------------------------------------------------

  using GradientTask = std::function<void(int64_t)>;

  // A task adds the contribution of one block to some gradients; no two tasks write to the same element.
  std::vector<GradientTask> all_gradient_tasks(T* const* gradients) {
    std::vector<GradientTask> all;
    const auto learn = [&](const Linear<T>& map, Matrix<T> dy, const Blocks& x) {
      all.push_back([=, &map, &x](int64_t block) {
        map.learn(dy.from(block * x.rows), x[block], x.rows, gradients);
      });
    };
    for (int map = 0; map < 2 * Lstm<T>::kGates; ++map)
      all.push_back([=](int64_t block) {
        lstm_.learn(map, gates_[block], encoded_[block], hidden_[block], call_.steps, gradients);
      });
    learn(trunk_, trunked_.gradient, context_);
    learn(value_hidden_, values_hidden_.gradient, seen_);
    learn(op_hidden_, ops_hidden_.gradient, context_);
    learn(encoder_, normal_.gradient, encoder_in_);
    learn(slot_context_, base_.gradient, context_);
    learn(slot_place_, places_hidden_.gradient, slots_);
    learn(slot_first_, slots_first_.gradient, kinds_in_);
    learn(slot_second_, slots_.gradient, slots_first_);
    learn(slot_out_, places_.values, places_hidden_);
    learn(op_out_, ops_.values, ops_hidden_);
    learn(value_out_, values_.values, values_hidden_);
    for (size_t k = 0; k < choices_.size(); ++k)
      learn(choices_[k], chosen_[k].values, trunked_);
    all.push_back([=](int64_t block) {
      add_rows(weighted_[block], rows_, spec_.hidden, gradients[kNorm]);
      add_rows(encoded_.d(block), rows_, spec_.hidden, gradients[kNormBias]);
      learn_embeddings(block, gradients);
    });
    return all;
  }

  void learn_embeddings(int64_t block, T* const* gradients) {
    each_row(block, [&](ptrdiff_t row, int64_t i) {
      add(context_.d(block).row(row) + spec_.hidden, spec_.op_width,
          gradients[kOpEmbedding] + action(i, 0) * spec_.op_width);
      for (int64_t s = 0; s < call_.slots; ++s)
        add(kinds_in_.d(block).row(s * rows_ + row) + spec_.slot_features,
            spec_.kind_width, gradients[kKindEmbedding] + blueprint(i, s) * spec_.kind_width);
    });
  }

  // --- indexing ---------------------------------------------------------------------------

  // Calls f(row of the block, index into [T, N]) for every existing environment and step.
  template <class Function>
  void each_row(int64_t block, Function f) const {
    const int64_t first = block * block_, end = std::min(first + block_, call_.environments);
    for (int64_t t = 0; t < call_.steps; ++t)
      for (int64_t n = first; n < end; ++n)
        f(ptrdiff_t(t * block_ + n - first), t * call_.environments + n);
  }

  int64_t& action(int64_t i, int head) const { return call_.actions[i * heads_ + head]; }
  int64_t blueprint(int64_t i, int64_t s) const { return call_.blueprint[i * call_.slots + s]; }

  bool relevant(int64_t i, int head) const {
    return head == 0 || spec_.relevant[action(i, 0) * heads_ + head] != 0;
  }

  const uint8_t* may_of(int64_t i, int64_t op) const {
    return call_.may + (i * spec_.ops + op) * call_.slots;
  }

  const uint8_t* kinds_of(int64_t i, int64_t s) const {
    return call_.kinds + (i * call_.slots + s) * spec_.blueprints;
  }

  bool exists(int64_t i, int64_t s) const {
    const uint8_t* kinds = kinds_of(i, s);
    return std::any_of(kinds, kinds + spec_.blueprints, [](uint8_t yes) { return yes != 0; });
  }

  int existing(int64_t i) const {
    int count = 0;
    for (int64_t s = 0; s < call_.slots; ++s) count += exists(i, s);
    return std::max(count, 1);
  }

  const float* uniform(int64_t i, int head) const {
    return call_.choose == Choose::sampled ? call_.uniform + (i * heads_ + head) * call_.widest
                                           : nullptr;
  }

  Categorical<T> op_of(int64_t block, ptrdiff_t row, int64_t i) const {
    return {ops_[block].row(row), 1, &legal_ops_[size_t(i * spec_.ops)], spec_.ops};
  }

  Categorical<T> place_of(int64_t block, ptrdiff_t row, int64_t i) const {
    const Matrix<T> places = places_[block];
    return {places.row(row), rows_ * places.stride, may_of(i, action(i, 0)), int(call_.slots)};
  }

  // The first choice head draws a blueprint, which the slot must accept.
  Categorical<T> choice_of(int64_t block, ptrdiff_t row, int64_t i, int k) const {
    const uint8_t* legal = k == 0 ? kinds_of(i, action(i, 1)) : all_legal_.data();
    return {chosen_[size_t(k)][block].row(row), 1, legal, spec_.widths[k]};
  }

  PolicySpec spec_;
  PolicyCall<T> call_;
  const T* const* parameters_;
  int heads_;
  int64_t block_, blocks_;  // environments per block, number of blocks
  ptrdiff_t rows_, slot_rows_;
  int context_width_;  // width of memory and op embedding
  Arena<T> arena_;

  Linear<T> slot_first_, slot_second_, encoder_, op_hidden_, op_out_, slot_context_, slot_place_;
  Linear<T> slot_out_, trunk_, value_hidden_, value_out_;
  std::vector<Linear<T>> choices_;
  LayerNorm<T> norm_;
  Lstm<T> lstm_;

  Blocks kinds_in_, slots_first_, slots_, encoder_in_, normal_, encoded_;
  Blocks gates_, shown_, cell_, hidden_, context_, seen_;
  Blocks ops_hidden_, ops_, base_, places_hidden_, places_, trunked_, values_hidden_, values_;
  std::vector<Blocks> chosen_;
  Blocks carried_, weighted_;  // see Lstm and LayerNorm
  T* scale_ = nullptr;
  std::vector<uint8_t> legal_ops_, all_legal_;
};

}  // namespace esper::policy
