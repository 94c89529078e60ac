// The residual branch f of each blueprint. Parameters are laid out as in kasmina/blueprints.

#pragma once

#include <cmath>

#include "attention.h"
#include "calls.h"
#include "convolution.h"
#include "normalisation.h"
#include "pooling.h"

namespace esper::hosts {

constexpr size_t kKinds = size_t(Kind::lora_large) + 1;

// f = tanh(s) (norm(x) - x). Parameters: a scalar s, then weight and bias of the norm.
// Twin of kasmina.blueprints.conv.norm.
template <class T>
class ScaledNorm : public Layer<T> {
 public:
  ScaledNorm(int channels, std::unique_ptr<Layer<T>> norm)
      : Layer<T>({1, channels, channels}), norm_(std::move(norm)) {}

  void bind(const T* parameters, T* gradient, T* buffers) override {
    Layer<T>::bind(parameters, gradient, buffers);
    norm_->bind(parameters + 1, gradient + 1, buffers);
  }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    scale_ = std::tanh(this->parameters_[0]);
    difference_ = arena.maps(x);
    combine(difference_, norm_->forward(x, arena), x,
            [](Vector<T> normal, Vector<T> value) { return normal - value; });
    const Maps<T> f = arena.maps(x);
    const T scale = scale_;
    combine(f, difference_, difference_, [scale](Vector<T> d, Vector<T>) { return d * scale; });
    return f;
  }

  Maps<T> backward(Maps<T> dy, bool input_needs_gradient, Arena<T>& arena) override {
    Vector<T> total = {};
    for (ptrdiff_t i = 0; i < dy.size(); i += kLanes<T>)
      total += load(dy.data + i) * load(difference_.data + i);
    this->gradient_[0] = sum<T>(total) * (T(1) - scale_ * scale_);
    const T scale = scale_;
    transform(dy, [scale](Vector<T> d) { return d * scale; });
    const Maps<T> through = arena.maps(dy);
    std::copy(dy.data, dy.data + dy.size(), through.data);
    const Maps<T> dx = norm_->backward(through, input_needs_gradient, arena);
    combine(dx, dx, dy, [](Vector<T> a, Vector<T> b) { return a - b; });
    return dx;
  }

 private:
  std::unique_ptr<Layer<T>> norm_;
  T scale_ = 0;
  Maps<T> difference_;
};

// Squeeze and excitation: f = x (W2 relu(W1 mean(x)) + b).
// Twin of kasmina.blueprints.conv.attention.
template <class T>
class Attention : public Layer<T> {
 public:
  explicit Attention(int channels)
      : weights_(Chain<T>::of(MeanPool<T>(),
                              Convolution<T>(channels, width(channels), 1, false, true),
                              Convolution<T>(width(channels), channels, 1, true))) {
    this->fields_ = weights_->fields();
  }

  void bind(const T* parameters, T* gradient, T* buffers) override {
    weights_->bind(parameters, gradient, buffers);
  }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x_ = x;
    factor_ = weights_->forward(x, arena);
    const Maps<T> f = arena.maps(x);
    scale(x, f);
    return f;
  }

  Maps<T> backward(Maps<T> dy, bool input_needs_gradient, Arena<T>& arena) override {
    const Maps<T> gradient = arena.maps(factor_);
    for (int c = 0; c < dy.channels; ++c) {
      for (int lane = 0; lane < dy.lanes; lane += kLanes<T>) {
        Vector<T> total = {};
        for (ptrdiff_t i = lane; i < dy.plane(); i += dy.lanes)
          total += load(dy.channel(c) + i) * load(x_.channel(c) + i);
        store(gradient.channel(c) + lane, total);
      }
    }
    const Maps<T> through = weights_->backward(gradient, input_needs_gradient, arena);
    if (!input_needs_gradient) return {};
    scale(dy, dy);
    combine(dy, dy, through, [](Vector<T> a, Vector<T> b) { return a + b; });
    return dy;
  }

 private:
  static int width(int channels) { return std::max(1, channels / 4); }

  // out = in times the factor of each image and channel.
  void scale(Maps<T> in, Maps<T> out) const {
    for (int c = 0; c < in.channels; ++c)
      for (ptrdiff_t pixel = 0; pixel < in.plane(); pixel += in.lanes)
        for (int lane = 0; lane < in.lanes; lane += kLanes<T>)
          store(out.channel(c) + pixel + lane,
                load(in.channel(c) + pixel + lane) * load(factor_.channel(c) + lane));
  }

  std::unique_ptr<Chain<T>> weights_;
  Maps<T> x_, factor_;
};

