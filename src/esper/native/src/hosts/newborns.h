// Statistics of a slot without a seed, and gradient norms of the last layers of newborn seeds there.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "blueprints.h"
#include "optimizer.h"

namespace esper::hosts {

constexpr int kLastLayers = int(LastLayer::hidden) + 1;
constexpr int kStatistics = int(SlotStatistic::active_share) + 1;
constexpr int kChosenRows = 4;  // see kasmina.newborns.CHOSEN_ROWS
constexpr int kSlotMeasures = kStatistics + kLastLayers;

// Calls f(i, k) for every register i of `count` elements, with k alternating between 0 and 1, so that
// a sum can be kept in two registers, which do not wait for one another.
template <class T, class Function>
inline void in_pairs(ptrdiff_t count, Function f) {
  ptrdiff_t i = 0;
  for (; i + 2 * kLanes<T> <= count; i += 2 * kLanes<T>) {
    f(i, 0);
    f(i + kLanes<T>, 1);
  }
  if (i < count) f(i, 0);
}

// A copy of the first half of the images. Twin of tolaria.slot_measures.measured_images.
template <class T>
inline Maps<T> first_half(const Maps<T>& x, Arena<T>& arena) {
  Maps<T> half = x;
  half.images = (x.images + 1) / 2;
  half.lanes = rounded_up(half.images, kLanes<T>);
  half.data = arena.take(half.size());
  const ptrdiff_t count = ptrdiff_t(x.channels) * x.pixels();
  for (ptrdiff_t i = 0; i < count; ++i)
    std::copy(x.data + i * x.lanes, x.data + i * x.lanes + half.lanes, half.data + i * half.lanes);
  clear_tail(half);
  return half;
}

// Sums over an activation x and the gradient g of the slot's output.
template <class T>
struct SlotSums {
  T gradient_squares, squares, active;
  std::vector<T> products;  // of g x, by channel
};

template <class T>
inline SlotSums<T> slot_sums(const Maps<T>& x, const Maps<T>& g) {
  Vector<T> gradient_squares[2] = {}, squares[2] = {}, active[2] = {};
  SlotSums<T> found{};
  for (int c = 0; c < x.channels; ++c) {
    Vector<T> products[2] = {};
    in_pairs<T>(x.plane(), [&](ptrdiff_t i, int k) {
      const Vector<T> value = load(x.channel(c) + i), gradient = load(g.channel(c) + i);
      gradient_squares[k] += gradient * gradient;
      squares[k] += value * value;
      active[k] += value > T(0) ? broadcast(T(1)) : Vector<T>{};
      products[k] += gradient * value;
    });
    found.products.push_back(sum<T>(products[0] + products[1]));
  }
  found.gradient_squares = sum<T>(gradient_squares[0] + gradient_squares[1]);
  found.squares = sum<T>(squares[0] + squares[1]);
  found.active = sum<T>(active[0] + active[1]);
  return found;
}

// Twin of kasmina.newborns.gradient_norms.
template <class T>
class Newborns {
 public:
  // `layers` has the bit of each LastLayer to measure; `weights` are those of the hidden units,
  // [units, inputs, k, k], where k is 3 in convolutional slots and else 1, or that of the layer that
  // the slot spans.
  Newborns(int channels, Family family, int layers, int units, const double* weights,
           std::optional<Span> span)
      : channels_(channels), units_(units), kernel_(family == Family::conv ? 3 : 1),
        layers_(layers), span_(span),
        weights_(weights, weights + weight_count()),
        ones_(size_t(std::max(channels, units)), T(1)),
        zeros_(size_t(std::max(channels, units)), T(0)),
        gradient_(size_t(channels) * size_t(kernel_ * kernel_ * std::max(channels, units))) {}

  // Writes one gradient norm for each LastLayer, NaN for those that are not wanted. `products` are
  // the sums of g x by channel.
  void measure(Maps<T> x, Maps<T> g, const std::vector<T>& products, Arena<T>& arena, T* norms) {
    std::fill(norms, norms + kLastLayers, std::numeric_limits<T>::quiet_NaN());
    const auto put = [&](LastLayer layer, T value) {
      if (wants(layer)) norms[int(layer)] = value;
    };
    const bool dense = kernel_ == 1;
    const int step = std::max(1, x.height / kChosenRows);
    const RowChoice rows{step / 2, step};
    const Maps<T> chosen = chosen_rows(g, rows, arena), normal = arena.maps(x);
    const T factor = T(x.height) / T(chosen.height);
    put(LastLayer::scale, norm(products.data(), channels_));
    if (wants(LastLayer::linear)) put(LastLayer::linear, factor * correlation(chosen, x, 1, rows));
    normalise(x, false, arena, normal);
    const T product = product_and_rectify(g, normal, !dense);
    put(LastLayer::norm, std::abs(product - total(products)));
    if (wants(LastLayer::spatial) && !dense) {
      put(LastLayer::spatial, factor * correlation(chosen, normal, kernel_, rows));
      put(LastLayer::pointwise, factor * centre_norm());
    } else if (wants(LastLayer::pointwise)) {
      put(LastLayer::pointwise, factor * correlation(chosen, normal, 1, rows));
    }
    if (wants(LastLayer::spatial) && dense) {
      // The squared norm averaged over random value weights, whose variance is 1 / (3 C).
      const Maps<T> before = earlier_mean(normal, arena);
      put(LastLayer::spatial, correlation(chosen, before, 1, rows) / std::sqrt(T(3)));
      arena.give_back(before);
    }
    if (wants(LastLayer::hidden)) {
      const Maps<T> hidden = arena.maps(chosen, units_);
      convolve(dense ? normal : x, weights_.data(), kernel_, hidden, rows);
      if (dense)
        rectify(hidden);
      else
        normalise(hidden, true, arena, hidden);
      put(LastLayer::hidden, factor * correlation(chosen, hidden, 1, {}));
      arena.give_back(hidden);
    }
    arena.give_back(normal);
    arena.give_back(chosen);
  }

