// A slot of the host. It combines the branch f of its seed with the activation x:
//
//   add       x + alpha f(x)
//   multiply  x + alpha x tanh f(x)
//   gate      x + alpha g(x) f(x), with g(x) in (0, 1) for each image, or position of a sequence
//
// At alpha 0 a seed is isolated: the output is x, f learns as if alpha were 1, and x gets no
// gradient through it (the straight-through estimator).
//
// In a slot that spans a layer, f reads the input of this layer instead of x.

#pragma once

#include <optional>
#include <vector>

#include "blueprints.h"

namespace esper::hosts {

enum class Form : int { add, multiply, gate };

// The seed in a slot of one environment.
template <class T>
struct Seed {
  int kind = -1;  // negative: no seed
  Form form = Form::add;
  T alpha = 0;
  const T* parameters = nullptr;
  T* gradient = nullptr;
};

// Twin of tolaria.backends.torch.slot_block.
template <class T>
class Slot : public Layer<T> {
 public:
  Slot(int channels, int gate_offset, Family family, std::optional<Span> span)
      : channels_(channels), gate_offset_(gate_offset), family_(family), span_(span),
        branches_(kKinds) {
    const int hidden = std::max(8, channels / 4);
    gate_ = std::make_unique<Chain<T>>();
    if (family != Family::sequence) gate_->add(std::make_unique<MeanPool<T>>());
    gate_->add(std::make_unique<Convolution<T>>(channels, hidden, 1, true, true));
    gate_->add(std::make_unique<Convolution<T>>(hidden, 1, 1, true));
  }

  // The layers of a blueprint, created on first use. Their parameters are in the store of the seed;
  // the slot as a layer of the host has none.
  Layer<T>& branch(int kind) {
    std::unique_ptr<Layer<T>>& layers = branches_[size_t(kind)];
    if (layers == nullptr)
      layers = span_ ? make_spanning_branch<T>(Kind(kind), *span_, channels_)
                     : make_branch<T>(Kind(kind), channels_, family_);
    return *layers;
  }

  int gate_offset() const { return gate_offset_; }
  int gate_parameters() const { return gate_->parameters(); }

  void bind_seed(const Seed<T>& seed) {
    seed_ = seed;
    if (seed.kind < 0) return;
    branch(seed.kind).bind(seed.parameters, seed.gradient, nullptr);
    if (seed.form == Form::gate)
      gate_->bind(seed.parameters + gate_offset_, seed.gradient + gate_offset_, nullptr);
  }

  const Seed<T>& seed() const { return seed_; }

  const std::optional<Span>& span() const { return span_; }

  // What f reads in a slot that spans a layer. Without a gradient, `source_gradient` stays empty.
  void set_source(Maps<T> source, bool needs_gradient) {
    source_ = source;
    source_needs_gradient_ = needs_gradient;
  }

  // The gradient of the source; empty if the last backward pass found none.
  Maps<T> source_gradient() const { return source_gradient_; }

  // Changes the alpha of the bound seed; at 0 `evaluate` skips the seed.
  void set_alpha(T alpha) { seed_.alpha = alpha; }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    if (seed_.kind < 0) return x;
    x_ = x;
    f_ = branch(seed_.kind).forward(span_ ? source_ : x, arena);
    if (seed_.form == Form::gate) open_gate(x, arena);
    if (seed_.form == Form::multiply)
      transform(f_, [](Vector<T> f) { return hyperbolic_tangent<T>(f); });
    if (!isolated()) return attached(arena);
    // The layer after a span may overwrite its input.
    return span_ ? arena.copy(x) : x;
  }

  Maps<T> evaluate(Maps<T> x, Arena<T>& arena) override {
    return seed_.kind < 0 || isolated() ? x : forward(x, arena);
  }