// LayerNorm, linear, ReLU, linear.
// Twin of kasmina.blueprints.mlp._perceptron.
template <class T>
std::unique_ptr<Layer<T>> perceptron(int channels, int hidden) {
  return Chain<T>::of(LayerNorm<T>(channels),
                      Convolution<T>(channels, hidden, 1, true, true),
                      Convolution<T>(hidden, channels, 1));
}

// Twin of kasmina.blueprints.sequence.sequence_attention.
template <class T>
std::unique_ptr<Layer<T>> sequence_attention(int channels) {
  const int heads = channels % 4 == 0 ? 4 : channels % 2 == 0 ? 2 : 1;
  return Chain<T>::of(LayerNorm<T>(channels), Convolution<T>(channels, 3 * channels, 1),
                      CausalAttention<T>(heads), Convolution<T>(channels, channels, 1));
}

// The layers that a slot spans. Twin of kasmina.blueprints.spans.Span.
struct Span {
  int inputs;
  std::vector<int> units;  // of each layer
  int kernel;
  bool pooled, last;

  int outgoing_kernel() const { return last ? 1 : kernel; }
};

// Twin of kasmina.blueprints.spans.span_blueprint.
template <class T>
std::unique_ptr<Layer<T>> make_spanning_branch(Kind kind, const Span& span, int outputs) {
  using Conv = Convolution<T>;
  const int factor = kind == Kind::conv_heavy || kind == Kind::mlp ? 3 : 1;
  auto layers = std::make_unique<Chain<T>>();
  int inputs = span.inputs;
  for (int width : span.units) {
    const int units = (span.units.size() > 1 ? 2 * factor + 1 : factor) * width;
    layers->add(std::make_unique<Conv>(inputs, units, span.kernel));
    layers->add(std::make_unique<GroupNorm<T>>(units, norm_groups(units), true));
    inputs = units;
  }
  if (span.pooled) layers->add(std::make_unique<MaxPool<T>>());
  if (span.last) layers->add(std::make_unique<MeanPool<T>>());
  layers->add(std::make_unique<Conv>(inputs, outputs, span.outgoing_kernel()));
  return layers;
}

// Twin of kasmina.blueprints.build.
template <class T>
std::unique_ptr<Layer<T>> make_branch(Kind kind, int channels, Family family) {
  using Conv = Convolution<T>;
  const bool sequence = family == Family::sequence;
  const auto norm = [](int width, bool rectify) {
    return GroupNorm<T>(width, norm_groups(width), rectify);
  };
  const int narrow = std::max(8, channels / 4), wide = 4 * channels;
  switch (kind) {
    case Kind::norm:
      if (sequence)
        return std::make_unique<ScaledNorm<T>>(channels, std::make_unique<LayerNorm<T>>(channels));
      return std::make_unique<ScaledNorm<T>>(
          channels, std::make_unique<GroupNorm<T>>(norm(channels, false)));
    case Kind::attention:
      if (sequence) return sequence_attention<T>(channels);
      return std::make_unique<Attention<T>>(channels);
    case Kind::conv_small:
      return Chain<T>::of(norm(channels, true), Conv(channels, channels, 1));
    case Kind::conv_light:
      return Chain<T>::of(norm(channels, true), Conv(channels, channels, 3));
    case Kind::conv_heavy:
      return Chain<T>::of(Conv(channels, wide, 3), norm(wide, true), Conv(wide, channels, 1));
    case Kind::depthwise:
      return Chain<T>::of(DepthwiseConvolution<T>(channels), norm(channels, true),
                          Conv(channels, channels, 1));
    case Kind::bottleneck:
      return Chain<T>::of(norm(channels, false), Conv(channels, narrow, 1, false, true),
                          Conv(narrow, narrow, 3, false, true), Conv(narrow, channels, 1));
    case Kind::mlp_small:
      return perceptron<T>(channels, 2 * channels);
    case Kind::mlp:
      return perceptron<T>(channels, 4 * channels);
    case Kind::lora:
      return Chain<T>::of(Conv(channels, 8, 1), Conv(8, channels, 1));
    case Kind::lora_large:
      return Chain<T>::of(Conv(channels, 32, 1), Conv(32, channels, 1));
  }
  return nullptr;
}

}  // namespace esper::hosts
