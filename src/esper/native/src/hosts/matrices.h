// 3x3 convolutions by the matrix unit of a processor (AMX), which multiplies matrices of bfloat16 and
// adds the products in float:
//
//   C[i][j] += sum over k of A[i][k] . B[k][j]
//
// with 16 rows i, 16 columns j and 16 places k; each place of A and B holds a pair of numbers. Such a
// matrix, a square, fills 1 KB. The factors of a convolution are first copied into squares, so the
// unit reads memory without gaps, and there is nothing to transform.

#pragma once

#include <algorithm>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "numbers.h"
#include "taps.h"

#if defined(ESPER_PAIRS) && defined(__linux__)
#define ESPER_MATRICES
#include <cpuid.h>
#endif

namespace esper::hosts {

// Whether this processor has the unit and the system lets this process use it.
inline bool has_matrix_unit() {
#if defined(ESPER_MATRICES)
  constexpr unsigned features = 1u << 22 | 1u << 24;  // products of bfloat16, and registers
  constexpr long ask_for_permission = 0x1023, registers = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_pairs() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & features) == features &&
         syscall(SYS_arch_prctl, ask_for_permission, registers) == 0;
#else
  return false;
#endif
}

// Whether a convolution rounds its factors and has the unit.
template <class T>
bool has_matrices(const Maps<T>& x, int kernel, int outputs, const Arena<T>& arena) {
  return arena.has_matrix_unit && arena.least_rounded > 0 && kernel == 3 &&
         std::min(x.channels, outputs) >= arena.least_rounded;
}

#if defined(ESPER_MATRICES)
constexpr int kSide = 16, kSquare = kSide * kSide;

// The unit of this thread, with registers for whole squares, for as long as this object lives.
class MatrixUnit {
 public:
  MatrixUnit() {
    struct alignas(kVectorBytes) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    std::fill(shapes.row_bytes, shapes.row_bytes + 8, uint16_t(kVectorBytes));
    std::fill(shapes.rows, shapes.rows + 8, uint8_t(kSide));
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~MatrixUnit() { asm volatile("tilerelease"); }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
};

template <int REGISTER>
inline void clear_square() {
  asm volatile("tilezero %%tmm%c0" ::"i"(REGISTER));
}

template <int REGISTER>
inline void load_square(const float* from) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(ptrdiff_t(kVectorBytes)),
               "i"(REGISTER)
               : "memory");
}

// Rows of `to` are `row` elements apart.
template <int REGISTER>
inline void store_square(float* to, ptrdiff_t row) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row * ptrdiff_t(sizeof(float))),
               "i"(REGISTER)
               : "memory");
}

template <int C, int A, int B>
inline void multiply_squares() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// Squares that follow each other `step` elements apart along the sum, and those of the next 16 rows
// or columns.
struct Squares {
  const float* first;
  ptrdiff_t step, next;
};

// The sums of 16 ROWS by 16 COLUMNS, in registers 2 row + column.
template <int ROWS, int COLUMNS>
struct SquareSums {
  static void clear() {
    clear_square<0>();
    if constexpr (COLUMNS > 1) clear_square<1>();
    if constexpr (ROWS > 1) clear_square<2>();
    if constexpr (ROWS > 1 && COLUMNS > 1) clear_square<3>();
  }

  // Adds the products of `count` squares.
  static void add(Squares a, Squares b, int count) {
    for (int k = 0; k < count; ++k, a.first += a.step, b.first += b.step) {
      load_square<4>(a.first);
      load_square<6>(b.first);
      multiply_squares<0, 4, 6>();
      if constexpr (COLUMNS > 1) {
        load_square<7>(b.first + b.next);
        multiply_squares<1, 4, 7>();
      }
      if constexpr (ROWS > 1) {
        load_square<5>(a.first + a.next);
        multiply_squares<2, 5, 6>();
        if constexpr (COLUMNS > 1) multiply_squares<3, 5, 7>();
      }
    }
  }

  // Calls put(row, column, store) for each square; store(to, row) writes it.
  template <class Put>
  static void put_each(Put put) {
    put(0, 0, store_square<0>);
    if constexpr (COLUMNS > 1) put(0, 1, store_square<1>);
    if constexpr (ROWS > 1) put(1, 0, store_square<2>);
    if constexpr (ROWS > 1 && COLUMNS > 1) put(1, 1, store_square<3>);
  }
};

constexpr int blocks_of(int count, int unit) { return (count + unit - 1) / unit; }

// Calls f(rows, columns) at compile time, of squares that are left.
template <class Function>
inline void in_squares(int rows, int columns, Function f) {
  at_compile_time<2>(std::min(rows, 2), [&](auto r) {
    at_compile_time<2>(std::min(columns, 2), [&](auto c) { f(r, c); });
  });
}