  Maps<T> backward(Maps<T> dy, bool, Arena<T>& arena) override {
    source_gradient_ = {};
    if (seed_.kind < 0) return dy;
    const T factor = isolated() ? T(1) : seed_.alpha;
    const bool as_it_is =
        factor == T(1) && seed_.form == Form::add && branch(seed_.kind).keeps_gradient();
    const Maps<T> df = as_it_is ? dy : arena.maps(dy);
    if (!as_it_is) combine(df, dy, dy, [factor](Vector<T> d, Vector<T>) { return d * factor; });
    const bool flows = !isolated();
    if (seed_.form == Form::multiply) multiply_back(dy, df, flows);
    Maps<T> through_gate;
    if (seed_.form == Form::gate) through_gate = gate_back(df, flows, arena);
    const bool read_flows = flows && (!span_ || source_needs_gradient_);
    const Maps<T> dx = branch(seed_.kind).backward(df, read_flows, arena);
    if (!as_it_is && df.data != dx.data) arena.give_back(df);
    if (!flows) return dy;
    const auto add = [](Vector<T> a, Vector<T> b) { return a + b; };
    if (span_) {
      source_gradient_ = dx;
    } else {
      combine(dy, dy, dx, add);
      arena.give_back(dx);
    }
    if (seed_.form == Form::gate) combine(dy, dy, through_gate, add);
    return dy;
  }

 private:
  bool isolated() const { return seed_.alpha == T(0); }

  // x + alpha m, where m is f, x tanh f or g f. `add` does not need f again and overwrites it.
  Maps<T> attached(Arena<T>& arena) {
    const Maps<T> y = seed_.form == Form::add ? f_ : arena.maps(x_);
    const T alpha = seed_.alpha;
    if (seed_.form == Form::add)
      combine(y, x_, f_, [alpha](Vector<T> x, Vector<T> f) { return x + f * alpha; });
    if (seed_.form == Form::multiply)
      combine(y, x_, f_, [alpha](Vector<T> x, Vector<T> f) { return x + x * f * alpha; });
    if (seed_.form == Form::gate)
      for_each_gate([&](ptrdiff_t i, ptrdiff_t gate) {
        store(y.data + i,
              load(x_.data + i) + load(gates_.data + gate) * load(f_.data + i) * alpha);
      });
    return y;
  }

  void open_gate(Maps<T> x, Arena<T>& arena) {
    gates_ = gate_->forward(x, arena);
    transform(gates_, [](Vector<T> value) { return sigmoid<T>(value); });
  }

  // df becomes the gradient of f; f_ holds t = tanh f. Adds the gradient through the factor x to dy.
  void multiply_back(Maps<T> dy, Maps<T> df, bool flows) {
    for (ptrdiff_t i = 0; i < df.size(); i += kLanes<T>) {
      const Vector<T> d = load(df.data + i), t = load(f_.data + i);
      store(df.data + i, d * load(x_.data + i) * (T(1) - t * t));
      if (flows) store(dy.data + i, load(dy.data + i) + d * t);
    }
  }

  // df becomes the gradient of f; returns the gradient of x through the gate.
  Maps<T> gate_back(Maps<T> df, bool flows, Arena<T>& arena) {
    const Maps<T> logits = arena.maps(gates_);
    std::fill(logits.data, logits.data + logits.size(), T(0));
    for_each_gate([&](ptrdiff_t i, ptrdiff_t gate) {
      const Vector<T> d = load(df.data + i);
      store(logits.data + gate, load(logits.data + gate) + d * load(f_.data + i));
      store(df.data + i, d * load(gates_.data + gate));
    });
    combine(logits, logits, gates_,
            [](Vector<T> d, Vector<T> g) { return d * g * (T(1) - g); });
    return gate_->backward(logits, flows, arena);
  }

  // Calls f(index, gate) for every register of the activation, with the place of its gates.
  template <class Function>
  void for_each_gate(Function f) const {
    for (ptrdiff_t first = 0; first < x_.size(); first += gates_.size())
      for (ptrdiff_t gate = 0; gate < gates_.size(); gate += kLanes<T>) f(first + gate, gate);
  }

  int channels_, gate_offset_;
  Family family_;
  std::optional<Span> span_;
  std::vector<std::unique_ptr<Layer<T>>> branches_;
  std::unique_ptr<Chain<T>> gate_;
  Seed<T> seed_;
  Maps<T> x_, f_, gates_, source_, source_gradient_;
  bool source_needs_gradient_ = false;
};

}  // namespace esper::hosts
