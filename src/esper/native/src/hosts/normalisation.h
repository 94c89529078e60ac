// BatchNorm and GroupNorm, followed by an optional ReLU. Batch statistics are computed over images
// and pixels of a channel, group statistics over the channels of a group and pixels of an image.

#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "pooling.h"

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

template <class Values, size_t COUNT>
inline Values added(const Values (&values)[COUNT]) {
  Values total = values[0];
  for (size_t i = 1; i < COUNT; ++i) total += values[i];
  return total;
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
  // Sums of every fourth pixel: a single one would wait for its last addition.
  constexpr int apart = 4;
  Vector<T> totals[apart] = {}, squares[apart] = {};
  const int last = x.lanes - kLanes<T>;
  const Vector<T> mask = image_mask(x, last);
  const auto add = [&](const T* pixel, int k) {
    for (int lane = 0; lane < last; lane += kLanes<T>) {
      const Vector<T> d = load(pixel + lane) - near;
      totals[k] += d;
      squares[k] += d * d;
    }
    const Vector<T> d = (load(pixel + last) - near) * mask;
    totals[k] += d;
    squares[k] += d * d;
  };
  const int whole = x.pixels() / apart * apart;
  for (int pixel = 0; pixel < whole; pixel += apart)
    for (int k = 0; k < apart; ++k) add(values + ptrdiff_t(pixel + k) * x.lanes, k);
  for (int pixel = whole; pixel < x.pixels(); ++pixel)
    add(values + ptrdiff_t(pixel) * x.lanes, 0);
  const T shift = sum<T>(added(totals)) / count;
  const T variance = sum<T>(added(squares)) / count - shift * shift;
  return {near + shift, variance < T(0) ? T(0) : variance};
}

// BatchNorm and ReLU; weight and bias, running mean and variance, [channels] each. `pooled` asks for
// 2x2 max pooling in the same pass, with the bits of a MaxPool that follows.
// Twin of kasmina.ops.batch_norm.
template <class T>
class BatchNorm : public Layer<T> {
 public:
  explicit BatchNorm(int channels) : Layer<T>({channels, channels}), channels_(channels) {}

  int buffers() const override { return 2 * channels_; }

  // From batch statistics; updates the running statistics.
  Maps<T> forward(Maps<T> x, bool pooled, Arena<T>& arena) {
    x_ = x;
    y_ = pooled ? pooled_maps(x, arena) : arena.maps(x);
    pooled_ = pooled;
    scales_.resize(size_t(channels_));
    const T count = T(x.pixels()) * T(x.images);
    T *running_mean = this->buffers_, *running_variance = running_mean + channels_;
    for (int c = 0; c < channels_; ++c) {
      const auto [mean, variance] = channel_moments(x, c);
      running_mean[c] += T(kMomentum) * (mean - running_mean[c]);
      running_variance[c] +=
          T(kMomentum) * (variance * (count / (count - T(1))) - running_variance[c]);
      scales_[size_t(c)] = scale(c, mean, variance);
      normalise(x, c, scales_[size_t(c)], pooled, y_);
    }
    clear_tail(y_);
    return y_;
  }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override { return forward(x, false, arena); }

  // From running statistics; in place unless it pools.
  Maps<T> evaluate(Maps<T> x, bool pooled, Arena<T>& arena) {
    const Maps<T> y = pooled ? pooled_maps(x, arena) : x;
    for (int c = 0; c < channels_; ++c)
      normalise(x, c, scale(c, this->buffers_[c], this->buffers_[channels_ + c]), pooled, y);
    clear_tail(y);
    return y;
  }

  Maps<T> evaluate(Maps<T> x, Arena<T>& arena) override { return evaluate(x, false, arena); }