// Weights [outputs, inputs, 3, 3] as squares [block of 16 outputs, tap, block of 32 inputs] with an
// output a row and a pair of inputs a place.
inline float* kernel_squares(const float* weight, int inputs, int outputs, Arena<float>& arena) {
  const int depth = blocks_of(inputs, 2 * kSide), columns = depth * 2 * kSide;
  float* squares = arena.take(ptrdiff_t(blocks_of(outputs, kSide)) * 9 * depth * kSquare);
  float* turned = arena.take(ptrdiff_t(9) * columns);
  std::fill(turned, turned + 9 * columns, 0.0f);
  for (int o = 0; o < outputs; ++o) {
    transpose_matrix(weight + ptrdiff_t(o) * inputs * 9, inputs, 9, 9, turned, columns);
    float* to = squares + ptrdiff_t(o / kSide) * 9 * depth * kSquare + o % kSide * kSide;
    for (const float* from = turned; from < turned + 9 * columns; from += 2 * kSide, to += kSquare)
      store(to, Pairs::join(load(from), load(from + kSide)));
  }
  return squares;
}

// The same of the kernels rotated by 180 degrees, with outputs and inputs swapped: squares
// [block of 16 inputs, tap, block of 32 outputs] with an input a row and a pair of outputs a place.
inline float* turned_kernel_squares(const float* weight, int inputs, int outputs,
                                    Arena<float>& arena) {
  const int depth = blocks_of(outputs, 2 * kSide);
  float* squares = arena.take(ptrdiff_t(blocks_of(inputs, kSide)) * 9 * depth * kSquare);
  float* turned = arena.take(2 * kSide * 9 * kSide);  // [output, tap, input]
  std::fill(turned, turned + 2 * kSide * 9 * kSide, 0.0f);
  for (int c = 0; c < inputs; c += kSide)
    for (int d = 0; d < depth; ++d) {
      const int o = d * 2 * kSide;
      for (int k = 0; k < std::min(2 * kSide, outputs - o); ++k)
        transpose_matrix(weight + (ptrdiff_t(o + k) * inputs + c) * 9, std::min(kSide, inputs - c), 9,
                         9, turned + k * 9 * kSide, kSide);
      for (int tap = 0; tap < 9; ++tap) {
        float* to = squares + ((ptrdiff_t(c / kSide) * 9 + 8 - tap) * depth + d) * kSquare;
        Vector<float> square[kSide];
        for (int k = 0; k < kSide; ++k) {
          const float* pair = turned + (2 * k * 9 + tap) * kSide;
          square[k] = Pairs::pack(load(pair), load(pair + 9 * kSide));
        }
        transpose<float>(square);
        for (int k = 0; k < kSide; ++k) store(to + k * kSide, square[k]);
      }
    }
  return squares;
}

// Pixels as squares [block of 32 channels, pixel, register of images] with a pair of channels a row.
inline float* channel_squares(const Maps<float>& x, Arena<float>& arena) {
  const int depth = blocks_of(x.channels, 2 * kSide);
  float* squares = arena.take(depth * x.plane() * kSide);
  for (int pair = 0; pair < depth * kSide; ++pair) {
    const bool first = 2 * pair < x.channels, second = 2 * pair + 1 < x.channels;
    const float *a = x.channel(2 * pair), *b = x.channel(2 * pair + 1);
    float* to = squares + pair / kSide * x.plane() * kSide + pair % kSide * kSide;
    for (ptrdiff_t i = 0; i < x.plane(); i += kSide, to += kSquare)
      store(to, Pairs::pack(first ? load(a + i) : Vector<float>{},
                            second ? load(b + i) : Vector<float>{}));
  }
  return squares;
}

