// One thread's copy of the host: layers, slots and memory. It trains or validates one environment
// after another; no state carries over from one environment to the next.

#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "calls.h"
#include "loss.h"
#include "newborns.h"
#include "optimizer.h"
#include "slot.h"
#include "transformer.h"

namespace esper::hosts {

template <class T>
class Worker {
 public:
  explicit Worker(const HostSpec& spec) : spec_(spec) {
    const int pixels = spec.height * spec.width;
    const bool dense = spec.family == Family::mlp;
    arena_.least_rounded = spec.least_rounded;
    arena_.has_matrix_unit = spec.has_matrix_unit != 0;
    if (spec.family == Family::sequence) predictions_ = spec.width;
    int channels = dense ? pixels * spec.channels : spec.channels;
    for (int pixel = 0; pixel < pixels; ++pixel)
      for (int c = 0; c < spec.channels; ++c)
        destination_.push_back(dense ? pixel * spec.channels + c : c * pixels + pixel);
    block_sizes_.assign(spec.block_sizes, spec.block_sizes + spec.blocks);
    stage_of_slot_.resize(size_t(spec.slots));
    slots_.resize(size_t(spec.slots));
    for (int s = 0; s < spec.slots; ++s) {
      watched_.push_back({{spec.slot_channels[s], spec.family, spec.last_layers[s],
                           spec.hidden_units, spec.hidden_weights[s], span_of(s)}});
      seed_gradient_.emplace_back(size_t(spec.slot_width[s]));
    }
    std::vector<int> block_begins, block_ends;
    size_t norm = 0;
    for (int i = 0; i < spec.steps; ++i) {
      const int number = spec.program[2 * i + 1];
      switch (Step(spec.program[2 * i])) {
        case Step::input:
          break;
        case Step::block:
          block_begins.push_back(parameters_);
          if (spec.family == Family::sequence) {
            add_transformer_block(number, spec.block_channels[number]);
          } else {
            const size_t stage = stages_.size();
            add(std::make_unique<Convolution<T>>(channels, spec.block_channels[number],
                                                 dense ? 1 : spec.kernel));
            for (int s = 0; s < spec.slots; ++s)
              if (spec.slot_span[s] == number) stages_[stage].spans.push_back(size_t(s));
          }
          channels = spec.block_channels[number];
          block_ends.push_back(parameters_);
          break;
        case Step::norm:
          norm = stages_.size();
          add(std::make_unique<BatchNorm<T>>(channels));
          stages_[norm].norm = static_cast<BatchNorm<T>*>(stages_[norm].layer.get());
          block_ends.back() = parameters_;
          break;
        case Step::slot: {
          const int span = spec.slot_span[number];
          const size_t block = span < 0 ? block_ends.size() - 1 : size_t(span);
          stage_of_slot_[size_t(number)] = stages_.size();
          watched_[size_t(number)].block = block_begins[block];
          watched_[size_t(number)].block_end = block_ends[block];
          add(std::make_unique<Slot<T>>(spec.slot_channels[number], spec.gate_offset[number],
                                        spec.family, span_of(number)));
          slots_[size_t(number)] = static_cast<Slot<T>*>(stages_.back().layer.get());
          stages_.back().slot = number;
          break;
        }
        case Step::pool:
          if (pools_slots_only(norm)) stages_[norm].pool = stages_.size();
          add(std::make_unique<MaxPool<T>>());
          break;
        case Step::head:
          if (embedding_ != nullptr) {
            add(std::make_unique<TiedHead<T>>(channels, *embedding_));
            break;
          }
          add(std::make_unique<MeanPool<T>>());
          add(std::make_unique<Convolution<T>>(channels, spec.classes, 1, true));
          break;
      }
    }
    host_gradient_.resize(size_t(parameters_));
  }

