// Layers that keep the activations their backward pass needs, and chains of layers.
//
// A layer is bound to the parameters of one environment and runs forward, then backward on the same
// minibatch. Activations are in an arena that outlives both passes.

#pragma once

#include <memory>
#include <vector>

#include "maps.h"

namespace esper::hosts {

template <class T>
class Layer {
 public:
  // `fields` are the sizes of the parameter tensors, in memory order.
  explicit Layer(std::vector<int> fields = {}) : fields_(std::move(fields)) {}
  virtual ~Layer() = default;

  const std::vector<int>& fields() const { return fields_; }

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
    for (int size : fields_) total += size;
    return total;
  }

 protected:
  std::vector<int> fields_;
  const T* parameters_ = nullptr;
  T* gradient_ = nullptr;
  T* buffers_ = nullptr;
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

  void add(std::unique_ptr<Layer<T>> layer) {
    for (int size : layer->fields()) this->fields_.push_back(size);
    layers_.push_back(std::move(layer));
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
