// A SIMD register, as wide as the instruction set allows, and functions on it.

#pragma once

#include <cstdint>
#include <type_traits>

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

// Sum of the lanes, in a fixed order.
template <class T>
inline T sum(Vector<T> value) {
  T lanes[kLanes<T>];
  for (int i = 0; i < kLanes<T>; ++i) lanes[i] = value[i];
  for (int half = kLanes<T> / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
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

}  // namespace esper
