// BatchNorm and GroupNorm, followed by an optional ReLU. Batch statistics are computed over images and
// pixels of a channel, group statistics over the channels of a group and pixels of an image.

#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "maps.h"

namespace esper::hosts {

constexpr double kNormEpsilon = 1e-5;
constexpr double kMomentum = 0.1;

// 1 in lanes that hold an image, else 0.
template <class T>
inline Vector<T> image_mask(const Maps<T>& x, int lane) {
  Vector<T> mask = {};
  for (int i = 0; i < kLanes<T>; ++i) mask[i] = lane + i < x.images ? T(1) : T(0);
  return mask;
}

// Mean and biased variance of a channel, in one pass over the differences from the mean of the
// first pixel. Without this shift, a small variance would lose its digits next to a large mean.
template <class T>
inline std::pair<T, T> channel_moments(const Maps<T>& x, int c) {
  const T count = T(x.pixels()) * T(x.images);
  const T* values = x.channel(c);
  Vector<T> first = {};
  for (int lane = 0; lane < x.lanes; lane += kLanes<T>) first += load(values + lane);
  const T near = sum<T>(first) / T(x.images);
  Vector<T> total = {}, squares = {};
  const int last = x.lanes - kLanes<T>;
  const Vector<T> mask = image_mask(x, last);
  for (ptrdiff_t pixel = 0; pixel < x.plane(); pixel += x.lanes) {
    for (int lane = 0; lane < last; lane += kLanes<T>) {
      const Vector<T> d = load(values + pixel + lane) - near;
      total += d;
      squares += d * d;
    }
    const Vector<T> d = (load(values + pixel + last) - near) * mask;
    total += d;
    squares += d * d;
  }
  const T shift = sum<T>(total) / count;
  const T variance = sum<T>(squares) / count - shift * shift;
  return {near + shift, variance < T(0) ? T(0) : variance};
}

// y = (x - mean) factor + bias for a channel, with a ReLU if `rectify`; y may be x.
template <class T>
inline void normalise_channel(const Maps<T>& x, int c, T mean, T factor, T bias, bool rectify,
                              const Maps<T>& y) {
  const T* in = x.channel(c);
  T* out = y.channel(c);
  if (rectify) {
    for (ptrdiff_t i = 0; i < x.plane(); i += kLanes<T>)
      store(out + i, rectified<T>((load(in + i) - mean) * factor + bias));
  } else {
    for (ptrdiff_t i = 0; i < x.plane(); i += kLanes<T>)
      store(out + i, (load(in + i) - mean) * factor + bias);
  }
}

// BatchNorm in training: y from batch statistics; updates the running statistics. `moments`
// receives mean and inverse standard deviation of each channel.
// Twin of kasmina.ops.batch_norm.
template <class T>
void batch_norm(Maps<T> x, const T* weight, const T* bias, T* running_mean, T* running_variance,
                T* moments, Maps<T> y) {
  const T count = T(x.pixels()) * T(x.images);
  for (int c = 0; c < x.channels; ++c) {
    const auto [mean, variance] = channel_moments(x, c);
    const T inverse = T(1) / std::sqrt(variance + T(kNormEpsilon));
    moments[2 * c] = mean;
    moments[2 * c + 1] = inverse;
    running_mean[c] += T(kMomentum) * (mean - running_mean[c]);
    running_variance[c] +=
        T(kMomentum) * (variance * (count / (count - T(1))) - running_variance[c]);
    normalise_channel(x, c, mean, inverse * weight[c], bias[c], true, y);
  }
  clear_tail(y);
}

// BatchNorm with running statistics, in place.
template <class T>
void batch_norm_evaluated(Maps<T> x, const T* weight, const T* bias, const T* running_mean,
                          const T* running_variance) {
  for (int c = 0; c < x.channels; ++c) {
    const T inverse = T(1) / std::sqrt(running_variance[c] + T(kNormEpsilon));
    normalise_channel(x, c, running_mean[c], inverse * weight[c], bias[c], true, x);
  }
  clear_tail(x);
}

// Gradients of BatchNorm and its ReLU; dy becomes the gradient of x.
template <class T>
void batch_norm_back(Maps<T> x, Maps<T> y, const T* weight, const T* moments, Maps<T> dy,
                     T* weight_gradient, T* bias_gradient) {
  const T count = T(x.pixels()) * T(x.images);
  for (int c = 0; c < x.channels; ++c) {
    const T mean = moments[2 * c], inverse = moments[2 * c + 1];
    const T* in = x.channel(c);
    const T* out = y.channel(c);
    T* gradient = dy.channel(c);
    Vector<T> total = {}, correlation = {};
    for (ptrdiff_t i = 0; i < x.plane(); i += kLanes<T>) {
      const Vector<T> g = where_active<T>(load(out + i), load(gradient + i));
      store(gradient + i, g);
      total += g;
      correlation += g * (load(in + i) - mean);
    }
    const T bias_sum = sum<T>(total), weight_sum = sum<T>(correlation) * inverse;
    bias_gradient[c] = bias_sum;
    weight_gradient[c] = weight_sum;
    const T factor = inverse * weight[c];
    const T offset = bias_sum / count, slope = weight_sum * inverse / count;
    for (ptrdiff_t i = 0; i < x.plane(); i += kLanes<T>)
      store(gradient + i,
            (load(gradient + i) - offset - (load(in + i) - mean) * slope) * factor);
  }
  clear_tail(dy);
}

// The largest power of two up to 32 that divides the channels into groups of at least 16, else 1.
// Twin of kasmina.ops.norm_groups.
inline int norm_groups(int channels) {
  for (int count = 32; count > 1; count /= 2)
    if (channels % count == 0 && channels / count >= 16) return count;
  return 1;
}

// Mean and inverse standard deviation over `size` elements for REGISTERS vectors of images; the
// second is stored `lanes` elements after the first. One pass, like channel_moments.
template <class T, int REGISTERS>
inline void image_moments(const T* values, ptrdiff_t size, int lanes, T count, T* moments) {
  Vector<T> near[REGISTERS], total[REGISTERS] = {}, squares[REGISTERS] = {};
  for (int r = 0; r < REGISTERS; ++r) near[r] = load(values + r * kLanes<T>);
  for (ptrdiff_t i = 0; i < size; i += lanes) {
    for (int r = 0; r < REGISTERS; ++r) {
      const Vector<T> d = load(values + i + r * kLanes<T>) - near[r];
      total[r] += d;
      squares[r] += d * d;
    }
  }
  for (int r = 0; r < REGISTERS; ++r) {
    const Vector<T> shift = total[r] / count;
    Vector<T> variance = squares[r] / count - shift * shift;
    variance = (variance < T(0) ? Vector<T>{} : variance) + T(kNormEpsilon);
    Vector<T> inverse;
    for (int i = 0; i < kLanes<T>; ++i) inverse[i] = T(1) / std::sqrt(variance[i]);
    store(moments + r * kLanes<T>, near[r] + shift);
    store(moments + lanes + r * kLanes<T>, inverse);
  }
}

// GroupNorm. `moments` receives mean and inverse standard deviation, [groups, 2, lanes].
// Twin of kasmina.ops.group_norm.
template <class T>
void group_norm(Maps<T> x, int groups, const T* weight, const T* bias, bool rectify, T* moments,
                Maps<T> y) {
  const int channels = x.channels / groups;
  const T count = T(channels) * T(x.pixels());
  for (int g = 0; g < groups; ++g) {
    const T* values = x.channel(g * channels);
    const ptrdiff_t size = channels * x.plane();
    in_registers(x.lanes / kLanes<T>, [&](auto registers, int begin) {
      const ptrdiff_t lane = ptrdiff_t(begin) * kLanes<T>;
      image_moments<T, registers()>(values + lane, size, x.lanes, count,
                                    moments + 2 * g * x.lanes + lane);
    });
    const T *means = moments + 2 * g * x.lanes, *inverses = means + x.lanes;
    for (int c = g * channels; c < (g + 1) * channels; ++c) {
      const T* in = x.channel(c);
      T* out = y.channel(c);
      for (ptrdiff_t pixel = 0; pixel < x.plane(); pixel += x.lanes) {
        for (int lane = 0; lane < x.lanes; lane += kLanes<T>) {
          const Vector<T> normal =
              (load(in + pixel + lane) - load(means + lane)) * load(inverses + lane);
          const Vector<T> value = normal * weight[c] + bias[c];
          store(out + pixel + lane, rectify ? rectified<T>(value) : value);
        }
      }
    }
  }
  clear_tail(y);
}

// Gradients of GroupNorm and of the ReLU after it; dy becomes the gradient of x if
// `input_needs_gradient`.
// `sums` has room for [2, lanes].
template <class T>
void group_norm_back(Maps<T> x, Maps<T> y, int groups, const T* weight, bool rectify,
                     const T* moments, Maps<T> dy, bool input_needs_gradient, T* weight_gradient,
                     T* bias_gradient, T* sums) {
  const int channels = x.channels / groups;
  const T count = T(channels) * T(x.pixels());
  for (int g = 0; g < groups; ++g) {
    const T *means = moments + 2 * g * x.lanes, *inverses = means + x.lanes;
    std::fill(sums, sums + 2 * x.lanes, T(0));
    for (int c = g * channels; c < (g + 1) * channels; ++c) {
      const T* in = x.channel(c);
      const T* out = y.channel(c);
      T* gradient = dy.channel(c);
      Vector<T> bias_sum = {}, weight_sum = {};
      in_registers(x.lanes / kLanes<T>, [&](auto registers, int begin) {
        constexpr int count_of = registers();
        const ptrdiff_t lane = ptrdiff_t(begin) * kLanes<T>;
        Vector<T> own_bias[count_of] = {}, own_weight[count_of] = {};
        for (ptrdiff_t i = lane; i < x.plane(); i += x.lanes) {
          for (int r = 0; r < count_of; ++r) {
            const ptrdiff_t k = i + r * kLanes<T>;
            Vector<T> value = load(gradient + k);
            if (rectify) {
              value = where_active<T>(load(out + k), value);
              store(gradient + k, value);
            }
            own_bias[r] += value;
            own_weight[r] += value * (load(in + k) - load(means + lane + r * kLanes<T>));
          }
        }
        for (int r = 0; r < count_of; ++r) {
          const ptrdiff_t k = lane + r * kLanes<T>;
          own_weight[r] *= load(inverses + k);
          bias_sum += own_bias[r];
          weight_sum += own_weight[r];
          store(sums + k, load(sums + k) + own_bias[r] * weight[c]);
          store(sums + x.lanes + k, load(sums + x.lanes + k) + own_weight[r] * weight[c]);
        }
      });
      bias_gradient[c] = sum<T>(bias_sum);
      weight_gradient[c] = sum<T>(weight_sum);
    }
    if (!input_needs_gradient) continue;
    for (int c = g * channels; c < (g + 1) * channels; ++c) {
      const T* in = x.channel(c);
      T* gradient = dy.channel(c);
      for (ptrdiff_t pixel = 0; pixel < x.plane(); pixel += x.lanes) {
        for (int lane = 0; lane < x.lanes; lane += kLanes<T>) {
          const ptrdiff_t i = pixel + lane;
          const Vector<T> inverse = load(inverses + lane);
          const Vector<T> normal = (load(in + i) - load(means + lane)) * inverse;
          const Vector<T> shared =
              (load(sums + lane) + normal * load(sums + x.lanes + lane)) / count;
          store(gradient + i, (load(gradient + i) * weight[c] - shared) * inverse);
        }
      }
    }
  }
}

}  // namespace esper::hosts