  // As `measure`, in a slot that spans a layer, from the input of this layer.
  // Twin of kasmina.newborns._unit_norm.
  void measure_units(Maps<T> source, Maps<T> g, Arena<T>& arena, T* norms) {
    std::fill(norms, norms + kLastLayers, std::numeric_limits<T>::quiet_NaN());
    Maps<T> hidden = arena.maps(source, units_);
    convolve(source, weights_.data(), span_->kernel, hidden);
    normalise(hidden, true, arena, hidden);
    const T* weights = weights_.data() + units_ * span_->inputs;
    for (size_t layer = 1; layer < span_->units.size(); ++layer, weights += units_ * units_) {
      const Maps<T> before = hidden;
      hidden = arena.maps(source, units_);
      convolve(before, weights, 1, hidden);
      normalise(hidden, true, arena, hidden);
    }
    MaxPool<T> most;
    MeanPool<T> mean;
    if (span_->pooled) hidden = most.forward(hidden, arena);
    if (span_->last) hidden = mean.forward(hidden, arena);
    norms[int(LastLayer::hidden)] = correlation(g, hidden, span_->outgoing_kernel(), {});
  }

 private:
  ptrdiff_t weight_count() const {
    const int inputs = span_ ? span_->inputs : channels_, kernel = span_ ? span_->kernel : kernel_;
    const ptrdiff_t further = span_ ? ptrdiff_t(span_->units.size() - 1) * units_ * units_ : 0;
    return ptrdiff_t(units_) * inputs * kernel * kernel + further;
  }

  bool wants(LastLayer layer) const { return (layers_ >> int(layer) & 1) != 0; }

  void normalise(Maps<T> x, bool rectify, Arena<T>& arena, Maps<T> y) const {
    const int groups = kernel_ == 1 ? 1 : norm_groups(x.channels);
    if (kernel_ == 1) x = x.by_pixel(), y = y.by_pixel();
    T* moments = arena.take(ptrdiff_t(2) * groups * x.lanes);
    group_norm(x, groups, ones_.data(), zeros_.data(), rectify, moments, y);
  }

  // Mean over each pixel of a sequence and all earlier ones.
  static Maps<T> earlier_mean(const Maps<T>& x, Arena<T>& arena) {
    const Maps<T> y = arena.maps(x);
    for (int c = 0; c < x.channels; ++c)
      for (int lane = 0; lane < x.lanes; lane += kLanes<T>) {
        Vector<T> total = {};
        for (int pixel = 0; pixel < x.width; ++pixel) {
          const ptrdiff_t i = ptrdiff_t(pixel) * x.lanes + lane;
          total += load(x.channel(c) + i);
          store(y.channel(c) + i, total / T(pixel + 1));
        }
      }
    return y;
  }

  // A copy of the chosen rows of g.
  static Maps<T> chosen_rows(const Maps<T>& g, RowChoice rows, Arena<T>& arena) {
    Maps<T> chosen = g;
    chosen.height = (g.height - rows.first + rows.step - 1) / rows.step;
    chosen.data = arena.take(chosen.size());
    for (int c = 0; c < g.channels; ++c)
      for (int row = 0; row < chosen.height; ++row) {
        const T* from = g.channel(c) + (rows.first + row * rows.step) * g.row();
        std::copy(from, from + g.row(), chosen.channel(c) + row * chosen.row());
      }
    return chosen;
  }

  static void rectify(Maps<T> x) {
    transform(x, [](Vector<T> value) { return rectified<T>(value); });
  }

  // Sum of g y; then y = max(0, y) if `rectify`.
  static T product_and_rectify(const Maps<T>& g, const Maps<T>& y, bool rectify) {
    Vector<T> sums[2] = {};
    in_pairs<T>(g.size(), [&](ptrdiff_t i, int k) {
      const Vector<T> value = load(y.data + i);
      sums[k] += load(g.data + i) * value;
      if (rectify) store(y.data + i, rectified<T>(value));
    });
    return sum<T>(sums[0] + sums[1]);
  }

  static T total(const std::vector<T>& values) {
    T sum = 0;
    for (T value : values) sum += value;
    return sum;
  }

  // Norm of the gradient of the weights of a convolution of x, which stays in `gradient_`.
  T correlation(Maps<T> g, Maps<T> x, int kernel, RowChoice rows) {
    correlate(g, x, kernel, gradient_.data(), rows);
    return norm(gradient_.data(), ptrdiff_t(channels_) * x.channels * kernel * kernel);
  }

  // Norm of the weights in `gradient_` at the centre of their kernels.
  T centre_norm() const {
    const int size = kernel_ * kernel_;
    T squares = 0;
    for (int i = 0; i < channels_ * channels_; ++i) {
      const T value = gradient_[size_t(i * size + size / 2)];
      squares += value * value;
    }
    return std::sqrt(squares);
  }

  int channels_, units_, kernel_, layers_;
  std::optional<Span> span_;
  std::vector<T> weights_, ones_, zeros_, gradient_;
};

}  // namespace esper::hosts