  // Twin of tolaria.backends.torch.TorchBackend.train_epoch.
  void train(const TrainCall<T>& call, int64_t n) {
    const int size = int(call.batch_size);
    bind_host(call.host + n * parameters_, host_gradient_.data(), call.buffers + n * buffers_);
    bind_seeds(call, n, n);
    choose_path(false);
    Score<T> total;
    for (int64_t batch = 0; batch < call.batches; ++batch) {
      arena_.release({0, 0});
      const int64_t* drawn = call.drawn + (n * call.batches + batch) * size;
      const bool measured = call.slot_measures && batch + 1 == call.batches;
      if (measured) choose_path(true);
      Maps<T> x = gather(call, drawn, size);
      const int64_t* labels =
          labels_of(x, [&](int i) { return call.labels + drawn[i] * predictions_; });
      for (const Passage& passage : path_) {
        Stage& stage = stages_[passage.stage];
        for (size_t s : stage.spans) watch_source(s, x, passage.stage > 0);
        if (stage.slot >= 0) watched_[size_t(stage.slot)].x = measured ? kept(stage.slot, x) : x;
        x = passage.pooled ? stage.norm->forward(x, true, arena_) : stage.layer->forward(x, arena_);
      }
      total.add(score_batch(x, labels, true));
      T* measures = measured ? call.slot_measures + n * slot_count() * kSlotMeasures : nullptr;
      backward(x, measures);
      if (measures) measure_blocks(call.host + n * parameters_, measures);
      update_host(call, n);
      update_seeds(call, n);
    }
    const T predictions = T(call.batches) * T(size) * T(predictions_);
    call.loss[n] = total.loss / predictions;
    call.accuracy[n] = total.hits / predictions;
  }

  // Twin of tolaria.backends.torch.TorchBackend.evaluate.
  void evaluate(const EvaluateCall<T>& call, int64_t r) {
    const int count = slot_count();
    const int64_t n = call.row[r], first = call.variants[r], last = call.variants[r + 1];
    // Evaluation writes neither gradients nor statistics, so the const_cast is safe.
    bind_host(call.host + n * parameters_, host_gradient_.data(),
              const_cast<T*>(call.buffers) + n * buffers_);
    bind_seeds(call, r, n);
    choose_path(false);
    std::vector<Score<T>> totals(size_t(1 + last - first));
    for (int64_t chunk = 0; chunk < call.chunks; ++chunk) {
      arena_.release({0, 0});
      const int64_t begin = chunk * call.lanes;
      Maps<T> x = input_maps(int(std::min(call.lanes, call.images - begin)), int(call.lanes));
      x.data = const_cast<T*>(call.packed) + (call.dataset[r] * call.chunks + chunk) * x.size();
      const int64_t* of_chunk =
          call.labels + (call.dataset[r] * call.images + begin) * predictions_;
      const int64_t* labels = labels_of(x, [&](int i) { return of_chunk + i * predictions_; });
      set_alphas(call.alpha + r * count);
      x = evaluate_from(0, x);
      totals[0].add(score_batch(x, labels, false));
      const auto mark = arena_.mark();
      for (int64_t v = first; v < last; ++v) {
        arena_.release(mark);
        set_alphas(call.variant_alpha + v * count);
        const size_t start = size_t(call.start[v]);
        for (int s = 0; s < count; ++s)
          if (spans(s)) slots_[size_t(s)]->set_source(watched_[size_t(s)].source, false);
        x = evaluate_from(stage_of_slot_[start], kept(int(start), watched_[start].x));
        totals[size_t(1 + v - first)].add(score_batch(x, labels, false));
      }
    }
    for (size_t i = 0; i < totals.size(); ++i) {
      T* scores = i == 0 ? call.scores + 3 * r : call.variant_scores + 3 * (first + int64_t(i) - 1);
      const T predictions = T(call.images) * T(predictions_);
      scores[0] = totals[i].loss / predictions;
      scores[1] = totals[i].hits / predictions;
      scores[2] = totals[i].expected / predictions;
    }
  }

  int parameters() const { return parameters_; }
  int buffers() const { return buffers_; }
  const Layer<T>& branch(int slot, int kind) { return slots_[size_t(slot)]->branch(kind); }

 private:
  struct Stage {
    std::unique_ptr<Layer<T>> layer;
    int slot = -1;                 // number of the slot that `layer` is; -1 for a layer of the host
    BatchNorm<T>* norm = nullptr;  // `layer` if it is a BatchNorm
    size_t pool = 0;               // the stage that pools its output, with slots alone between
    std::vector<size_t> spans;     // slots whose seeds read its input
  };