  // dy becomes the gradient of x, or x itself if dy is that of pooled maps: nothing else reads x.
  Maps<T> backward(Maps<T> dy, bool, Arena<T>&) override {
    const Maps<T> dx = pooled_ ? x_ : dy;
    const T count = T(dx.pixels()) * T(dx.images);
    for (int c = 0; c < channels_; ++c) {
      const Scale s = scales_[size_t(c)];
      const T *in = x_.channel(c), *out = y_.channel(c), *above = dy.channel(c);
      T* gradient = dx.channel(c);
      // One sum for each place in a window, so that pooling changes no bit.
      Vector<T> total[kPlaces] = {}, correlation[kPlaces] = {};
      const auto add = [&](int place, Vector<T> g, Vector<T> value) {
        total[place] += g;
        correlation[place] += g * (value - s.mean);
      };
      in_windows(
          x_,
          [&](const ptrdiff_t* pixels, ptrdiff_t window) {
            if (!pooled_) {
              for (int place = 0; place < kPlaces; ++place) {
                const ptrdiff_t i = pixels[place];
                add(place, active_gradient(out, gradient, i), load(in + i));
              }
              return;
            }
            auto share = pooled_gradient(out, above, window);
            for (int place = 0; place < kPlaces; ++place) {
              const Vector<T> value = load(in + pixels[place]);
              add(place, share.of(s(value)), value);
            }
          },
          [&](ptrdiff_t i) {
            if (!pooled_) add(0, active_gradient(out, gradient, i), load(in + i));
          });
      const T bias_sum = sum<T>(added(total));
      const T weight_sum = sum<T>(added(correlation)) * s.inverse;
      this->gradient_[channels_ + c] = bias_sum;
      this->gradient_[c] = weight_sum;
      const T offset = bias_sum / count, slope = weight_sum * s.inverse / count;
      const auto write = [&](ptrdiff_t i, Vector<T> g) {
        store(gradient + i, (g - offset - (load(in + i) - s.mean) * slope) * s.factor);
      };
      if (!pooled_) {
        for (ptrdiff_t i = 0; i < dx.plane(); i += kLanes<T>)
          write(i, load(gradient + i));
        continue;
      }
      in_windows(
          x_,
          [&](const ptrdiff_t* pixels, ptrdiff_t window) {
            auto share = pooled_gradient(out, above, window);
            for (int place = 0; place < kPlaces; ++place) {
              const ptrdiff_t i = pixels[place];
              write(i, share.of(s(load(in + i))));
            }
          },
          [&](ptrdiff_t i) { write(i, Vector<T>{}); });
    }
    clear_tail(dx);
    return dx;
  }

 private:
  // y = relu((x - mean) factor + bias), with factor = weight / deviation.
  struct Scale {
    T mean, inverse, factor, bias;

    Vector<T> operator()(Vector<T> x) const { return rectified<T>((x - mean) * factor + bias); }
  };

  Scale scale(int c, T mean, T variance) const {
    const T inverse = T(1) / std::sqrt(variance + T(kNormEpsilon));
    return {mean, inverse, inverse * this->parameters_[c], this->parameters_[channels_ + c]};
  }

  // Normalises a channel; y may be x unless it is pooled.
  static void normalise(const Maps<T>& x, int c, Scale s, bool pooled, const Maps<T>& y) {
    if (pooled) {
      pool_channel(x, c, s, y);
      return;
    }
    const T* in = x.channel(c);
    T* out = y.channel(c);
    for (ptrdiff_t i = 0; i < x.plane(); i += kLanes<T>) store(out + i, s(load(in + i)));
  }

  // Replaces an element of the gradient of y by that before the ReLU.
  static Vector<T> active_gradient(const T* out, T* gradient, ptrdiff_t i) {
    const Vector<T> g = where_active<T>(load(out + i), load(gradient + i));
    store(gradient + i, g);
    return g;
  }

  // The gradient of the maximum of a window, before the ReLU.
  static PooledGradient<T> pooled_gradient(const T* out, const T* above, ptrdiff_t window) {
    const Vector<T> most = load(out + window);
    return {most, where_active<T>(most, load(above + window))};
  }

  int channels_;
  bool pooled_ = false;
  Maps<T> x_, y_;
  std::vector<Scale> scales_;
};

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

// GroupNorm with an optional ReLU.
template <class T>
class GroupNorm : public Layer<T> {
 public:
  GroupNorm(int channels, int groups, bool rectify)
      : Layer<T>({channels, channels}), channels_(channels), groups_(groups), rectify_(rectify) {}

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

// LayerNorm of each pixel over its channels.
// Twin of kasmina.ops.layer_norm.
template <class T>
class LayerNorm : public Layer<T> {
 public:
  explicit LayerNorm(int channels)
      : Layer<T>({channels, channels}), norm_(channels, 1, false) {}

  void bind(const T* parameters, T* gradient, T* buffers) override {
    norm_.bind(parameters, gradient, buffers);
  }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x.data = norm_.forward(x.by_pixel(), arena).data;
    clear_tail(x);
    return x;
  }

  Maps<T> backward(Maps<T> dy, bool input_needs_gradient, Arena<T>& arena) override {
    norm_.backward(dy.by_pixel(), input_needs_gradient, arena);
    return dy;
  }

 private:
  GroupNorm<T> norm_;
};

}  // namespace esper::hosts
