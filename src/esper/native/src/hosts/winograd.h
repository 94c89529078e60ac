// 3x3 convolution by Winograd's algorithm F(2x2, 3x3), which takes 16 products for 4 pixels instead
// of 36 (Lavin and Gray, 2016, arXiv:1509.09308):
//
//   y = A' [(G w G') * (B' x B)] A
//
// for tiles of 2x2 pixels of y, which see 4x4 pixels of x. The products are summed over the input
// channels before the outer transform, each of the 16 places of a transformed tile on its own.

#pragma once

#include <algorithm>
#include <cstring>

#include "numbers.h"

namespace esper::hosts {

constexpr int kTilePlaces = 16;
constexpr int kLeastPixels = 16, kLeastRegisters = 64, kLeastChannels = 16;
constexpr int kLeastCorrelated = 32;  // channels for the gradient of the weights

// Whether there are channels enough to be worth the transforms of tiles, and tiles enough to be worth
// those of kernels. Of a few pixels the direct way skips many products with padding.
template <class T>
bool winograd_pays(const Maps<T>& x, int kernel, int outputs) {
  return kernel == 3 && x.height % 2 == 0 && x.width % 2 == 0 && x.pixels() >= kLeastPixels &&
         x.plane() >= kLeastRegisters * kLanes<T> &&
         std::min(x.channels, outputs) >= kLeastChannels;
}

// Calls f with the numbers of the factors of a convolution: pairs, if they are wanted and there are
// channels enough, else whole numbers.
template <class T, class Function>
void in_precision(const Maps<T>& x, int outputs, const Arena<T>& arena, Function f) {
#if defined(ESPER_PAIRS)
  if constexpr (std::is_same_v<T, float>) {
    if (arena.least_rounded > 0 && std::min(x.channels, outputs) >= arena.least_rounded) {
      f(Pairs{});
      return;
    }
  }
#endif
  f(Whole<T>{});
}

// Distance of the places of transformed tiles that have `count` registers each. Without the one
// more, all 16 places would share a few lines of the cache.
template <class T>
constexpr ptrdiff_t place_stride(int count) {
  return ptrdiff_t(count + 1) * kLanes<T>;
}

// G of 3 values to 4.
template <class V>
inline void transform_kernel(const V* in, int in_step, V* out, int out_step) {
  const V outer = in[0] + in[2 * in_step], middle = in[in_step];
  out[0] = in[0];
  out[out_step] = (outer + middle) / 2;
  out[2 * out_step] = (outer - middle) / 2;
  out[3 * out_step] = in[2 * in_step];
}

// B' of 4 values to 4.
template <class V>
inline void transform_input(const V* in, int step, V* out) {
  out[0] = in[0] - in[2 * step];
  out[step] = in[step] + in[2 * step];
  out[2 * step] = in[2 * step] - in[step];
  out[3 * step] = in[step] - in[3 * step];
}

// A' of 4 values to 2.
template <class V>
inline void transform_output(const V* in, int in_step, V* out, int out_step) {
  out[0] = in[0] + in[in_step] + in[2 * in_step];
  out[out_step] = in[in_step] - in[2 * in_step] - in[3 * in_step];
}

// Calls put(place, value) with B' x B for one register of images of a channel; (row, column) is the
// first pixel of the tile of y.
template <class T, class Put>
inline void input_tile(const Maps<T>& x, int channel, int row, int column, int lane, Put put) {
  const T* corner = x.channel(channel) + (row - 1) * x.row() +
                    ptrdiff_t(column - 1) * x.lanes + lane;
  const bool inside = row > 0 && column > 0 && row + 2 < x.height && column + 2 < x.width;
  Vector<T> pixels[kTilePlaces], half[kTilePlaces];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) {
      const bool padding = !inside && (row + i < 1 || row + i > x.height || column + j < 1 ||
                                       column + j > x.width);
      pixels[4 * i + j] =
          padding ? Vector<T>{} : load(corner + i * x.row() + ptrdiff_t(j) * x.lanes);
    }
  for (int j = 0; j < 4; ++j) transform_input(pixels + j, 4, half + j);
  for (int i = 0; i < 4; ++i) {
    Vector<T> places[4];
    transform_input(half + 4 * i, 1, places);
    for (int j = 0; j < 4; ++j) put(4 * i + j, places[j]);
  }
}

// Writes a tile of y for one register of images: A' m A.
template <class T>
inline void output_tile(const T* sums, ptrdiff_t stride, T* out, ptrdiff_t row, int lanes) {
  Vector<T> tile[kTilePlaces], half[2 * 4], pixels[2 * 2];
  for (int place = 0; place < kTilePlaces; ++place) tile[place] = load(sums + place * stride);
  for (int j = 0; j < 4; ++j) transform_output(tile + j, 4, half + j, 4);
  for (int i = 0; i < 2; ++i) transform_output(half + 4 * i, 1, pixels + 2 * i, 1);
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) store(out + i * row + ptrdiff_t(j) * lanes, pixels[2 * i + j]);
}

