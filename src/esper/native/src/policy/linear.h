// Row-major matrices, and linear maps of their rows.
//
// A row is aligned to a register and padded to whole registers; the padding is finite and has no
// meaning. The number of rows is a multiple of kRows.

#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "maps.h"

namespace esper::policy {

constexpr int kRows = 8;

template <class T>
inline int padded(int columns) {
  return rounded_up(columns, std::max(kLanes<T>, kRows));
}

template <class T>
struct Matrix {
  T* data = nullptr;
  ptrdiff_t stride = 0;

  T* row(ptrdiff_t r) const { return data + r * stride; }
  Matrix from(ptrdiff_t r) const { return {row(r), stride}; }
  Matrix column(ptrdiff_t c) const { return {data + c, stride}; }
};

// If the row stride were a multiple of 256 bytes, rows would compete for the same few cache sets; one
// extra register per row avoids that.
template <class T>
inline Matrix<T> take(Arena<T>& arena, ptrdiff_t rows, int columns) {
  const ptrdiff_t wide = padded<T>(columns), bytes = wide * ptrdiff_t(sizeof(T));
  const ptrdiff_t stride = bytes % 256 == 0 ? wide + kLanes<T> : wide;
  return {arena.take(rows * stride), stride};
}

// Calls f(offset) for every register of `rows` rows, including the padding.
template <class T, class Function>
inline void each_register(Matrix<T> y, ptrdiff_t rows, Function f) {
  for (ptrdiff_t i = 0; i < rows * y.stride; i += kLanes<T>) f(i);
}

template <class T>
inline void rectify(Matrix<T> y, ptrdiff_t rows) {
  each_register(y, rows, [&](ptrdiff_t i) { store(y.data + i, rectified<T>(load(y.data + i))); });
}

// Gradient of the ReLU, in place: sets dy to 0 where y is 0.
template <class T>
inline void rectify_back(Matrix<T> y, Matrix<T> dy, ptrdiff_t rows) {
  each_register(y, rows, [&](ptrdiff_t i) {
    store(dy.data + i, where_active<T>(load(y.data + i), load(dy.data + i)));
  });
}

// Rows per tile, so that its sums fit into the registers.
template <int REGISTERS>
constexpr int kTileRows = std::min(kRows, (kManyRegisters ? 16 : 8) / REGISTERS);

// sums[i] += sum over k < `depth` of a[i * a_row + k * a_step] * b[k * b_step], where b[k * b_step] is
// REGISTERS registers wide.
template <class T, int REGISTERS>
inline void add_products(const T* a, ptrdiff_t a_row, ptrdiff_t a_step, const T* b,
                         ptrdiff_t b_step, ptrdiff_t depth,
                         Vector<T> (&sums)[kTileRows<REGISTERS>][REGISTERS]) {
  for (ptrdiff_t k = 0; k < depth; ++k, a += a_step, b += b_step) {
    Vector<T> values[REGISTERS];
    for (int r = 0; r < REGISTERS; ++r) values[r] = load(b + r * kLanes<T>);
    for (int i = 0; i < kTileRows<REGISTERS>; ++i) {
      const T factor = a[i * a_row];
      for (int r = 0; r < REGISTERS; ++r) sums[i][r] += values[r] * factor;
    }
  }
}

// A matrix [depth, columns] stored as consecutive blocks [depth, registers], so that a product reads it
// sequentially.
template <class T>
class Packed {
 public:
  void take(int depth, int columns, Arena<T>& arena) {
    depth_ = depth;
    columns_ = columns;
    registers_ = rounded_up(columns, kLanes<T>) / kLanes<T>;
    data_ = arena.take(ptrdiff_t(depth) * registers_ * kLanes<T>);
  }

  // Element (k, c) is w[k * depth_step + c * column_step]. Either the reads or the writes are strided;
  // the loop covers few rows at a time, which stay in the first-level cache.
  void pack(const T* w, ptrdiff_t depth_step, ptrdiff_t column_step) {
    in_registers(registers_, [&](auto block, int first) {
      const int begin = first * kLanes<T>, width = block() * kLanes<T>;
      const int known = std::min(width, columns_ - begin);
      T* place = data_ + ptrdiff_t(depth_) * begin;
      for (int few = 0; few < depth_; few += kFew)
        for (int c = 0; c < known; ++c)
          for (int k = few; k < std::min(few + kFew, depth_); ++k)
            place[ptrdiff_t(k) * width + c] = w[k * depth_step + (begin + c) * column_step];
      for (int c = known; c < width; ++c)
        for (int k = 0; k < depth_; ++k) place[ptrdiff_t(k) * width + c] = 0;
    });
  }