  // A stage on the way of a minibatch; `pooled` if it does the work of the stages up to its pool.
  struct Passage {
    size_t stage;
    bool pooled;
  };

  // What a slot is measured by while it has no seed.
  struct Watched {
    Newborns<T> newborns;
    int block = 0, block_end = 0;  // columns of the block feeding the slot
    Maps<T> x = {};                // input of the slot
    Maps<T> source = {};           // input of the layer that it spans
  };

  // The layers that a slot spans.
  std::optional<Span> span_of(int slot) const {
    const int block = spec_.slot_span[slot], end = block + spec_.span_layers[slot];
    if (block < 0) return std::nullopt;
    const bool dense = spec_.family == Family::mlp, last = !dense && end + 1 == spec_.blocks;
    bool pooled = false;
    for (int i = 0; i < spec_.steps; ++i)
      pooled |= Step(spec_.program[2 * i]) == Step::pool && spec_.program[2 * i + 1] == block;
    const int inputs = block > 0 ? spec_.block_channels[block - 1]
                                 : spec_.channels * (dense ? spec_.height * spec_.width : 1);
    const std::vector<int> units(spec_.block_channels + block, spec_.block_channels + end);
    return Span{inputs, units, dense ? 1 : spec_.kernel, pooled, last};
  }

  bool has_seed(int slot) const { return slots_[size_t(slot)]->seed().kind >= 0; }

  bool spans(int slot) const { return slots_[size_t(slot)]->span().has_value(); }

  // The input x of a slot; a copy where the layer after it may overwrite x.
  Maps<T> kept(int slot, Maps<T> x) { return spans(slot) ? arena_.copy(x) : x; }

  // Lets a slot and what measures it read x.
  void watch_source(size_t slot, Maps<T> x, bool needs_gradient) {
    watched_[slot].source = x;
    slots_[slot]->set_source(x, needs_gradient);
  }

  void add(std::unique_ptr<Layer<T>> layer) {
    parameters_ += layer->parameters();
    buffers_ += layer->buffers();
    stages_.push_back({std::move(layer)});
  }

  // Block 0 is the embedding.
  void add_transformer_block(int number, int channels) {
    if (number > 0) {
      for (auto& layer : transformer_block<T>(channels, spec_.heads)) add(std::move(layer));
      return;
    }
    auto embedding = std::make_unique<Embedding<T>>(spec_.classes, spec_.width, channels);
    embedding_ = embedding.get();
    add(std::move(embedding));
  }

  // Whether all stages after `norm` are slots.
  bool pools_slots_only(size_t norm) const {
    return stages_.size() > norm && stages_[norm].norm != nullptr &&
           std::all_of(stages_.begin() + ptrdiff_t(norm) + 1, stages_.end(),
                       [](const Stage& stage) { return stage.slot >= 0; });
  }

  // Chooses the way of the next minibatches: BatchNorm pools where the slots behind it have no
  // seed, unless every slot is to see its input.
  void choose_path(bool all) {
    path_.clear();
    for (size_t i = 0; i < stages_.size(); ++i) {
      bool pooled = !all && stages_[i].pool > 0;
      for (size_t j = i + 1; pooled && j < stages_[i].pool; ++j)
        pooled = !has_seed(stages_[j].slot);
      path_.push_back({i, pooled});
      if (pooled) i = stages_[i].pool;
    }
  }

  // The logits, from the input of a stage on; from the first stage, slots keep their inputs.
  Maps<T> evaluate_from(size_t first, Maps<T> x) {
    for (const Passage& passage : path_) {
      if (passage.stage < first) continue;
      Stage& stage = stages_[passage.stage];
      for (size_t s : stage.spans) {
        if (first == 0)
          watch_source(s, x, false);
        else
          slots_[s]->set_source(x, false);
      }
      if (first == 0 && stage.slot >= 0) watched_[size_t(stage.slot)].x = kept(stage.slot, x);
      x = passage.pooled ? stage.norm->evaluate(x, true, arena_) : stage.layer->evaluate(x, arena_);
    }
    return x;
  }

