// A SIMD register, as wide as the instruction set allows; the activations of one environment, and the
// memory that holds them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace esper {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr bool kManyRegisters = true;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
constexpr bool kManyRegisters = false;
#else
constexpr int kVectorBytes = 16;
constexpr bool kManyRegisters = false;
#endif

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes), may_alias));
};

template <class T>
using Vector = typename VectorOf<T>::type;

// Elements per register.
template <class T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

template <class T>
inline Vector<T> load(const T* aligned) {
  return *reinterpret_cast<const Vector<T>*>(aligned);
}

template <class T>
inline void store(T* aligned, Vector<T> value) {
  *reinterpret_cast<Vector<T>*>(aligned) = value;
}

// Subtracting 0 changes no value, not even -0, so this compiles to a plain broadcast.
template <class T>
inline Vector<T> broadcast(T value) {
  return value - Vector<T>{};
}

// Two registers exchange their lanes: a keeps those whose number lacks the bit HALF, and its others
// are those of b without it.
template <class T, int HALF>
inline void exchange(Vector<T>& a, Vector<T>& b) {
  constexpr int lanes = kLanes<T>;
  const Vector<T> first = a, second = b;
#if defined(__clang__)
  for (int i = 0; i < lanes; ++i) {
    a[i] = i & HALF ? second[i - HALF] : first[i];
    b[i] = i & HALF ? second[i] : first[i + HALF];
  }
#else
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Number;
  typedef Number Numbers __attribute__((vector_size(kVectorBytes)));
  Numbers low = {}, high = {};
#pragma GCC unroll 16
  for (int i = 0; i < lanes; ++i) {
    low[i] = i & HALF ? lanes + i - HALF : i;
    high[i] = i & HALF ? lanes + i : i + HALF;
  }
  a = __builtin_shuffle(first, second, low);
  b = __builtin_shuffle(first, second, high);
#endif
}

// Transposes a square of registers.
template <class T, int HALF = kLanes<T> / 2>
inline void transpose(Vector<T> (&square)[kLanes<T>]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes<T>; ++i)
    if ((i & HALF) == 0) exchange<T, HALF>(square[i], square[i + HALF]);
  if constexpr (HALF > 1) transpose<T, HALF / 2>(square);
}

// Writes the transpose of a matrix [rows, columns]; the rows of both are `step` and `turned_step`
// elements apart.
template <class T>
void transpose_matrix(const T* matrix, int rows, int columns, int step, T* turned,
                      int turned_step) {
  constexpr int lanes = kLanes<T>;
  const auto tile = [&](int row, int column, auto height, auto width) {
    Vector<T> square[lanes] = {};
    for (int i = 0; i < height; ++i)
      std::memcpy(&square[i], matrix + ptrdiff_t(row + i) * step + column, width * sizeof(T));
    transpose<T>(square);
    for (int i = 0; i < width; ++i)
      std::memcpy(turned + ptrdiff_t(column + i) * turned_step + row, &square[i], height * sizeof(T));
  };
  for (int row = 0; row < rows; row += lanes)
    for (int column = 0; column < columns; column += lanes) {
      const int height = std::min(lanes, rows - row), width = std::min(lanes, columns - column);
      // Known to the compiler, whole squares stay in registers, and those of the taps of 3x3 kernels.
      constexpr std::integral_constant<int, lanes> whole;
      constexpr std::integral_constant<int, std::min(9, lanes)> taps;
      if (height == lanes && width == lanes)
        tile(row, column, whole, whole);
      else if (height == lanes && width == taps)
        tile(row, column, whole, taps);
      else if (height == taps && width == lanes)
        tile(row, column, taps, whole);
      else
        tile(row, column, size_t(height), size_t(width));
    }
}

