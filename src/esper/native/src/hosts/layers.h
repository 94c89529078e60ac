// Layers that keep the activations their backward pass needs, and chains of layers.
//
// A layer is bound to the parameters of one environment and runs forward, then backward on the same
// minibatch. Activations are in an arena that outlives both passes.

#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "convolution.h"
#include "normalisation.h"
#include "pooling.h"

namespace esper::hosts {

template <class T>
class Layer {
 public:
  virtual ~Layer() = default;

  // Sizes of the parameter tensors, in memory order.
  virtual std::vector<int> fields() const { return {}; }

  // Number of running statistics, which training updates without a gradient.
  virtual int buffers() const { return 0; }

  virtual void bind(const T* parameters, T* gradient, T* buffers) {
    parameters_ = parameters;
    gradient_ = gradient;
    buffers_ = buffers;
  }

  virtual Maps<T> forward(Maps<T> x, Arena<T>& arena) = 0;

  // Like `forward`, but with running statistics and without a backward pass.
  virtual Maps<T> evaluate(Maps<T> x, Arena<T>& arena) { return forward(x, arena); }

  // Writes the gradient of the parameters and returns that of the input; may overwrite dy. May
  // return empty maps if the input needs no gradient.
  virtual Maps<T> backward(Maps<T> dy, bool input_needs_gradient, Arena<T>& arena) = 0;

  // Whether `backward` leaves dy unchanged.
  virtual bool keeps_gradient() const { return false; }

  int parameters() const {
    int total = 0;
    for (int size : fields()) total += size;
    return total;
  }

 protected:
  const T* parameters_ = nullptr;
  T* gradient_ = nullptr;
  T* buffers_ = nullptr;
};

// A convolution with an optional bias and ReLU, weight [outputs, inputs, kernel, kernel].
template <class T>
class Convolution : public Layer<T> {
 public:
  Convolution(int inputs, int outputs, int kernel, bool bias = false, bool rectify = false)
      : outputs_(outputs), kernel_(kernel), bias_(bias), rectify_(rectify),
        weights_(outputs * inputs * kernel * kernel) {}

  std::vector<int> fields() const override {
    return bias_ ? std::vector<int>{weights_, outputs_} : std::vector<int>{weights_};
  }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x_ = x;
    y_ = arena.maps(x, outputs_);
    convolve(x, this->parameters_, kernel_, y_);
    if (bias_) add_bias();
    if (rectify_) transform(y_, [](Vector<T> value) { return rectified<T>(value); });
    return y_;
  }

  bool keeps_gradient() const override { return !rectify_; }

  Maps<T> backward(Maps<T> dy, bool input_needs_gradient, Arena<T>& arena) override {
    if (rectify_)
      combine(dy, y_, dy, [](Vector<T> y, Vector<T> d) { return where_active<T>(y, d); });
    correlate(dy, x_, kernel_, this->gradient_);
    if (bias_) sum_bias(dy);
    if (!input_needs_gradient) return {};
    const Maps<T> dx = arena.maps(x_);
    convolve_back(dy, this->parameters_, kernel_, arena.take(weights_), dx);
    return dx;
  }

 private:
  void add_bias() {
    for (int o = 0; o < outputs_; ++o) {
      const T bias = this->parameters_[weights_ + o];
      T* values = y_.channel(o);
      for (ptrdiff_t i = 0; i < y_.plane(); i += kLanes<T>)
        store(values + i, load(values + i) + bias);
    }
    clear_tail(y_);
  }

  void sum_bias(Maps<T> dy) {
    for (int o = 0; o < outputs_; ++o) {
      Vector<T> total = {};
      for (ptrdiff_t i = 0; i < dy.plane(); i += kLanes<T>) total += load(dy.channel(o) + i);
      this->gradient_[weights_ + o] = sum<T>(total);
    }
  }

  int outputs_, kernel_;
  bool bias_, rectify_;
  int weights_;
  Maps<T> x_, y_;
};

// A depthwise 3x3 convolution, weight [channels, 3, 3].
template <class T>
class DepthwiseConvolution : public Layer<T> {
 public:
  explicit DepthwiseConvolution(int channels) : channels_(channels) {}

  std::vector<int> fields() const override { return {9 * channels_}; }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x_ = x;
    const Maps<T> y = arena.maps(x);
    convolve_depthwise(x, this->parameters_, false, y);
    return y;
  }

  Maps<T> backward(Maps<T> dy, bool input_needs_gradient, Arena<T>& arena) override {
    correlate_depthwise(dy, x_, this->gradient_);
    if (!input_needs_gradient) return {};
    const Maps<T> dx = arena.maps(x_);
    convolve_depthwise(dy, this->parameters_, true, dx);
    return dx;
  }

 private:
  int channels_;
  Maps<T> x_;
};

// BatchNorm and ReLU; weight and bias, running mean and variance, [channels] each.
template <class T>
class BatchNorm : public Layer<T> {
 public:
  explicit BatchNorm(int channels) : channels_(channels) {}

