// LayerNorm and the LSTM, over the rows of a block of environments.

#pragma once

#include <array>
#include <cmath>

#include "linear.h"

namespace esper::policy {

// LayerNorm and ReLU over rows of `columns` elements; the padding of y is 0.
template <class T>
class LayerNorm {
 public:
  LayerNorm() = default;

  LayerNorm(const T* weight, const T* bias, int columns, Arena<T>& arena) : columns_(columns) {
    for (T** vector : {&weight_, &bias_, &ones_}) {
      *vector = arena.take(padded<T>(columns));
      std::fill_n(*vector, padded<T>(columns), T(0));
    }
    std::copy_n(weight, columns, weight_);
    std::copy_n(bias, columns, bias_);
    std::fill_n(ones_, columns, T(1));
  }

  // Normalises x in place; `scale` [rows] receives 1 / deviation, y the output.
  void forward(Matrix<T> x, ptrdiff_t rows, T* scale, Matrix<T> y) const {
    for (ptrdiff_t row = 0; row < rows; ++row) {
      T* numbers = x.row(row);
      const T mean = total([&](int c) { return load(numbers + c) * load(ones_ + c); }) / T(columns_);
      const auto centred = [&](int c) { return (load(numbers + c) - mean) * load(ones_ + c); };
      const T squares = total([&](int c) { return centred(c) * centred(c); });
      scale[row] = T(1) / std::sqrt(squares / T(columns_) + T(1e-5));
      for (int c = 0; c < columns_; c += kLanes<T>) {
        const Vector<T> normal = centred(c) * scale[row];
        store(numbers + c, normal);
        store(y.row(row) + c, rectified<T>(normal * load(weight_ + c) + load(bias_ + c)));
      }
    }
  }

  // dx receives the gradient of x, given dy, the gradient of the input of the ReLU; `weighted` receives
  // dy times normal.
  void backward(Matrix<T> normal, const T* scale, ptrdiff_t rows, Matrix<T> dy, Matrix<T> weighted,
                Matrix<T> dx) const {
    for (ptrdiff_t row = 0; row < rows; ++row) {
      const T *n = normal.row(row), *d = dy.row(row);
      const auto scaled = [&](int c) { return load(d + c) * load(weight_ + c); };
      const T mean = total(scaled) / T(columns_);
      const T along = total([&](int c) { return scaled(c) * load(n + c); }) / T(columns_);
      for (int c = 0; c < columns_; c += kLanes<T>) {
        store(weighted.row(row) + c, load(d + c) * load(n + c));
        store(dx.row(row) + c, (scaled(c) - mean - load(n + c) * along) * scale[row]);
      }
    }
  }

 private:
  template <class Function>
  T total(Function f) const {
    Vector<T> sums = {};
    for (int c = 0; c < columns_; c += kLanes<T>) sums += f(c);
    return sum<T>(sums);
  }

  int columns_ = 0;
  T *weight_ = nullptr, *bias_ = nullptr, *ones_ = nullptr;
};

// An LSTM layer with the gate order of torch: input, forget, cell, output. Gate g of a row begins at
// column g * padded(hidden). Rows are ordered by step, with `block` rows per step.
// Twin of tamiyo.policy.factored_lstm.FactoredLSTM.run_lstm.
template <class T>
class Lstm {
 public:
  static constexpr int kGates = 4;

  Lstm() = default;

  Lstm(ptrdiff_t block, int inputs, int hidden, int input_weight, int input_bias, int recurrent_weight,
       int recurrent_bias, const T* const* parameters, Arena<T>& arena)
      : block_(block), width_(padded<T>(hidden)) {
    for (int g = 0; g < kGates; ++g) {
      const int first = g * hidden;
      input_[size_t(g)] = {{input_weight, input_bias, first, 0, inputs},
                           inputs, hidden, parameters, arena};
      recurrent_[size_t(g)] = {{recurrent_weight, recurrent_bias, first, 0, hidden},
                               hidden, hidden, parameters, arena};
    }
  }

  void add_maps(std::vector<Linear<T>*>& all) {
    for (Linear<T>& map : input_) all.push_back(&map);
    for (Linear<T>& map : recurrent_) all.push_back(&map);
  }

