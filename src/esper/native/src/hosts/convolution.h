// Same-size convolution with a 1x1 or 3x3 kernel, its gradients, depthwise convolution, and their
// layers.
//
//   x        [inputs,  height, width, lanes]
//   y        [outputs, height, width, lanes]
//   weight   [outputs, inputs, kernel, kernel]
//
// A linear map is a 1x1 convolution of a single pixel.

#pragma once

#include <algorithm>
#include <cstring>

#include "layer.h"
#include "matrices.h"
#include "winograd.h"

namespace esper::hosts {

// Which rows of x belong to the rows of y or dy: row r of them to row `first + r * step` of x.
struct RowChoice {
  int first = 0, step = 1;
};

// Computes OUTPUTS channels of one pixel for REGISTERS vectors of images; sums stay in registers.
template <class T, int OUTPUTS, int REGISTERS>
inline void convolve_block(const T* x, ptrdiff_t x_plane, int inputs, const Tap* taps, int tap_count,
                           const T* weight, int kernel_size, T* y, ptrdiff_t y_plane) {
  const ptrdiff_t filter = ptrdiff_t(inputs) * kernel_size;
  Vector<T> sums[OUTPUTS][REGISTERS] = {};
  for (int c = 0; c < inputs; ++c, x += x_plane, weight += kernel_size) {
    for (int t = 0; t < tap_count; ++t) {
      const T* pixel = x + taps[t].pixel;
      Vector<T> values[REGISTERS];
      for (int r = 0; r < REGISTERS; ++r) values[r] = load(pixel + r * kLanes<T>);
      for (int o = 0; o < OUTPUTS; ++o) {
        const T factor = weight[o * filter + taps[t].weight];
        for (int r = 0; r < REGISTERS; ++r) sums[o][r] += values[r] * factor;
      }
    }
  }
  for (int o = 0; o < OUTPUTS; ++o)
    for (int r = 0; r < REGISTERS; ++r) store(y + o * y_plane + r * kLanes<T>, sums[o][r]);
}

// Maximum output channels per block, so that its sums fit into the registers.
template <int REGISTERS>
constexpr int kOutputBlock = (kManyRegisters ? 16 : 8) / (REGISTERS < 2 ? 2 : REGISTERS);

// Computes all output channels of REGISTERS vectors of images, of one pixel or of neighbours.
template <class T, int REGISTERS>
inline void convolve_pixel(const T* x, const Maps<T>& in, const Tap* taps, int tap_count,
                           const T* weight, int kernel_size, T* y, const Maps<T>& out) {
  constexpr int most = kOutputBlock<REGISTERS>;
  for (int o = 0; o < out.channels; o += most)
    at_compile_time<most>(std::min(most, out.channels - o), [&](auto outputs) {
      convolve_block<T, outputs(), REGISTERS>(
          x, in.plane(), in.channels, taps, tap_count,
          weight + ptrdiff_t(o) * in.channels * kernel_size, kernel_size, y + o * out.plane(),
          out.plane());
    });
}

// Twin of kasmina.ops.conv2d.
template <class T>
void convolve(Maps<T> x, const T* weight, int kernel, Maps<T> y, RowChoice rows = {}) {
  const int kernel_size = kernel * kernel, reach = kernel / 2, registers = x.lanes / kLanes<T>;
  Tap taps[9];
  for (int row = 0; row < y.height; ++row) {
    const int x_row = rows.first + row * rows.step;
    for (int column = 0, run = 1; column < x.width; column += run) {
      // The pixels that miss no column of the kernel have the same taps and lie side by side.
      const bool inside = column >= reach && column + reach < x.width;
      run = inside ? x.width - reach - column : 1;
      const int count = taps_at(x, kernel, x_row, column, taps);
      const T* from = x.data + x_row * x.row() + ptrdiff_t(column) * x.lanes;
      T* to = y.data + row * y.row() + ptrdiff_t(column) * y.lanes;
      in_registers(run * registers, [&](auto block, int first) {
        const ptrdiff_t i = ptrdiff_t(first) * kLanes<T>;
        convolve_pixel<T, block()>(from + i, x, taps, count, weight, kernel_size, to + i, y);
      });
    }
  }
}

// A convolution by the algorithm that is faster for its sizes.
template <class T>
void convolve(Maps<T> x, const T* weight, int kernel, Maps<T> y, Arena<T>& arena) {
#if defined(ESPER_MATRICES)
  if constexpr (std::is_same_v<T, float>)
    if (has_matrices(x, kernel, y.channels, arena))
      return convolve_matrices(x, kernel_squares(weight, x.channels, y.channels, arena), y, arena);
#endif
  if (winograd_pays(x, kernel, y.channels))
    in_precision(x, y.channels, arena, [&](auto numbers) {
      convolve_winograd<T, decltype(numbers)>(x, weight, y, arena);
    });
  else
    convolve(x, weight, kernel, y);
}

// Gradient of x: the convolution of dy with the kernels rotated by 180 degrees and input and output
// channels swapped.
template <class T>
void convolve_back(Maps<T> dy, const T* weight, int kernel, Maps<T> dx, Arena<T>& arena) {
  const int size = kernel * kernel, outputs = dy.channels, inputs = dx.channels;
#if defined(ESPER_MATRICES)
  if constexpr (std::is_same_v<T, float>)
    if (has_matrices(dy, kernel, inputs, arena))
      return convolve_matrices(dy, turned_kernel_squares(weight, inputs, outputs, arena), dx, arena);
#endif
  T* turned = arena.take(ptrdiff_t(outputs) * inputs * size);
  if (kernel == 1) {
    transpose_matrix(weight, outputs, inputs, inputs, turned, outputs);
    convolve(dy, turned, kernel, dx, arena);
    return;
  }
  for (int o = 0; o < outputs; ++o)
    for (int c = 0; c < inputs; ++c)
      for (int t = 0; t < size; ++t)
        turned[(c * outputs + o) * size + size - 1 - t] = weight[(o * inputs + c) * size + t];
  convolve(dy, turned, kernel, dx, arena);
}

// A rectangle of pixels: rows `step` apart, with `count` elements each.
struct Patch {
  int rows;
  ptrdiff_t count, step;
};

// sums[o][c] += sum over a patch of dy[o] x[c], for a few output and input channels.
template <class T, int OUTPUTS, int INPUTS>
inline void correlate_block(const T* dy, ptrdiff_t dy_plane, Patch patch, const T* x,
                            ptrdiff_t x_plane, ptrdiff_t x_step, Vector<T>* sums) {
  Vector<T> own[OUTPUTS][INPUTS];
  for (int o = 0; o < OUTPUTS; ++o)
    for (int c = 0; c < INPUTS; ++c) own[o][c] = sums[o * INPUTS + c];
  for (int row = 0; row < patch.rows; ++row, dy += patch.step, x += x_step) {
    for (ptrdiff_t i = 0; i < patch.count; i += kLanes<T>) {
      Vector<T> values[INPUTS];
      for (int c = 0; c < INPUTS; ++c) values[c] = load(x + c * x_plane + i);
      for (int o = 0; o < OUTPUTS; ++o) {
        const Vector<T> gradient = load(dy + o * dy_plane + i);
        for (int c = 0; c < INPUTS; ++c) own[o][c] += gradient * values[c];
      }
    }
  }
  for (int o = 0; o < OUTPUTS; ++o)
    for (int c = 0; c < INPUTS; ++c) sums[o * INPUTS + c] = own[o][c];
}

// Registers of a channel's patch: short enough for the first cache, where all positions of the kernel
// pass over it, and long enough that loading the sums costs little.
constexpr int kPatchRegisters = 64;

// Gradient of the weights from INPUTS input channels to OUTPUTS output channels.
template <class T, int OUTPUTS, int INPUTS>
void correlate_channels(Maps<T> dy, Maps<T> x, int kernel, RowChoice rows, int first_output,
                        int first_input, T* gradient) {
  const int reach = kernel / 2, size = kernel * kernel;
  constexpr int count = OUTPUTS * INPUTS;
  Vector<T> sums[9 * count];
  std::fill(sums, sums + size * count, Vector<T>{});
  const int registers = x.lanes / kLanes<T>;
  const int columns = std::clamp(kPatchRegisters / registers, 1, x.width);
  const int height = std::max(kPatchRegisters / (columns * registers), 1);
  const T* gradients = dy.channel(first_output);
  const T* inputs = x.channel(first_input);
  const auto x_row = [&](int row) { return rows.first + row * rows.step; };
  for (int top = 0; top < dy.height; top += height) {
    for (int left = 0; left < x.width; left += columns) {
      const int right = std::min(left + columns, x.width);
      for (int i = -reach; i <= reach; ++i) {
        int first = top, last = std::min(top + height, dy.height);
        while (first < last && x_row(first) + i < 0) ++first;
        while (first < last && x_row(last - 1) + i >= x.height) --last;
        for (int j = -reach; j <= reach; ++j) {
          const int begin = std::max(left, -j), end = std::min(right, x.width - j);
          if (end <= begin) continue;
          correlate_block<T, OUTPUTS, INPUTS>(
              gradients + first * dy.row() + ptrdiff_t(begin) * x.lanes, dy.plane(),
              {last - first, ptrdiff_t(end - begin) * x.lanes, dy.row()},
              inputs + (x_row(first) + i) * x.row() + ptrdiff_t(begin + j) * x.lanes, x.plane(),
              rows.step * x.row(), sums + ((i + reach) * kernel + j + reach) * count);
        }
      }
    }
  }
  alignas(kVectorBytes) T totals[rounded_up(9 * count, kLanes<T>)];
  for (int first = 0; first < size * count; first += kLanes<T>) {
    Vector<T> square[kLanes<T>] = {};
    for (int i = 0; i < std::min(size * count - first, kLanes<T>); ++i)
      square[i] = sums[first + i];
    sum_each<T>(square);
    store(totals + first, square[0]);
  }
  for (int o = 0; o < OUTPUTS; ++o)
    for (int c = 0; c < INPUTS; ++c)
      for (int t = 0; t < size; ++t)
        gradient[(ptrdiff_t(first_output + o) * x.channels + first_input + c) * size + t] =
            totals[(t * OUTPUTS + o) * INPUTS + c];
}

// Maximum output channels per block; a single input channel leaves registers for more.
template <int INPUTS>
constexpr int kCorrelationBlock = (kManyRegisters ? 2 : 1) * (INPUTS == 1 ? 4 : 2);

// Gradient of the weights, [outputs, inputs, kernel, kernel].
template <class T>
void correlate(Maps<T> dy, Maps<T> x, int kernel, T* gradient, RowChoice rows = {}) {
  for (int c = 0; c < x.channels; c += 4)
    at_compile_time<4>(std::min(4, x.channels - c), [&](auto inputs) {
      constexpr int most = kCorrelationBlock<inputs()>;
      for (int o = 0; o < dy.channels; o += most)
        at_compile_time<most>(std::min(most, dy.channels - o), [&](auto outputs) {
          correlate_channels<T, outputs(), inputs()>(dy, x, kernel, rows, o, c, gradient);
        });
    });
}

// Gradient of the weights of a linear map, [outputs, inputs]. The channels of x become innermost, so
// that no register has to be summed over its lanes at the end.
template <class T>
void correlate_linear(Maps<T> dy, Maps<T> x, T* gradient, Arena<T>& arena) {
  constexpr int lanes = kLanes<T>, most = kRowOutputs;
  const int row = rounded_up(x.channels, lanes);
  Maps<T> turned = x;
  turned.channels = row;
  turned.data = arena.take(turned.size());
  transpose_matrix(x.data, x.channels, int(x.plane()), int(x.plane()), turned.data, row);
  for (int c = 0; c < row; c += 2 * lanes)
    for (int o = 0; o < dy.channels; o += most)
      at_compile_time<most>(std::min(most, dy.channels - o), [&](auto outputs) {
        at_compile_time<2>(std::min(2, (row - c) / lanes), [&](auto registers) {
          correlate_rows<T, Whole<T>, outputs(), registers()>(
              dy.channel(o), dy.plane(), dy.plane(), turned.data + c, row, false,
              gradient + ptrdiff_t(o) * x.channels + c, x.channels,
              std::min(registers() * lanes, x.channels - c));
        });
      });
  arena.give_back(turned);
}

// Gradient of the weights by the algorithm that is faster for its sizes.
template <class T>
void correlate(Maps<T> dy, Maps<T> x, int kernel, T* gradient, Arena<T>& arena) {
#if defined(ESPER_MATRICES)
  if constexpr (std::is_same_v<T, float>)
    if (has_matrices(x, kernel, dy.channels, arena))
      return correlate_matrices(dy, x, gradient, arena);
#endif
  if (kernel == 1 && x.channels >= kLanes<T> / 2 && x.plane() <= kPatchRegisters * kLanes<T>)
    correlate_linear(dy, x, gradient, arena);
  else if (winograd_pays(x, kernel, dy.channels) &&
           std::min(x.channels, dy.channels) >= kLeastCorrelated)
    in_precision(x, dy.channels, arena, [&](auto numbers) {
      correlate_winograd<T, decltype(numbers)>(dy, x, gradient, arena);
    });
  else
    correlate(dy, x, kernel, gradient);
}

// Convolves each channel with its own 3x3 kernel, weight [channels, 3, 3]. `turned` rotates the
// kernels, which gives the gradient of x.
// Twin of kasmina.ops.depthwise_conv2d.
template <class T>
void convolve_depthwise(Maps<T> x, const T* weight, bool turned, Maps<T> y) {
  Tap taps[9];
  for (int row = 0; row < x.height; ++row) {
    for (int column = 0; column < x.width; ++column) {
      const int count = taps_at(x, 3, row, column, taps);
      const ptrdiff_t pixel = row * x.row() + ptrdiff_t(column) * x.lanes;
      for (int c = 0; c < x.channels; ++c) {
        const T* from = x.channel(c) + pixel;
        T* to = y.channel(c) + pixel;
        for (int lane = 0; lane < x.lanes; lane += kLanes<T>) {
          Vector<T> total = {};
          for (int t = 0; t < count; ++t) {
            const int place = turned ? 8 - taps[t].weight : taps[t].weight;
            total += load(from + taps[t].pixel + lane) * weight[c * 9 + place];
          }
          store(to + lane, total);
        }
      }
    }
  }
}

// A convolution with an optional bias and ReLU, weight [outputs, inputs, kernel, kernel].
template <class T>
class Convolution : public Layer<T> {
 public:
  Convolution(int inputs, int outputs, int kernel, bool bias = false, bool rectify = false)
      : Layer<T>({outputs * inputs * kernel * kernel}), outputs_(outputs), kernel_(kernel),
        bias_(bias), rectify_(rectify), weights_(this->fields_[0]) {
    if (bias) this->fields_.push_back(outputs);
  }

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x_ = x;
    y_ = arena.maps(x, outputs_);
    convolve(x, this->parameters_, kernel_, y_, arena);
    if (bias_) add_bias();
    if (rectify_) transform(y_, [](Vector<T> value) { return rectified<T>(value); });
    return y_;
  }