  std::vector<int> fields() const override { return {channels_, channels_}; }
  int buffers() const override { return 2 * channels_; }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x_ = x;
    y_ = arena.maps(x);
    moments_ = arena.take(2 * channels_);
    batch_norm(x, this->parameters_, this->parameters_ + channels_, this->buffers_,
               this->buffers_ + channels_, moments_, y_);
    return y_;
  }

  Maps<T> evaluate(Maps<T> x, Arena<T>&) override {
    batch_norm_evaluated(x, this->parameters_, this->parameters_ + channels_, this->buffers_,
                         this->buffers_ + channels_);
    return x;
  }

  Maps<T> backward(Maps<T> dy, bool, Arena<T>&) override {
    batch_norm_back(x_, y_, this->parameters_, moments_, dy, this->gradient_,
                    this->gradient_ + channels_);
    return dy;
  }

 private:
  int channels_;
  Maps<T> x_, y_;
  T* moments_ = nullptr;
};

// GroupNorm with an optional ReLU; for one pixel and one group this is LayerNorm.
template <class T>
class GroupNorm : public Layer<T> {
 public:
  GroupNorm(int channels, int groups, bool rectify)
      : channels_(channels), groups_(groups), rectify_(rectify) {}

  std::vector<int> fields() const override { return {channels_, channels_}; }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x_ = x;
    y_ = arena.maps(x);
    moments_ = arena.take(ptrdiff_t(2) * groups_ * x.lanes);
    group_norm(x, groups_, this->parameters_, this->parameters_ + channels_, rectify_, moments_,
               y_);
    return y_;
  }

  Maps<T> backward(Maps<T> dy, bool input_needs_gradient, Arena<T>& arena) override {
    group_norm_back(x_, y_, groups_, this->parameters_, rectify_, moments_, dy,
                    input_needs_gradient, this->gradient_, this->gradient_ + channels_,
                    arena.take(2 * x_.lanes));
    return dy;
  }

 private:
  int channels_, groups_;
  bool rectify_;
  Maps<T> x_, y_;
  T* moments_ = nullptr;
};

template <class T>
class MaxPool : public Layer<T> {
 public:
  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x_ = x;
    y_ = x;
    y_.height /= 2;
    y_.width /= 2;
    y_.data = arena.take(y_.size());
    max_pool(x, y_);
    return y_;
  }

  Maps<T> backward(Maps<T> dy, bool, Arena<T>& arena) override {
    const Maps<T> dx = arena.maps(x_);
    max_pool_back(x_, y_, dy, dx);
    return dx;
  }

 private:
  Maps<T> x_, y_;
};

template <class T>
class MeanPool : public Layer<T> {
 public:
  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x_ = x;
    Maps<T> y = x;
    y.height = y.width = 1;
    y.data = arena.take(y.size());
    mean_pool(x, y);
    return y;
  }

  Maps<T> backward(Maps<T> dy, bool input_needs_gradient, Arena<T>& arena) override {
    if (!input_needs_gradient) return {};
    const Maps<T> dx = arena.maps(x_);
    mean_pool_back(dy, dx);
    return dx;
  }

 private:
  Maps<T> x_;
};

// A sequence of layers; their parameters are consecutive in memory.
template <class T>
class Chain : public Layer<T> {
 public:
  template <class... Layers>
  static std::unique_ptr<Chain> of(Layers... layers) {
    auto chain = std::make_unique<Chain>();
    (chain->add(std::make_unique<Layers>(std::move(layers))), ...);
    return chain;
  }

  void add(std::unique_ptr<Layer<T>> layer) { layers_.push_back(std::move(layer)); }

  std::vector<int> fields() const override {
    std::vector<int> all;
    for (const auto& layer : layers_)
      for (int size : layer->fields()) all.push_back(size);
    return all;
  }

  int buffers() const override {
    int total = 0;
    for (const auto& layer : layers_) total += layer->buffers();
    return total;
  }

  void bind(const T* parameters, T* gradient, T* buffers) override {
    for (const auto& layer : layers_) {
      layer->bind(parameters, gradient, buffers);
      parameters += layer->parameters();
      gradient += layer->parameters();
      buffers += layer->buffers();
    }
  }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    for (const auto& layer : layers_) x = layer->forward(x, arena);
    return x;
  }

  Maps<T> evaluate(Maps<T> x, Arena<T>& arena) override {
    for (const auto& layer : layers_) x = layer->evaluate(x, arena);
    return x;
  }

  bool keeps_gradient() const override { return layers_.back()->keeps_gradient(); }

  Maps<T> backward(Maps<T> dy, bool input_needs_gradient, Arena<T>& arena) override {
    for (size_t i = layers_.size(); i-- > 0;) {
      const Maps<T> dx = layers_[i]->backward(dy, i > 0 || input_needs_gradient, arena);
      // The caller still owns the first dy.
      if (i + 1 < layers_.size() && dx.data != dy.data) arena.give_back(dy);
      dy = dx;
    }
    return dy;
  }

 private:
  std::vector<std::unique_ptr<Layer<T>>> layers_;
};

}  // namespace esper::hosts