  // x [steps * block, inputs]. `hidden` and `cell` have one more step: the first holds the
  // initial state. `gates` and `shown` = tanh(cell) are kept for `backward`.
  void forward(Matrix<T> x, ptrdiff_t steps, Matrix<T> gates, Matrix<T> cell, Matrix<T> shown,
               Matrix<T> hidden) const {
    for (int g = 0; g < kGates; ++g)
      input_[size_t(g)].forward(x, steps * block_, gates.column(g * width_));
    for (ptrdiff_t row = 0; row < steps * block_; row += block_) {
      const Matrix<T> now = gates.from(row);
      for (int g = 0; g < kGates; ++g)
        recurrent_[size_t(g)].forward(hidden.from(row), block_, now.column(g * width_), true);
      for (ptrdiff_t r = row; r < row + block_; ++r)
        activate(gates.row(r), cell.row(r), cell.row(r + block_), shown.row(r),
                 hidden.row(r + block_));
    }
  }

  // dh is the gradient of each step's output; the gradients of the pre-activations replace `gates`.
  // `carried` has room for two steps.
  void backward(Matrix<T> dh, ptrdiff_t steps, Matrix<T> gates, Matrix<T> cell, Matrix<T> shown,
                Matrix<T> carried, Matrix<T> dx) const {
    const Matrix<T> later = carried, cells = carried.from(block_);
    std::fill_n(carried.data, 2 * block_ * carried.stride, T(0));
    for (ptrdiff_t row = (steps - 1) * block_; row >= 0; row -= block_) {
      for (ptrdiff_t i = 0; i < block_; ++i)
        activate_back(dh.row(row + i), later.row(i), cell.row(row + i), shown.row(row + i),
                      gates.row(row + i), cells.row(i));
      for (int g = 0; g < kGates; ++g)
        recurrent_[size_t(g)].backward(gates.from(row).column(g * width_), block_, later, g > 0);
    }
    for (int g = 0; g < kGates; ++g)
      input_[size_t(g)].backward(gates.column(g * width_), steps * block_, dx, g > 0);
  }

  // Adds the weight gradient of one of the kGates * 2 maps for one block.
  void learn(int map, Matrix<T> gates, Matrix<T> x, Matrix<T> hidden, ptrdiff_t steps,
             T* const* gradients) const {
    const int g = map % kGates;
    const Matrix<T> dy = gates.column(g * width_);
    if (map < kGates)
      input_[size_t(g)].learn(dy, x, steps * block_, gradients);
    else
      recurrent_[size_t(g)].learn(dy, hidden, steps * block_, gradients);
  }

 private:
  void activate(T* gates, const T* before, T* after, T* shown, T* hidden) const {
    for (int c = 0; c < width_; c += kLanes<T>) {
      const auto gate = [&](int g) { return gates + g * width_ + c; };
      const Vector<T> in = sigmoid<T>(load(gate(0))), forget = sigmoid<T>(load(gate(1)));
      const Vector<T> candidate = hyperbolic_tangent<T>(load(gate(2)));
      const Vector<T> out = sigmoid<T>(load(gate(3)));
      const Vector<T> cell = forget * load(before + c) + in * candidate;
      const Vector<T> visible = hyperbolic_tangent<T>(cell);
      store(gate(0), in);
      store(gate(1), forget);
      store(gate(2), candidate);
      store(gate(3), out);
      store(after + c, cell);
      store(shown + c, visible);
      store(hidden + c, out * visible);
    }
  }

  void activate_back(const T* dh, const T* later, const T* before, const T* shown, T* gates,
                     T* cells) const {
    for (int c = 0; c < width_; c += kLanes<T>) {
      const auto gate = [&](int g) { return gates + g * width_ + c; };
      const Vector<T> in = load(gate(0)), forget = load(gate(1)), candidate = load(gate(2));
      const Vector<T> out = load(gate(3)), visible = load(shown + c);
      const Vector<T> d = load(dh + c) + load(later + c);
      const Vector<T> dc = load(cells + c) + d * out * (T(1) - visible * visible);
      store(gate(0), dc * candidate * in * (T(1) - in));
      store(gate(1), dc * load(before + c) * forget * (T(1) - forget));
      store(gate(2), dc * in * (T(1) - candidate * candidate));
      store(gate(3), d * visible * out * (T(1) - out));
      store(cells + c, dc * forget);
    }
  }

  ptrdiff_t block_ = 0;
  int width_ = 0;
  std::array<Linear<T>, kGates> input_, recurrent_;
};

}  // namespace esper::policy