  void bind_host(const T* parameters, T* gradient, T* buffers) {
    for (Stage& stage : stages_) {
      stage.layer->bind(parameters, gradient, buffers);
      parameters += stage.layer->parameters();
      gradient += stage.layer->parameters();
      buffers += stage.layer->buffers();
    }
  }

  // Binds the slots to the seeds in row `row` of the call, with the parameters of environment n.
  template <class Call>
  void bind_seeds(const Call& call, int64_t row, int64_t n) {
    for (int s = 0; s < slot_count(); ++s) {
      const int64_t cell = row * slot_count() + s;
      std::vector<T>& gradient = seed_gradient_[size_t(s)];
      slots_[size_t(s)]->bind_seed({call.kind[cell], Form(call.form[cell]), call.alpha[cell],
                                    call.seed[s] + n * ptrdiff_t(gradient.size()),
                                    gradient.data()});
    }
  }

  Maps<T> input_maps(int images, int lanes) const {
    Maps<T> x;
    const bool dense = spec_.family == Family::mlp;
    x.channels = dense ? spec_.height * spec_.width * spec_.channels : spec_.channels;
    x.height = dense ? 1 : spec_.height;
    x.width = dense ? 1 : spec_.width;
    x.images = images;
    x.lanes = lanes;
    return x;
  }

  // The labels of the images of x in the order of their logits, from row(i) for image i; negative in
  // lanes without an image.
  template <class Row>
  const int64_t* labels_of(const Maps<T>& x, Row row) {
    labels_.assign(size_t(predictions_) * size_t(x.lanes), -1);
    for (int i = 0; i < x.images; ++i)
      for (int p = 0; p < predictions_; ++p)
        labels_[size_t(p) * size_t(x.lanes) + size_t(i)] = row(i)[p];
    return labels_.data();
  }

  // Copies the images of a minibatch, interleaved by lanes; posed if the call has poses.
  Maps<T> gather(const TrainCall<T>& call, const int64_t* drawn, int count) {
    constexpr int lanes = kLanes<T>;
    Maps<T> x = input_maps(count, rounded_up(count, lanes));
    x.data = arena_.take(x.size());
    const ptrdiff_t numbers = ptrdiff_t(destination_.size());
    if (call.poses) posed_.resize(size_t(lanes * numbers));
    for (int first = 0; first < x.lanes; first += lanes) {
      // Lanes beyond the images repeat the last image and are cleared below.
      const T* image[lanes];
      for (int i = 0; i < lanes; ++i) {
        const int64_t* number = drawn + std::min(first + i, count - 1);
        image[i] = call.images + *number * numbers;
        if (!call.poses) continue;
        pose(call, image[i], call.poses[number - call.drawn], posed_.data() + i * numbers);
        image[i] = posed_.data() + i * numbers;
      }
      ptrdiff_t k = 0;
      for (; k + lanes <= numbers; k += lanes) {
        Vector<T> square[lanes];
        for (int i = 0; i < lanes; ++i) std::memcpy(&square[i], image[i] + k, sizeof square[i]);
        transpose<T>(square);
        for (int i = 0; i < lanes; ++i)
          store(x.data + destination_[size_t(k + i)] * x.lanes + first, square[i]);
      }
      for (; k < numbers; ++k)
        for (int i = 0; i < lanes; ++i)
          x.data[destination_[size_t(k)] * x.lanes + first + i] = image[i][k];
    }
    clear_tail(x);
    return x;
  }