  // y = x times this matrix plus `bias` (null for none); added to y if `add`.
  void multiply(Matrix<T> x, ptrdiff_t rows, const T* bias, bool add, Matrix<T> y) const {
    in_registers(registers_, [&](auto block, int first) {
      constexpr int registers = block(), tile = kTileRows<registers>;
      const int begin = first * kLanes<T>;
      for (ptrdiff_t row = 0; row < rows; row += tile) {
        Vector<T> sums[tile][registers];
        for (int i = 0; i < tile; ++i) {
          for (int r = 0; r < registers; ++r) {
            const int c = begin + r * kLanes<T>;
            sums[i][r] = bias ? load(bias + c) : Vector<T>{};
            if (add) sums[i][r] += load(y.row(row + i) + c);
          }
        }
        add_products<T, registers>(x.row(row), x.stride, 1, data_ + ptrdiff_t(depth_) * begin,
                                   registers * kLanes<T>, depth_, sums);
        for (int i = 0; i < tile; ++i)
          for (int r = 0; r < registers; ++r)
            store(y.row(row + i) + begin + r * kLanes<T>, sums[i][r]);
      }
    });
  }

 private:
  static constexpr int kFew = 16;

  T* data_ = nullptr;
  int depth_ = 0, columns_ = 0, registers_ = 0;
};

// numbers[c] += sums[c] for the first `count` lanes; `numbers` need not be aligned.
template <class T>
inline void add_to(T* numbers, Vector<T> sums, int count) {
  if (count >= kLanes<T>) {
    Vector<T> before;
    std::memcpy(&before, numbers, sizeof(before));
    before += sums;
    std::memcpy(numbers, &before, sizeof(before));
  } else {
    for (int c = 0; c < count; ++c) numbers[c] += sums[c];
  }
}

// Rows summed at a time, so that the rows of x stay in the first-level cache.
constexpr ptrdiff_t kDepth = 128;
// If a row is longer than a memory page, the rows need more pages than the TLB holds. They are then
// copied to contiguous memory, and more rows are summed at a time to pay for the copy.
constexpr ptrdiff_t kPage = 4096, kCopiedDepth = 256;

// Temporary thread-local memory for `count` elements, valid until the next call.
template <class T>
inline T* scratch(ptrdiff_t count) {
  thread_local std::vector<T> memory;
  const size_t wanted = size_t(count + kLanes<T>);
  if (memory.size() < wanted) memory.resize(wanted);
  void* place = memory.data();
  size_t space = memory.size() * sizeof(T);
  return static_cast<T*>(std::align(kVectorBytes, size_t(count) * sizeof(T), place, space));
}

// Some rows of a matrix, split into strips of `width` columns: element (k, c) of a strip is at offset
// k * step() + c.
template <class T>
class Strips {
 public:
  // `room` is the memory to which `copy` copies strips; null to read them in place.
  Strips(Matrix<T> x, ptrdiff_t depth, T* room) : x_(x), depth_(depth), room_(room) {}

  void copy(ptrdiff_t begin, ptrdiff_t width) {
    if (room_ == nullptr) return;
    for (ptrdiff_t k = 0; k < depth_; ++k)
      std::copy_n(x_.row(k) + begin, width, room_ + begin * depth_ + k * width);
  }

  // Column c of the strip of `width` that begins at `begin`.
  const T* column(ptrdiff_t begin, ptrdiff_t c) const {
    return room_ == nullptr ? x_.data + begin + c : room_ + begin * depth_ + c;
  }

  ptrdiff_t step(ptrdiff_t width) const { return room_ == nullptr ? x_.stride : width; }

