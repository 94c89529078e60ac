// 2x2 max pooling, and mean pooling over all pixels.

#pragma once

#include "maps.h"

namespace esper::hosts {

// x [channels, height, width, lanes] to y [channels, height / 2, width / 2, lanes]. NaN is
// the largest value.
// Twin of kasmina.ops.max_pool.
template <class T>
void max_pool(Maps<T> x, Maps<T> y) {
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
}

// The gradient goes to the first of equal maxima; an output of NaN passes no gradient.
template <class T>
void max_pool_back(Maps<T> x, Maps<T> y, Maps<T> dy, Maps<T> dx) {
  if (x.height % 2 || x.width % 2) std::fill(dx.data, dx.data + dx.size(), T(0));
  for (int c = 0; c < x.channels; ++c) {
    for (int row = 0; row < y.height; ++row) {
      for (int column = 0; column < y.width; ++column) {
        const ptrdiff_t from = 2 * row * x.row() + ptrdiff_t(2 * column) * x.lanes;
        const ptrdiff_t to = row * y.row() + ptrdiff_t(column) * x.lanes;
        const ptrdiff_t places[] = {0, x.lanes, x.row(), x.row() + x.lanes};
        for (int lane = 0; lane < x.lanes; lane += kLanes<T>) {
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
}

// x [channels, height, width, lanes] to y [channels, 1, 1, lanes].
// Twin of kasmina.ops.mean_pool.
template <class T>
void mean_pool(Maps<T> x, Maps<T> y) {
  const T count = T(x.pixels());
  for (int c = 0; c < x.channels; ++c) {
    for (int lane = 0; lane < x.lanes; lane += kLanes<T>) {
      Vector<T> total = {};
      for (ptrdiff_t i = lane; i < x.plane(); i += x.lanes) total += load(x.channel(c) + i);
      store(y.channel(c) + lane, total / count);
    }
  }
}

template <class T>
void mean_pool_back(Maps<T> dy, Maps<T> dx) {
  const T count = T(dx.pixels());
  for (int c = 0; c < dx.channels; ++c) {
    for (int lane = 0; lane < dx.lanes; lane += kLanes<T>) {
      const Vector<T> share = load(dy.channel(c) + lane) / count;
      for (ptrdiff_t i = lane; i < dx.plane(); i += dx.lanes) store(dx.channel(c) + i, share);
    }
  }
}

}  // namespace esper::hosts