  bool keeps_gradient() const override { return !rectify_; }

  Maps<T> backward(Maps<T> dy, bool input_needs_gradient, Arena<T>& arena) override {
    if (rectify_)
      combine(dy, y_, dy, [](Vector<T> y, Vector<T> d) { return where_active<T>(y, d); });
    correlate(dy, x_, kernel_, this->gradient_, arena);
    if (bias_) sum_bias(dy);
    if (!input_needs_gradient) return {};
    const Maps<T> dx = arena.maps(x_);
    convolve_back(dy, this->parameters_, kernel_, dx, arena);
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
  explicit DepthwiseConvolution(int channels) : Layer<T>({9 * channels}), channels_(channels) {}

  Maps<T> forward(Maps<T> x, Arena<T>& arena) override {
    x_ = x;
    const Maps<T> y = arena.maps(x);
    convolve_depthwise(x, this->parameters_, false, y);
    return y;
  }

  Maps<T> backward(Maps<T> dy, bool input_needs_gradient, Arena<T>& arena) override {
    for (int c = 0; c < channels_; ++c)
      correlate_channels<T, 1, 1>(dy.one(c), x_.one(c), 3, {}, 0, 0, this->gradient_ + c * 9);
    if (!input_needs_gradient) return {};
    const Maps<T> dx = arena.maps(x_);
    convolve_depthwise(dy, this->parameters_, true, dx);
    return dx;
  }

 private:
  int channels_;
  Maps<T> x_;
};

}  // namespace esper::hosts