 private:
  Matrix<T> x_;
  ptrdiff_t depth_;
  T* room_;
};

// gradient[o][i] += sum over rows of dy[row][o] x[row][i]; `length` is the row stride of `gradient`.
template <class T>
void add_weight_gradient(Matrix<T> dy, Matrix<T> x, ptrdiff_t rows, int outputs, int inputs,
                         T* gradient, ptrdiff_t length) {
  const bool copied = std::max(dy.stride, x.stride) * ptrdiff_t(sizeof(T)) > kPage;
  const ptrdiff_t most = copied ? kCopiedDepth : kDepth;
  const ptrdiff_t high = rounded_up(outputs, kRows), wide = rounded_up(inputs, kLanes<T>);
  T* const room = copied ? scratch<T>(most * (high + wide)) : nullptr;
  for (ptrdiff_t row = 0; row < rows; row += most) {
    const ptrdiff_t depth = std::min(most, rows - row);
    Strips<T> dys(dy.from(row), depth, room);
    Strips<T> xs(x.from(row), depth, room == nullptr ? nullptr : room + most * high);
    for (ptrdiff_t o = 0; o < high; o += kRows) dys.copy(o, kRows);
    in_registers(int(wide) / kLanes<T>, [&](auto block, int first) {
      constexpr int count = block(), tile = kTileRows<count>, width = count * kLanes<T>;
      const int begin = first * kLanes<T>, known = std::min(width, inputs - begin);
      xs.copy(begin, width);
      for (int o = 0; o < outputs; o += tile) {
        Vector<T> sums[tile][count] = {};
        add_products<T, count>(dys.column(o / kRows * kRows, o % kRows), 1, dys.step(kRows),
                               xs.column(begin, 0), xs.step(width), depth, sums);
        for (int i = 0; i < tile; ++i) {
          T* place = gradient + (o + i) * length + begin;
          for (int r = 0; r < count && o + i < outputs; ++r)
            add_to<T>(place + r * kLanes<T>, sums[i][r], known - r * kLanes<T>);
        }
      }
    });
  }
}

// sums[c] += sum over rows of x[row][c].
template <class T>
void add_rows(Matrix<T> x, ptrdiff_t rows, int columns, T* sums) {
  for (int begin = 0; begin < columns; begin += kLanes<T>) {
    Vector<T> total = {};
    for (ptrdiff_t row = 0; row < rows; ++row) total += load(x.row(row) + begin);
    for (int c = begin; c < std::min(columns, begin + kLanes<T>); ++c) sums[c] += total[c - begin];
  }
}

// y = x W^T + b, where W is a range of rows and columns of a weight parameter with rows of `length`.
template <class T>
class Linear {
 public:
  struct Place {
    int weight, bias;  // indices of the parameters; bias -1 for none
    int first_output, first_input, length;
  };

  Linear() = default;

  Linear(Place place, int inputs, int outputs, const T* const* parameters, Arena<T>& arena)
      : place_(place), inputs_(inputs), outputs_(outputs) {
    weight_ = parameters[place.weight] + offset();
    down_.take(inputs, outputs, arena);
    if (place.bias < 0) return;
    bias_ = arena.take(padded<T>(outputs));
    std::fill_n(bias_, padded<T>(outputs), T(0));
    std::copy_n(parameters[place.bias] + place.first_output, outputs, bias_);
  }

  void take_backward(Arena<T>& arena) { up_.take(outputs_, inputs_, arena); }

  // Each is called once, before `forward` and before `backward` respectively.
  void prepare_forward() { down_.pack(weight_, 1, place_.length); }
  void prepare_backward() { up_.pack(weight_, place_.length, 1); }

  void forward(Matrix<T> x, ptrdiff_t rows, Matrix<T> y, bool add = false) const {
    down_.multiply(x, rows, bias_, add, y);
  }

  // Gradient of x.
  void backward(Matrix<T> dy, ptrdiff_t rows, Matrix<T> dx, bool add = false) const {
    up_.multiply(dy, rows, nullptr, add, dx);
  }

  // Adds the contribution of these rows to the gradients of weight and bias.
  void learn(Matrix<T> dy, Matrix<T> x, ptrdiff_t rows, T* const* gradients) const {
    add_weight_gradient(dy, x, rows, outputs_, inputs_, gradients[place_.weight] + offset(),
                        place_.length);
    if (bias_) add_rows(dy, rows, outputs_, gradients[place_.bias] + place_.first_output);
  }

 private:
  ptrdiff_t offset() const {
    return ptrdiff_t(place_.first_output) * place_.length + place_.first_input;
  }

  Place place_{};
  int inputs_ = 0, outputs_ = 0;
  const T* weight_ = nullptr;
  T* bias_ = nullptr;
  Packed<T> down_, up_;
};

}  // namespace esper::policy