constexpr int kWinogradOutputs = kManyRegisters ? 8 : 4;

// G w G' of all kernels, [block of outputs, place, output of the block, input]; an output has `row`
// places for its inputs.
template <class T, class Numbers>
T* kernel_tiles(const T* weight, int inputs, int outputs, int row, Arena<T>& arena) {
  constexpr int most = kWinogradOutputs;
  const int columns = row * Numbers::kNumbers;
  T* tiles = arena.take(ptrdiff_t(rounded_up(outputs, most)) * row * kTilePlaces);
  T* turned = arena.take(ptrdiff_t(9) * columns);
  std::fill(turned, turned + 9 * columns, T(0));
  for (int o = 0; o < outputs; ++o) {
    const int first = o / most * most, block = std::min(most, outputs - first);
    T* out = tiles + (ptrdiff_t(first) * kTilePlaces + o % most) * row;
    transpose_matrix(weight + ptrdiff_t(o) * inputs * 9, inputs, 9, 9, turned, columns);
    for (int c = 0; c < columns; c += kLanes<T>) {
      Vector<T> kernel[9], half[4 * 3], tile[kTilePlaces];
      for (int i = 0; i < 9; ++i) kernel[i] = load(turned + i * columns + c);
      for (int j = 0; j < 3; ++j) transform_kernel(kernel + j, 3, half + j, 3);
      for (int i = 0; i < 4; ++i) transform_kernel(half + 3 * i, 1, tile + 4 * i, 1);
      for (int place = 0; place < kTilePlaces; ++place)
        Numbers::put(out + ptrdiff_t(place) * block * row + c / Numbers::kNumbers, tile[place]);
    }
  }
  return tiles;
}

// The sums over `channels` places of input channels for OUTPUTS channels and COUNT registers, for all
// places of a tile.
template <class T, class Numbers, int OUTPUTS, int COUNT>
inline void multiply_tiles(const T* inputs, int channels, const T* kernels, int row, T* sums) {
  for (int place = 0; place < kTilePlaces; ++place) {
    Vector<T> total[OUTPUTS][COUNT] = {};
    for (int c = 0; c < channels; ++c) {
      Vector<T> values[COUNT];
      for (int i = 0; i < COUNT; ++i) values[i] = load(inputs + (c * COUNT + i) * kLanes<T>);
      for (int o = 0; o < OUTPUTS; ++o)
        for (int i = 0; i < COUNT; ++i)
          total[o][i] = Numbers::add(total[o][i], values[i], kernels[o * row + c]);
    }
    kernels += OUTPUTS * row;
    for (int o = 0; o < OUTPUTS; ++o)
      for (int i = 0; i < COUNT; ++i) store(sums + (o * COUNT + i) * kLanes<T>, total[o][i]);
    inputs += place_stride<T>(channels * COUNT);
    sums += place_stride<T>(OUTPUTS * COUNT);
  }
}

// Computes COUNT tiles of a row of tiles, counted by column and then by register of images.
template <class T, class Numbers, int COUNT>
void convolve_tiles(const Maps<T>& x, const T* kernels, int kernel_row, const Maps<T>& y, int row,
                    int first, T* inputs, T* sums) {
  constexpr int numbers = Numbers::kNumbers;
  const int registers = x.lanes / kLanes<T>, channels = (x.channels + numbers - 1) / numbers;
  int column[COUNT], lane[COUNT];
  for (int i = 0; i < COUNT; ++i) {
    column[i] = (first + i) / registers * 2;
    lane[i] = (first + i) % registers * kLanes<T>;
    for (int c = 0; c < channels; ++c) {
      T* to = inputs + (c * COUNT + i) * kLanes<T>;
      const ptrdiff_t stride = place_stride<T>(channels * COUNT);
      Vector<T> first_of_pair[kTilePlaces];
      const auto pack = [&](int place, Vector<T> value) {
        store(to + place * stride, Numbers::pack(first_of_pair[place], value));
      };
      if constexpr (numbers == 2)
        input_tile(x, 2 * c, row, column[i], lane[i],
                   [&](int place, Vector<T> value) { first_of_pair[place] = value; });
      if (const int last = numbers * (c + 1) - 1; last < x.channels)
        input_tile(x, last, row, column[i], lane[i], pack);
      else
        for (int place = 0; place < kTilePlaces; ++place) pack(place, Vector<T>{});
    }
  }
  for (int o = 0; o < y.channels; o += kWinogradOutputs)
    at_compile_time<kWinogradOutputs>(
        std::min(kWinogradOutputs, y.channels - o), [&](auto outputs) {
          multiply_tiles<T, Numbers, outputs(), COUNT>(
              inputs, channels, kernels + ptrdiff_t(o) * kTilePlaces * kernel_row, kernel_row,
              sums);
          for (int k = 0; k < outputs(); ++k)
            for (int i = 0; i < COUNT; ++i)
              output_tile(sums + (k * COUNT + i) * kLanes<T>, place_stride<T>(outputs() * COUNT),
                          y.channel(o + k) + row * y.row() + ptrdiff_t(column[i]) * y.lanes +
                              lane[i],
                          y.row(), y.lanes);
        });
}