// Sum of the lanes, in a fixed order.
template <class T>
inline T sum(Vector<T> value) {
  T lanes[kLanes<T>];
  for (int i = 0; i < kLanes<T>; ++i) lanes[i] = value[i];
  for (int half = kLanes<T> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// The first register becomes the sums of the lanes of each, as `sum` computes them.
template <class T, int HALF = kLanes<T> / 2>
inline void sum_each(Vector<T> (&square)[kLanes<T>]) {
#pragma GCC unroll 16
  for (int i = 0; i < HALF; ++i) {
    exchange<T, HALF>(square[i], square[i + HALF]);
    square[i] += square[i + HALF];
  }
  if constexpr (HALF > 1) sum_each<T, HALF / 2>(square);
}

// max(0, x); NaN stays NaN.
template <class T>
inline Vector<T> rectified(Vector<T> x) {
  return x < T(0) ? Vector<T>{} : x;
}

// The gradient where the rectified output is positive or NaN, 0 elsewhere.
template <class T>
inline Vector<T> where_active(Vector<T> output, Vector<T> gradient) {
  return output <= T(0) ? Vector<T>{} : gradient;
}

// Layout of a floating-point number and constants for exp_parts.
template <class T>
struct Bits;

template <>
struct Bits<float> {
  using Integer = int32_t;
  static constexpr int kShift = 23, kBias = 127, kDegree = 8;
  static constexpr float kLow = -87.0f, kHigh = 88.0f, kRounder = 12582912.0f;
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
};

template <>
struct Bits<double> {
  using Integer = int64_t;
  static constexpr int kShift = 52, kBias = 1023, kDegree = 14;
  static constexpr double kLow = -708.0, kHigh = 709.0, kRounder = 6755399441055744.0;
  static constexpr double kLn2High = 0.693147180369123816490, kLn2Low = 1.90821492927058770002e-10;
};

// exp(x) in two parts: 2^n, and 2^n (exp(r) - 1) with x = n ln 2 + r and |r| <= ln(2) / 2. Their sum
// is exp(x); separate parts keep exp(x) - 1 accurate near 0. exp(r) - 1 is a Taylor series whose
// first omitted term is below half a unit in the last place. x is clamped so that 2^n is normal.
template <class T>
struct ExpParts {
  Vector<T> power, rest;
};

template <class T>
inline ExpParts<T> exp_parts(Vector<T> x) {
  using B = Bits<T>;
  typedef typename B::Integer Integers __attribute__((vector_size(kVectorBytes)));
  x = x < B::kLow ? broadcast(B::kLow) : x;
  x = x > B::kHigh ? broadcast(B::kHigh) : x;
  const Vector<T> n = (x * T(1.44269504088896340736) + B::kRounder) - B::kRounder;
  const Vector<T> r = (x - n * B::kLn2High) - n * B::kLn2Low;
  T factorial = 1;
  for (int k = 2; k <= B::kDegree; ++k) factorial *= T(k);
  Vector<T> series = broadcast(T(1) / factorial);
  for (int k = B::kDegree; k > 1; --k) {
    factorial /= T(k);
    series = series * r + T(1) / factorial;
  }
  const Integers exponent = (__builtin_convertvector(n, Integers) + B::kBias) << B::kShift;
  const Vector<T> power = reinterpret_cast<Vector<T>>(exponent);
  return {power, power * (series * r)};
}

template <class T>
inline Vector<T> exponential(Vector<T> x) {
  const ExpParts<T> parts = exp_parts<T>(x);
  return parts.power + parts.rest;
}

// tanh |x| = e / (e + 2) with e = exp(2 |x|) - 1.
template <class T>
inline Vector<T> hyperbolic_tangent(Vector<T> x) {
  const Vector<T> size = x < T(0) ? -x : x;
  const ExpParts<T> parts = exp_parts<T>(size > T(20) ? broadcast(T(40)) : T(2) * size);
  const Vector<T> e = (parts.power - T(1)) + parts.rest;
  const Vector<T> value = e / (e + T(2));
  return x < T(0) ? -value : value;
}

// 1 / (1 + exp(-x)).
template <class T>
inline Vector<T> sigmoid(Vector<T> x) {
  return T(1) / (T(1) + exponential<T>(-x));
}

// The normal density at x, and the probability that a normal variable exceeds |x|. In float the ratio
// of both is a polynomial in 1 / (1 + 0.28 |x|), fitted for a probability accurate to 1e-8.
template <class T>
struct Normal {
  Vector<T> density, tail;
};

template <class T>
inline Normal<T> normal_at(Vector<T> x) {
  const Vector<T> density = exponential<T>(T(-0.5) * x * x) * T(0.398942280401432677940);
  if constexpr (sizeof(T) == sizeof(double)) {
    Vector<T> tail;
    for (int i = 0; i < kLanes<T>; ++i)
      tail[i] = T(0.5) * std::erfc(std::abs(x[i]) * T(0.707106781186547524401));
    return {density, tail};
  }
  const Vector<T> t = T(1) / (T(1) + T(0.28) * (x < T(0) ? -x : x));
  Vector<T> ratio = t * T(-0.265225779) + T(0.977285008);
  for (T factor : {T(-0.594080288), T(0.674078675), T(0.169180876), T(0.292075621)})
    ratio = ratio * t + factor;
  return {density, density * (ratio * t)};
}

// Feature maps [channels, height, width, lanes]: the images of a batch are innermost, so that one
// register holds the same pixel of several images. `lanes` is `images` rounded up to whole
// registers; the lanes beyond the images are 0 in every activation and every gradient.
template <class T>
struct Maps {
  T* data = nullptr;
  int channels = 0, height = 0, width = 0, images = 0, lanes = 0;

  int pixels() const { return height * width; }
  ptrdiff_t row() const { return ptrdiff_t(width) * lanes; }
  ptrdiff_t plane() const { return height * row(); }
  ptrdiff_t size() const { return channels * plane(); }
  T* channel(int c) const { return data + c * plane(); }
  bool ragged() const { return images != lanes; }
  Maps one(int c) const { return {channel(c), 1, height, width, images, lanes}; }
  // Every pixel as an image of its own.
  Maps by_pixel() const {
    const int count = pixels() * lanes;
    return {data, channels, 1, 1, count, count};
  }
};

constexpr int rounded_up(int count, int unit) { return (count + unit - 1) / unit * unit; }

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kRedZone = 256;  // elements between two pieces, where access is an error
inline void forbid(const void* memory, size_t bytes) { ASAN_POISON_MEMORY_REGION(memory, bytes); }
inline void allow(const void* memory, size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(memory, bytes); }
#else
constexpr size_t kRedZone = 0;
inline void forbid(const void*, size_t) {}
inline void allow(const void*, size_t) {}
#endif

// Memory that is handed out in pieces and released all at once. It is not returned to the system, so
// nothing is allocated after the first minibatch.
template <class T>
class Arena {
 public:
  int least_rounded = 0;  // channels from which convolutions round their factors; 0: never
  bool has_matrix_unit = false;  // whether they multiply them by the matrix unit

  struct Mark {
    size_t block, used;
  };

  T* take(ptrdiff_t count) {
    const size_t wanted = rounded(count);
    for (size_t i = spare_.size(); i-- > 0;) {
      if (spare_[i].size == wanted) {
        T* piece = spare_[i].memory;
        spare_.erase(spare_.begin() + ptrdiff_t(i));
        allow(piece, wanted * sizeof(T));
        return piece;
      }
    }
    while (block_ < blocks_.size() && used_ + wanted > blocks_[block_].size) {
      ++block_;
      used_ = 0;
    }
    if (block_ == blocks_.size()) {
      const size_t size = wanted > kBlock ? wanted : kBlock;
      void* memory = std::aligned_alloc(kVectorBytes, size * sizeof(T));
      if (memory == nullptr) throw std::bad_alloc();
      blocks_.push_back({std::unique_ptr<T, Free>(static_cast<T*>(memory)), size});
      forbid(memory, size * sizeof(T));
      used_ = 0;
    }
    T* piece = blocks_[block_].memory.get() + used_;
    used_ += wanted + kRedZone;
    allow(piece, wanted * sizeof(T));
    return piece;
  }

  // Maps with the dimensions of `like`, but `channels` channels.
  Maps<T> maps(Maps<T> like, int channels) {
    like.channels = channels;
    like.data = take(like.size());
    return like;
  }

  Maps<T> maps(Maps<T> like) { return maps(like, like.channels); }

  Maps<T> copy(const Maps<T>& x) {
    const Maps<T> y = maps(x);
    std::copy(x.data, x.data + x.size(), y.data);
    return y;
  }

  // Releases maps early: the next piece of this size reuses their memory while it is in the cache.
  void give_back(const Maps<T>& maps) {
    if (maps.data == nullptr) return;
    spare_.push_back({maps.data, rounded(maps.size())});
    forbid(maps.data, rounded(maps.size()) * sizeof(T));
  }

  Mark mark() const { return {block_, used_}; }

  void release(Mark mark) {
    block_ = mark.block;
    used_ = mark.used;
    spare_.clear();
    for (size_t i = block_; i < blocks_.size() && kRedZone > 0; ++i) {
      const size_t kept = i == block_ ? used_ : 0;
      if (kept < blocks_[i].size)
        forbid(blocks_[i].memory.get() + kept, (blocks_[i].size - kept) * sizeof(T));
    }
  }

 private:
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  struct Block {
    std::unique_ptr<T, Free> memory;
    size_t size;
  };
  static constexpr size_t kBlock = size_t(1) << 18;

  static size_t rounded(ptrdiff_t count) {
    const size_t unit = kLanes<T>;
    return (size_t(count) + unit - 1) / unit * unit;
  }

  struct Piece {
    T* memory;
    size_t size;
  };

  std::vector<Block> blocks_;
  std::vector<Piece> spare_;
  size_t block_ = 0, used_ = 0;
};

// Calls f(count, first) for blocks of 4, 2 and 1 registers that make up a row of `registers`. The count
// is a compile-time constant, so that the sums of a block can stay in registers.
template <class Function>
inline void in_registers(int registers, Function f) {
  int first = 0;
  for (; registers - first >= 4; first += 4) f(std::integral_constant<int, 4>{}, first);
  if (registers - first >= 2) {
    f(std::integral_constant<int, 2>{}, first);
    first += 2;
  }
  if (registers > first) f(std::integral_constant<int, 1>{}, first);
}

// Calls f(std::integral_constant<int, count>) for a `count` from 1 to MOST.
template <int MOST, class Function>
inline void at_compile_time(int count, Function f) {
  if (count == MOST) {
    f(std::integral_constant<int, MOST>{});
  } else if constexpr (MOST > 1) {
    at_compile_time<MOST - 1>(count, f);
  }
}

// Sets the lanes beyond the images to 0.
template <class T>
inline void clear_tail(Maps<T> x) {
  if (!x.ragged()) return;
  for (T* pixel = x.data; pixel != x.data + x.size(); pixel += x.lanes)
    for (int lane = x.images; lane < x.lanes; ++lane) pixel[lane] = 0;
}

// x = f(x) for every register of x, in place.
template <class T, class Function>
inline void transform(Maps<T> x, Function f) {
  for (ptrdiff_t i = 0; i < x.size(); i += kLanes<T>) store(x.data + i, f(load(x.data + i)));
}

// y = f(a, b), register by register; y may be a or b.
template <class T, class Function>
inline void combine(Maps<T> y, Maps<T> a, Maps<T> b, Function f) {
  for (ptrdiff_t i = 0; i < y.size(); i += kLanes<T>)
    store(y.data + i, Vector<T>(f(load(a.data + i), load(b.data + i))));
}

}  // namespace esper