  // Copies an image shifted and mirrored according to its pose, and padded with 0.
  // Twin of runtime.data.Augmentation.apply.
  void pose(const TrainCall<T>& call, const T* image, int64_t pose, T* posed) const {
    const int height = spec_.height, width = spec_.width, channels = spec_.channels;
    const int64_t span = 2 * call.reach + 1;
    const bool flipped = pose / (span * span) > 0;
    const int down = int(pose / span % span - call.reach), right = int(pose % span - call.reach);
    // Columns of the image that can be seen, and where the first of them goes if nothing is mirrored.
    const int begin = std::max(0, right), end = std::min(width, width + right);
    std::fill(posed, posed + height * width * channels, T(0));
    for (int row = std::max(0, -down); row < std::min(height, height - down); ++row) {
      const T* from = image + (row + down) * width * channels;
      T* to = posed + row * width * channels;
      if (!flipped) {
        std::copy(from + begin * channels, from + end * channels, to + (begin - right) * channels);
        continue;
      }
      const auto mirror = [&](auto count) {
        T* place = to + (width - 1 + right - begin) * count;
        for (int column = begin; column < end; ++column, place -= count)
          for (int channel = 0; channel < count; ++channel)
            place[channel] = from[column * count + channel];
      };
      // Known to the compiler, three colours take two thirds of the time.
      if (channels == 3)
        mirror(std::integral_constant<int, 3>{});
      else
        mirror(channels);
    }
  }

  // `measures`, if not null, receives the measurements of the slots.
  void backward(Maps<T> dy, T* measures) {
    for (size_t i = path_.size(); i-- > 0;) {
      const Stage& stage = stages_[path_[i].stage];
      if (measures && stage.slot >= 0) measure_slot(stage.slot, dy, measures);
      const Maps<T> dx = stage.layer->backward(dy, i > 0, arena_);
      if (dx.data != dy.data) arena_.give_back(dy);
      for (size_t s : stage.spans) {
        const Maps<T> through = slots_[s]->source_gradient();
        if (through.data == nullptr) continue;
        combine(dx, dx, through, [](Vector<T> a, Vector<T> b) { return a + b; });
        arena_.give_back(through);
      }
      dy = dx;
    }
  }

  // Writes what the gradient dy of a slot's output shows in half the images, if the slot has no
  // seed.
  // Twin of tolaria.slot_measures.slot_measures.
  void measure_slot(int s, Maps<T> dy, T* measures) {
    if (has_seed(s)) return;
    Watched& watched = watched_[size_t(s)];
    const Maps<T> x = first_half(watched.x, arena_), g = first_half(dy, arena_);
    const SlotSums<T> found = slot_sums(x, g);
    // The loss of these images alone has this times their gradient.
    const T factor = T(dy.images) / T(x.images);
    const T count = T(x.channels) * T(x.pixels()) * T(x.images);
    T* own = measures + s * kSlotMeasures;
    const T predictions = T(dy.images) * T(predictions_);
    own[int(SlotStatistic::gradient)] = std::sqrt(found.gradient_squares * predictions * factor);
    own[int(SlotStatistic::activation)] = std::sqrt(found.squares / count);
    own[int(SlotStatistic::active_share)] = found.active / count;
    if (spans(s)) {
      const Maps<T> source = first_half(watched.source, arena_);
      watched.newborns.measure_units(source, g, arena_, own + kStatistics);
      arena_.give_back(source);
    } else {
      watched.newborns.measure(x, g, found.products, arena_, own + kStatistics);
    }
    for (int layer = 0; layer < kLastLayers; ++layer) own[kStatistics + layer] *= factor;
    arena_.give_back(g);
    arena_.give_back(x);
  }

  // Writes the gradient-to-weight ratios, once the backward pass has found the host's gradient.
  void measure_blocks(const T* parameters, T* measures) const {
    for (int s = 0; s < slot_count(); ++s) {
      if (has_seed(s)) continue;
      const Watched& watched = watched_[size_t(s)];
      const ptrdiff_t count = watched.block_end - watched.block;
      measures[s * kSlotMeasures + int(SlotStatistic::gradient_ratio)] =
          norm(host_gradient_.data() + watched.block, count) /
          norm(parameters + watched.block, count);
    }
  }

