// 2x2 max pooling, and mean pooling over all pixels.

#pragma once

#include "layer.h"

namespace esper::hosts {

constexpr int kPlaces = 4;  // pixels of a window

// Calls window(pixels, i) for every register of the windows of a channel of x, with the offsets of
// its pixels and of its maximum, and rest(pixel) for those of an odd last column or row.
template <class T, class Window, class Rest>
inline void in_windows(const Maps<T>& x, Window window, Rest rest) {
  const int height = x.height / 2, width = x.width / 2;
  for (int row = 0; row < height; ++row)
    for (int column = 0; column < width; ++column)
      for (int lane = 0; lane < x.lanes; lane += kLanes<T>) {
        const ptrdiff_t first = 2 * row * x.row() + ptrdiff_t(2 * column) * x.lanes + lane;
        const ptrdiff_t pixels[kPlaces] = {first, first + x.lanes, first + x.row(),
                                           first + x.row() + x.lanes};
        window(pixels, (ptrdiff_t(row) * width + column) * x.lanes + lane);
      }
  for (int row = 0; row < x.height; ++row)
    for (int column = row < 2 * height ? 2 * width : 0; column < x.width; ++column)
      for (int lane = 0; lane < x.lanes; lane += kLanes<T>)
        rest(row * x.row() + ptrdiff_t(column) * x.lanes + lane);
}

// The larger of two values, `most` if they are equal. NaN is the largest.
template <class T>
inline Vector<T> larger(Vector<T> value, Vector<T> most) {
  return ((value > most) | (value != value)) ? value : most;
}

// The gradient of a maximum, which goes to the first of the values equal to it; a maximum of NaN
// passes none.
template <class T>
struct PooledGradient {
  Vector<T> most, rest;

  // The gradient of the next value of the window.
  Vector<T> of(Vector<T> value) {
    const auto here = value == most;
    const Vector<T> gradient = here ? rest : Vector<T>{};
    rest = here ? Vector<T>{} : rest;
    return gradient;
  }
};

// Maps for the maxima of the windows of x, uninitialised.
template <class T>
Maps<T> pooled_maps(Maps<T> x, Arena<T>& arena) {
  x.height /= 2;
  x.width /= 2;
  x.data = arena.take(x.size());
  return x;
}

// Writes the largest value(x) of every window of a channel.
template <class T, class Function>
inline void pool_channel(const Maps<T>& x, int channel, Function value, const Maps<T>& y) {
  const T* in = x.channel(channel);
  T* out = y.channel(channel);
  in_windows(
      x,
      [&](const ptrdiff_t* pixels, ptrdiff_t window) {
        Vector<T> most = value(load(in + pixels[0]));
        for (int place = 1; place < kPlaces; ++place)
          most = larger<T>(value(load(in + pixels[place])), most);
        store(out + window, most);
      },
      [](ptrdiff_t) {});
}

// x [channels, height, width, lanes] to y [channels, height / 2, width / 2, lanes].
// Twin of kasmina.ops.max_pool.
template <class T>
class MaxPool : public Layer<T> {
 public:
  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x_ = x;
    y_ = pooled_maps(x, arena);
    for (int c = 0; c < x.channels; ++c)
      pool_channel(x, c, [](Vector<T> value) { return value; }, y_);
    return y_;
  }

  Maps<T> backward(Maps<T> dy, bool, Arena<T>& arena) override {
    const Maps<T> dx = arena.maps(x_);
    for (int c = 0; c < dx.channels; ++c) {
      const T *in = x_.channel(c), *out = y_.channel(c), *above = dy.channel(c);
      T* gradient = dx.channel(c);
      in_windows(
          dx,
          [&](const ptrdiff_t* pixels, ptrdiff_t window) {
            PooledGradient<T> share{load(out + window), load(above + window)};
            for (int place = 0; place < kPlaces; ++place)
              store(gradient + pixels[place], share.of(load(in + pixels[place])));
          },
          [&](ptrdiff_t i) { store(gradient + i, Vector<T>{}); });
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
    for (int c = 0; c < x.channels; ++c)
      in_registers(x.lanes / kLanes<T>, [&](auto registers, int first) {
        Vector<T> totals[registers()] = {};
        for (const T* pixel = x.channel(c); pixel != x.channel(c + 1); pixel += x.lanes)
          for (int r = 0; r < registers(); ++r) totals[r] += load(pixel + (first + r) * kLanes<T>);
        for (int r = 0; r < registers(); ++r)
          store(y.channel(c) + (first + r) * kLanes<T>, totals[r] / count);
      });
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
