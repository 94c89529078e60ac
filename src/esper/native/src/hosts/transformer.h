// The layers of a transformer; a register holds one position of several sequences.

#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "attention.h"
#include "convolution.h"
#include "normalisation.h"

namespace esper::hosts {

// Sums of rows of two tables: row `byte` of [classes, channels], row `position` of [width, channels].
// The input is [1, 1, width, lanes].
// Twin of kasmina.ops.embedding.
template <class T>
class Embedding : public Layer<T> {
 public:
  Embedding(int classes, int width, int channels)
      : Layer<T>({classes * channels, width * channels}), classes_(classes), channels_(channels) {}

  int classes() const { return classes_; }
  const T* table() const { return this->parameters_; }
  T* table_gradient() const { return this->gradient_; }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x_ = x;
    const Maps<T> y = arena.maps(x, channels_);
    for_each_square([&](int pixel, int lane, int first, int count) {
      Vector<T> square[kLanes<T>] = {};
      for (int i = 0; i < kLanes<T>; ++i)
        std::memcpy(&square[i], table() + row(pixel, lane + i) + first, size_t(count) * sizeof(T));
      transpose<T>(square);
      const T* position = positions() + ptrdiff_t(pixel) * channels_ + first;
      for (int i = 0; i < count; ++i)
        store(y.channel(first + i) + ptrdiff_t(pixel) * y.lanes + lane, square[i] + position[i]);
    });
    clear_tail(y);
    return y;
  }

  // Adds to the gradient of the first table, which the head has written.
  Maps<T> backward(Maps<T> dy, bool, Arena<T>&) override {
    T* const of_positions = this->gradient_ + this->fields_[0];
    std::fill(of_positions, of_positions + this->fields_[1], T(0));
    const auto add = [](T* to, Vector<T> value, int count) {
      for (int i = 0; i < count; ++i) to[i] += value[i];
    };
    for_each_square([&](int pixel, int lane, int first, int count) {
      Vector<T> square[kLanes<T>] = {}, total = {};
      for (int i = 0; i < count; ++i)
        square[i] = load(dy.channel(first + i) + ptrdiff_t(pixel) * dy.lanes + lane);
      transpose<T>(square);
      for (int i = 0; i < kLanes<T>; ++i) {
        add(table_gradient() + row(pixel, lane + i) + first, square[i], count);
        total += square[i];
      }
      add(of_positions + ptrdiff_t(pixel) * channels_ + first, total, count);
    });
    return {};
  }

 private:
  const T* positions() const { return this->parameters_ + this->fields_[0]; }

  // Offset of the row of the byte at a position.
  ptrdiff_t row(int pixel, int lane) const {
    return ptrdiff_t(x_.data[ptrdiff_t(pixel) * x_.lanes + lane]) * channels_;
  }

  // Calls f(pixel, lane, first, count) for every register of lanes and `count` channels of it.
  template <class Function>
  void for_each_square(Function f) const {
    for (int pixel = 0; pixel < x_.width; ++pixel)
      for (int lane = 0; lane < x_.lanes; lane += kLanes<T>)
        for (int first = 0; first < channels_; first += kLanes<T>)
          f(pixel, lane, first, std::min(kLanes<T>, channels_ - first));
  }

  int classes_, channels_;
  Maps<T> x_;
};

// x times the probability that a normal variable is below x (Hendrycks and Gimpel, "Gaussian error
// linear units", 2016).
template <class T>
class Gelu : public Layer<T> {
 public:
  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    slope_ = arena.maps(x);
    for (ptrdiff_t i = 0; i < x.size(); i += kLanes<T>) {
      const Vector<T> value = load(x.data + i);
      const Normal<T> normal = normal_at<T>(value);
      const Vector<T> below = value < T(0) ? normal.tail : T(1) - normal.tail;
      store(x.data + i, value * below);
      store(slope_.data + i, below + value * normal.density);
    }
    return x;
  }

  Maps<T> backward(Maps<T> dy, bool, Arena<T>&) override {
    combine(dy, dy, slope_, [](Vector<T> d, Vector<T> slope) { return d * slope; });
    return dy;
  }

 private:
  Maps<T> slope_;
};

// x plus a chain of layers of it, the last of which keeps the gradient.
template <class T>
class Residual : public Layer<T> {
 public:
  explicit Residual(std::unique_ptr<Chain<T>> chain)
      : Layer<T>(chain->fields()), chain_(std::move(chain)) {}

  void bind(const T* parameters, T* gradient, T* buffers) override {
    chain_->bind(parameters, gradient, buffers);
  }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    const Maps<T> y = chain_->forward(x, arena);
    combine(y, y, x, add);
    return y;
  }

  Maps<T> backward(Maps<T> dy, bool, Arena<T>& arena) override {
    const Maps<T> dx = chain_->backward(dy, true, arena);
    combine(dx, dx, dy, add);
    return dx;
  }

 private:
  static Vector<T> add(Vector<T> a, Vector<T> b) { return a + b; }

  std::unique_ptr<Chain<T>> chain_;
};

// LayerNorm, then the table of the embedding as a linear map to logits.
template <class T>
class TiedHead : public Layer<T> {
 public:
  TiedHead(int channels, const Embedding<T>& embedding)
      : Layer<T>({channels, channels}), norm_(channels), embedding_(embedding) {}

  void bind(const T* parameters, T* gradient, T* buffers) override {
    norm_.bind(parameters, gradient, buffers);
  }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    normal_ = norm_.forward(x, arena);
    const Maps<T> logits = arena.maps(x, embedding_.classes());
    convolve(normal_, embedding_.table(), 1, logits);
    return logits;
  }

  Maps<T> backward(Maps<T> dy, bool, Arena<T>& arena) override {
    correlate(dy, normal_, 1, embedding_.table_gradient(), arena);
    const Maps<T> dx = arena.maps(normal_);
    convolve_back(dy, embedding_.table(), 1, dx, arena);
    return norm_.backward(dx, true, arena);
  }

 private:
  LayerNorm<T> norm_;
  const Embedding<T>& embedding_;
  Maps<T> normal_;
};

// The layers of a block: attention with `heads`, none if 0, and a perceptron.
// Twin of kasmina.hosts.transformer.TransformerHost.block.
template <class T>
std::vector<std::unique_ptr<Layer<T>>> transformer_block(int channels, int heads) {
  std::vector<std::unique_ptr<Layer<T>>> layers;
  const auto add = [&](auto... parts) {
    auto chain = Chain<T>::of(LayerNorm<T>(channels), std::move(parts)...);
    layers.push_back(std::make_unique<Residual<T>>(std::move(chain)));
  };
  using Linear = Convolution<T>;
  if (heads > 0)
    add(Linear(channels, 3 * channels, 1), CausalAttention<T>(heads), Linear(channels, channels, 1));
  add(Linear(channels, 4 * channels, 1), Gelu<T>(), Linear(4 * channels, channels, 1));
  return layers;
}

}  // namespace esper::hosts