  void update_host(const TrainCall<T>& call, int64_t n) {
    const Tuning tuning = call.tuning ? Tuning(call.tuning[n]) : Tuning::all;
    T* gradient = host_gradient_.data();
    ptrdiff_t place = n * parameters_;
    const ptrdiff_t frozen = tuning == Tuning::last ? parameters_ - block_sizes_.back() : 0;
    std::fill(gradient, gradient + frozen, T(0));
    const T length = norm(gradient, parameters_);
    call.host_norm[n] = length;
    call.host_step[n] += T(1);
    Update<T> update{Rule(call.rule),      call.host_rate[n],
                     T(call.weight_decay), T(call.momentum),
                     clip_scale(length, T(call.most_norm)), call.host_step[n]};
    const auto next = [&](T factor, ptrdiff_t count) {
      update.learning_rate = call.host_rate[n] * factor;
      apply(update, gradient, call.host + place, call.host_first + place, call.host_second + place,
            count);
      gradient += count;
      place += count;
    };
    if (tuning == Tuning::auto_rgn) {
      const std::vector<T> factors = relative_rates(gradient, call.host + place, block_sizes_);
      for (size_t block = 0; block < factors.size(); ++block)
        next(factors[block], block_sizes_[block]);
    } else {
      next(T(0), frozen);
      next(T(1), parameters_ - frozen);
    }
  }

  void update_seeds(const TrainCall<T>& call, int64_t n) {
    for (int s = 0; s < slot_count(); ++s) {
      Slot<T>& slot = *slots_[size_t(s)];
      const Seed<T>& seed = slot.seed();
      if (seed.kind < 0) continue;
      const int branch = slot.branch(seed.kind).parameters();
      const int gate = seed.form == Form::gate ? slot.gate_parameters() : 0;
      const T branch_norm = norm(seed.gradient, branch);
      const T gate_norm = norm(seed.gradient + slot.gate_offset(), gate);
      const T length = std::sqrt(branch_norm * branch_norm + gate_norm * gate_norm);
      report_seed(call, n, s, length);
      if (call.frozen[n * slot_count() + s]) continue;
      const int64_t row = n * ptrdiff_t(seed_gradient_[size_t(s)].size());
      call.seed_step[s][n] += T(1);
      const Update<T> update{Rule(call.rule),
                             call.seed_rate[n * slot_count() + s],
                             T(0),
                             T(call.momentum),
                             clip_scale(length, T(call.most_norm)),
                             call.seed_step[s][n]};
      const auto part = [&](ptrdiff_t offset, ptrdiff_t count) {
        apply(update, seed.gradient + offset, call.seed[s] + row + offset,
              call.seed_first[s] + row + offset, call.seed_second[s] + row + offset, count);
      };
      part(0, branch);
      part(slot.gate_offset(), gate);
    }
  }

  void report_seed(const TrainCall<T>& call, int64_t n, int s, T length) {
    const Seed<T>& seed = slots_[size_t(s)]->seed();
    call.seed_norm[n * slot_count() + s] = length;
    T* norms = call.tensor_norms[s] + n * call.tensor_counts[s];
    const T* gradient = seed.gradient;
    std::fill(norms, norms + call.tensor_counts[s], T(0));
    for (int size : slots_[size_t(s)]->branch(seed.kind).fields()) {
      *norms++ = norm(gradient, size);
      gradient += size;
    }
  }

  void set_alphas(const T* alpha) {
    for (int s = 0; s < slot_count(); ++s) slots_[size_t(s)]->set_alpha(alpha[s]);
  }

  int slot_count() const { return int(slots_.size()); }

  HostSpec spec_;  // its arrays belong to the caller and live only during construction
  std::vector<Stage> stages_;
  std::vector<Passage> path_;
  std::vector<size_t> stage_of_slot_;
  std::vector<Slot<T>*> slots_;
  std::vector<Watched> watched_;
  std::vector<ptrdiff_t> destination_;  // destination of each element of an image, in rows of lanes
  std::vector<T> posed_;                // images of one register of lanes, as they are posed
  std::vector<int> block_sizes_;
  std::vector<int64_t> labels_;
  const Embedding<T>* embedding_ = nullptr;  // of a transformer
  int predictions_ = 1;                      // per image
  int parameters_ = 0, buffers_ = 0;
  Arena<T> arena_;
  std::vector<T> host_gradient_;
  std::vector<std::vector<T>> seed_gradient_;
};

}  // namespace esper::hosts