// The same as `convolve` with a 3x3 kernel, of whose weights `kernels` are the squares.
inline void convolve_matrices(Maps<float> x, const float* kernels, Maps<float> y,
                              Arena<float>& arena) {
  const int registers = x.lanes / kSide, depth = blocks_of(x.channels, 2 * kSide);
  const ptrdiff_t plane = x.plane() * kSide, kernel = ptrdiff_t(depth) * kSquare;
  const float* inputs = channel_squares(x, arena);
  alignas(kVectorBytes) float last[kSquare];
  Tap taps[9];
  const MatrixUnit unit;
  for (int o = 0; o < y.channels; o += 2 * kSide)
    for (int pixel = 0; pixel < x.pixels(); ++pixel) {
      const int count = taps_at(x, 3, pixel / x.width, pixel % x.width, taps);
      for (int lane = 0; lane < registers; lane += 2)
        in_squares(blocks_of(y.channels - o, kSide), registers - lane, [&](auto rows, auto columns) {
          using Sums = SquareSums<rows(), columns()>;
          const ptrdiff_t at = (ptrdiff_t(pixel) * registers + lane) * kSide;
          Sums::clear();
          for (int t = 0; t < count; ++t)
            Sums::add({kernels + (o / kSide * 9 + taps[t].weight) * kernel, kSquare, 9 * kernel},
                      {inputs + (at + taps[t].pixel) * kSide, plane, kSquare}, depth);
          Sums::put_each([&](int row, int column, auto store_sums) {
            float* to = y.channel(o + row * kSide) + at + column * kSide;
            const int left = y.channels - o - row * kSide;
            if (left >= kSide) return store_sums(to, y.plane());
            store_sums(last, kSide);
            for (int i = 0; i < left; ++i) store(to + i * y.plane(), load(last + i * kSide));
          });
        });
    }
}

// Maps as squares [block of 16 channels, pixel, block of 32 images] with a pair of images a place:
// a channel a row, or a column if `turned`.
inline float* image_squares(const Maps<float>& x, bool turned, Arena<float>& arena) {
  const int blocks = blocks_of(x.lanes, 2 * kSide);
  const ptrdiff_t count = ptrdiff_t(x.pixels()) * blocks;
  float* squares = arena.take(blocks_of(x.channels, kSide) * count * kSquare);
  float* to = squares;
  for (int c = 0; c < x.channels; c += kSide)
    for (ptrdiff_t i = 0; i < count; ++i, to += kSquare) {
      Vector<float> square[kSide] = {};
      const int lane = int(i % blocks) * 2 * kSide;
      for (int k = 0; k < std::min(kSide, x.channels - c); ++k) {
        const float* from = x.channel(c + k) + i / blocks * x.lanes + lane;
        const bool whole = lane + kSide < x.lanes;
        square[k] = Pairs::join(load(from), whole ? load(from + kSide) : Vector<float>{});
      }
      if (turned) transpose<float>(square);
      for (int k = 0; k < kSide; ++k) store(to + k * kSide, square[k]);
    }
  return squares;
}

// The gradient of the weights of `convolve_matrices`.
inline void correlate_matrices(Maps<float> dy, Maps<float> x, float* gradient,
                               Arena<float>& arena) {
  const int blocks = blocks_of(x.lanes, 2 * kSide);
  const ptrdiff_t plane = ptrdiff_t(x.pixels()) * blocks * kSquare;
  const float* gradients = image_squares(dy, false, arena);
  const float* inputs = image_squares(x, true, arena);
  alignas(kVectorBytes) float sums[4 * 9 * kSquare];  // [row, column, tap, square]
  const MatrixUnit unit;
  for (int o = 0; o < dy.channels; o += 2 * kSide)
    for (int c = 0; c < x.channels; c += 2 * kSide)
      in_squares(blocks_of(dy.channels - o, kSide), blocks_of(x.channels - c, kSide),
                 [&](auto rows, auto columns) {
        using Sums = SquareSums<rows(), columns()>;
        for (int tap = 0; tap < 9; ++tap) {
          const int i = tap / 3 - 1, j = tap % 3 - 1;
          const int first = std::max(0, -j), run = x.width - std::abs(j);
          Sums::clear();
          for (int row = std::max(0, -i); row < std::min(x.height, x.height - i); ++row) {
            const ptrdiff_t at = ptrdiff_t(row) * x.width + first;
            const ptrdiff_t from = at + ptrdiff_t(i) * x.width + j;
            Sums::add({gradients + o / kSide * plane + at * blocks * kSquare, kSquare, plane},
                      {inputs + c / kSide * plane + from * blocks * kSquare, kSquare, plane},
                      run * blocks);
          }
          Sums::put_each([&](int row, int column, auto store_sums) {
            store_sums(sums + ((2 * row + column) * 9 + tap) * kSquare, kSide);
          });
        }
        for (int row = 0; row < rows(); ++row)
          for (int column = 0; column < columns(); ++column)
            for (int k = 0; k < std::min(kSide, dy.channels - o - row * kSide); ++k)
              transpose_matrix(
                  sums + (2 * row + column) * 9 * kSquare + k * kSide, 9,
                  std::min(kSide, x.channels - c - column * kSide), kSquare,
                  gradient + (ptrdiff_t(o + row * kSide + k) * x.channels + c + column * kSide) * 9,
                  9);
      });
}
#endif

}  // namespace esper::hosts
