// 2x2 max pooling, and mean pooling over all pixels.

#pragma once

#include <algorithm>

#include "layer.h"

namespace esper::hosts {

// x [channels, height, width, lanes] to y [channels, height / 2, width / 2, lanes]. NaN is
// the largest value.
// Twin of kasmina.ops.max_pool.
template <class T>
class MaxPool : public Layer<T> {
 public:
  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    Maps<T> y = x;
    y.height /= 2;
    y.width /= 2;
    y.data = arena.take(y.size());
    for (int c = 0; c < x.channels; ++c) {
      for (int row = 0; row < y.height; ++row) {
        for (int column = 0; column < y.width; ++column) {
          const T* in = x.channel(c) + 2 * row * x.row() + ptrdiff_t(2 * column) * x.lanes;
          T* out = y.channel(c) + row * y.row() + ptrdiff_t(column) * x.lanes;
          const ptrdiff_t places[] = {x.lanes, x.row(), x.row() + x.lanes};
          for (int lane = 0; lane < x.lanes; lane += kLanes<T>) {
            Vector<T> most = load(in + lane);
            for (ptrdiff_t place : places) {
              const Vector<T> other = load(in + place + lane);
              most = ((other > most) | (other != other)) ? other : most;
            }
            store(out + lane, most);
          }
        }
      }
    }
    x_ = x;
    return y_ = y;
  }

  // The gradient goes to the first of equal maxima; an output of NaN passes no gradient.
  Maps<T> backward(Maps<T> dy, bool, Arena<T>& arena) override {
    const Maps<T> x = x_, y = y_, dx = arena.maps(x_);
    if (dx.height % 2 || dx.width % 2) std::fill(dx.data, dx.data + dx.size(), T(0));
    for (int c = 0; c < dx.channels; ++c) {
      for (int row = 0; row < dy.height; ++row) {
        for (int column = 0; column < dy.width; ++column) {
          const ptrdiff_t from = 2 * row * dx.row() + ptrdiff_t(2 * column) * dx.lanes;
          const ptrdiff_t to = row * dy.row() + ptrdiff_t(column) * dx.lanes;
          const ptrdiff_t places[] = {0, dx.lanes, dx.row(), dx.row() + dx.lanes};
          for (int lane = 0; lane < dx.lanes; lane += kLanes<T>) {
            const Vector<T> most = load(y.channel(c) + to + lane);
            Vector<T> gradient = load(dy.channel(c) + to + lane);
            for (ptrdiff_t place : places) {
              const auto here = load(x.channel(c) + from + place + lane) == most;
              store(dx.channel(c) + from + place + lane, here ? gradient : Vector<T>{});
              gradient = here ? Vector<T>{} : gradient;
            }
          }
        }
      }
    }
    return dx;
  }

 private:
  Maps<T> x_, y_;
};

// x [channels, height, width, lanes] to y [channels, 1, 1, lanes].
// Twin of kasmina.ops.mean_pool.
template <class T>
class MeanPool : public Layer<T> {
 public:
  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x_ = x;
    Maps<T> y = x;
    y.height = y.width = 1;
    y.data = arena.take(y.size());
    const T count = T(x.pixels());
    for (int c = 0; c < x.channels; ++c) {
      for (int lane = 0; lane < x.lanes; lane += kLanes<T>) {
        Vector<T> total = {};
        for (ptrdiff_t i = lane; i < x.plane(); i += x.lanes) total += load(x.channel(c) + i);
        store(y.channel(c) + lane, total / count);
      }
    }
    return y;
  }

  Maps<T> backward(Maps<T> dy, bool input_needs_gradient, Arena<T>& arena) override {
    if (!input_needs_gradient) return {};
    const Maps<T> dx = arena.maps(x_);
    const T count = T(dx.pixels());
    for (int c = 0; c < dx.channels; ++c) {
      for (int lane = 0; lane < dx.lanes; lane += kLanes<T>) {
        const Vector<T> share = load(dy.channel(c) + lane) / count;
        for (ptrdiff_t i = lane; i < dx.plane(); i += dx.lanes) store(dx.channel(c) + i, share);
      }
    }
    return dx;
  }

 private:
  Maps<T> x_;
};

}  // namespace esper::hosts