// The same as `convolve` with a 3x3 kernel, for an even height and width.
template <class T, class Numbers>
void convolve_winograd(Maps<T> x, const T* weight, Maps<T> y, Arena<T>& arena) {
  constexpr int count = 2;
  const int kernel_row = rounded_up(x.channels, kLanes<T>) / Numbers::kNumbers;
  const T* kernels = kernel_tiles<T, Numbers>(weight, x.channels, y.channels, kernel_row, arena);
  T* inputs = arena.take(kTilePlaces * place_stride<T>(x.channels * count));
  T* sums = arena.take(kTilePlaces * place_stride<T>(kWinogradOutputs * count));
  const int tiles = x.width / 2 * (x.lanes / kLanes<T>), pairs = tiles / count * count;
  for (int row = 0; row < x.height; row += 2) {
    for (int first = 0; first < pairs; first += count)
      convolve_tiles<T, Numbers, count>(x, kernels, kernel_row, y, row, first, inputs, sums);
    if (pairs < tiles)
      convolve_tiles<T, Numbers, 1>(x, kernels, kernel_row, y, row, pairs, inputs, sums);
  }
}

// A of 2 values to 4.
template <class V>
inline void transform_gradient(const V* in, int in_step, V* out, int out_step) {
  out[0] = in[0];
  out[out_step] = in[0] + in[in_step];
  out[2 * out_step] = in[0] - in[in_step];
  out[3 * out_step] = -in[in_step];
}

// A dy A' for one register of images.
template <class T, class Numbers>
inline void gradient_tile(const T* corner, ptrdiff_t row, int lanes, T* out, ptrdiff_t stride) {
  Vector<T> pixels[2 * 2], half[4 * 2], tile[kTilePlaces];
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) pixels[2 * i + j] = load(corner + i * row + ptrdiff_t(j) * lanes);
  for (int j = 0; j < 2; ++j) transform_gradient(pixels + j, 2, half + j, 2);
  for (int i = 0; i < 4; ++i) transform_gradient(half + 2 * i, 1, tile + 4 * i, 1);
  for (int place = 0; place < kTilePlaces; ++place)
    Numbers::put(out + place * stride, tile[place]);
}

// G' of 4 values to 3.
template <class V>
inline void transform_sums(const V* in, int in_step, V* out, int out_step) {
  const V even = (in[in_step] + in[2 * in_step]) / 2;
  out[0] = in[0] + even;
  out[out_step] = (in[in_step] - in[2 * in_step]) / 2;
  out[2 * out_step] = even + in[3 * in_step];
}

// Outputs per block of correlate_rows, and its registers of channels.
constexpr int kRowOutputs = kManyRegisters ? 8 : 4, kRowRegisters = 2;

// sums[o][c] = sum over `count` places of elements of dy[o] x[c], added to what stands there if
// `add`, for OUTPUTS channels of dy, `plane` apart, and `channels` of x, which are innermost in `rows`.
template <class T, class Numbers, int OUTPUTS, int REGISTERS>
inline void correlate_rows(const T* dy, ptrdiff_t plane, ptrdiff_t count, const T* rows,
                           ptrdiff_t row, bool add, T* sums, ptrdiff_t sums_row, int channels) {
  Vector<T> totals[OUTPUTS][REGISTERS] = {};
  for (int o = 0; o < OUTPUTS && add; ++o)
    std::memcpy(totals[o], sums + o * sums_row, size_t(channels) * sizeof(T));
  for (ptrdiff_t i = 0; i < count; ++i, ++dy, rows += row) {
    Vector<T> values[REGISTERS];
    for (int r = 0; r < REGISTERS; ++r) values[r] = load(rows + r * kLanes<T>);
    for (int o = 0; o < OUTPUTS; ++o)
      for (int r = 0; r < REGISTERS; ++r)
        totals[o][r] = Numbers::add(totals[o][r], values[r], dy[o * plane]);
  }
  for (int o = 0; o < OUTPUTS; ++o)
    std::memcpy(sums + o * sums_row, totals[o], size_t(channels) * sizeof(T));
}

// The transformed tiles of one register of images, [place, channel block, element, channel of the
// block], with room for `elements` in a block.
template <class T, class Numbers>
void turned_tiles(const Maps<T>& x, int row, int column, int lane, Vector<T>* scratch, T* out,
                  ptrdiff_t elements) {
  constexpr int lanes = kLanes<T>, width = kRowRegisters * lanes;
  const int blocks = rounded_up(x.channels, width) / width;
  for (int first = 0; first < x.channels; first += lanes) {
    const int count = std::min(lanes, x.channels - first);
    for (int k = 0; k < count; ++k)
      input_tile(x, first + k, row, column, lane, [&](int place, Vector<T> value) {
        scratch[k * kTilePlaces + place] = value;
      });
    for (int place = 0; place < kTilePlaces; ++place) {
      Vector<T> square[lanes] = {};
      for (int k = 0; k < count; ++k) square[k] = scratch[k * kTilePlaces + place];
      transpose<T>(square);
      T* to = out + (ptrdiff_t(place) * blocks + first / width) * elements * width + first % width;
      for (int k = 0; k < lanes; k += Numbers::kNumbers, to += width)
        store(to, Numbers::pack(square[k], square[k + Numbers::kNumbers - 1]));
    }
  }
}

// The gradient of the weights of `convolve_winograd`: G' [(A dy A') * (B' x B)] G, summed over tiles
// and images before the outer transform.
template <class T, class Numbers>
void correlate_winograd(Maps<T> dy, Maps<T> x, T* gradient, Arena<T>& arena) {
  constexpr int lanes = kLanes<T>, width = kRowRegisters * lanes;
  constexpr int places = lanes / Numbers::kNumbers;  // of the elements of a register
  constexpr ptrdiff_t chunk = 8, elements = chunk * places;
  const int row = rounded_up(x.channels, width), outputs = dy.channels;
  Vector<T> scratch[kTilePlaces * lanes];
  T* inputs = arena.take(kTilePlaces * elements * row);
  T* gradients = arena.take(kTilePlaces * elements * outputs);
  T* sums = arena.take(ptrdiff_t(kTilePlaces) * outputs * row);
  const int registers = x.lanes / lanes, columns = x.width / 2;
  const int tiles = x.height / 2 * columns * registers;
  for (int first = 0; first < tiles; first += int(chunk)) {
    const int count = std::min(int(chunk), tiles - first);
    for (int i = 0; i < count; ++i) {
      const int tile = (first + i) / registers, lane = (first + i) % registers * lanes;
      const int y = tile / columns * 2, z = tile % columns * 2;
      turned_tiles<T, Numbers>(x, y, z, lane, scratch, inputs + ptrdiff_t(i) * places * width,
                               elements);
      for (int o = 0; o < outputs; ++o)
        gradient_tile<T, Numbers>(
            dy.channel(o) + y * dy.row() + ptrdiff_t(z) * dy.lanes + lane, dy.row(), dy.lanes,
            gradients + o * elements + i * places, elements * outputs);
    }
    for (int place = 0; place < kTilePlaces; ++place)
      for (int c = 0; c < row; c += width)
        for (int o = 0; o < outputs; o += kRowOutputs)
          at_compile_time<kRowOutputs>(std::min(kRowOutputs, outputs - o), [&](auto block) {
            correlate_rows<T, Numbers, block(), kRowRegisters>(
                gradients + (ptrdiff_t(place) * outputs + o) * elements, elements,
                ptrdiff_t(count) * places, inputs + (ptrdiff_t(place) * row + c) * elements, width,
                first > 0, sums + (ptrdiff_t(place) * outputs + o) * row + c, row, width);
          });
  }
  for (int o = 0; o < outputs; ++o)
    for (int c = 0; c < x.channels; c += lanes) {
      Vector<T> tile[kTilePlaces], half[3 * 4], kernel[9];
      for (int place = 0; place < kTilePlaces; ++place)
        tile[place] = load(sums + (ptrdiff_t(place) * outputs + o) * row + c);
      for (int j = 0; j < 4; ++j) transform_sums(tile + j, 4, half + j, 4);
      for (int i = 0; i < 3; ++i) transform_sums(half + 4 * i, 1, kernel + 3 * i, 1);
      transpose_matrix(reinterpret_cast<const T*>(kernel), 9, std::min(lanes, x.channels - c),
                       lanes, gradient + (ptrdiff_t(o) * x.channels + c) * 9, 9);
    }
}

}  // namespace esper::hosts
