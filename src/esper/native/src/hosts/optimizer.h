// Clipping, AdamW and SGD for the parameters of one host or one seed.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace esper::hosts {

constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kAdamEpsilon = 1e-8;

enum class Rule : int32_t { adamw, sgd };

// Euclidean norm; the partial sums let the loop use vector instructions.
template <class T>
T norm(const T* values, ptrdiff_t count) {
  constexpr int width = 16;
  T squares[width] = {};
  ptrdiff_t i = 0;
  for (; i + width <= count; i += width)
    for (int j = 0; j < width; ++j) squares[j] += values[i + j] * values[i + j];
  for (; i < count; ++i) squares[0] += values[i] * values[i];
  T total = 0;
  for (T square : squares) total += square;
  return std::sqrt(total);
}

// The factor that reduces a gradient of norm `norm` to a norm of at most `most`; NaN stays NaN.
// Twin of tolaria.optim.clip_scale.
template <class T>
T clip_scale(T norm, T most) {
  const T scale = most / (norm + T(1e-6));
  return scale > T(1) ? T(1) : scale;
}

// Update rule and hyperparameters of one host or one seed.
template <class T>
struct Update {
  Rule rule;
  T learning_rate, weight_decay, momentum;
  T scale;  // clipping factor of the gradient
  T step;   // number of this update, counted from 1
};

// Loshchilov and Hutter (2019), algorithm 2.
// Twin of tolaria.optim._adamw.
template <class T>
void adamw(const Update<T>& update, const T* __restrict gradient, T* __restrict parameters,
           T* __restrict first, T* __restrict second, ptrdiff_t count) {
  const T correction1 = T(1) - T(std::pow(T(kBeta1), update.step));
  const T correction2 = std::sqrt(T(1) - T(std::pow(T(kBeta2), update.step)));
  const T size = update.learning_rate / correction1;
  const T kept = T(1) - update.learning_rate * update.weight_decay;
  const T rest1 = T(1.0 - kBeta1), beta2 = T(kBeta2), rest2 = T(1.0 - kBeta2);
  for (ptrdiff_t i = 0; i < count; ++i) {
    const T g = gradient[i] * update.scale;
    first[i] += rest1 * (g - first[i]);
    second[i] = beta2 * second[i] + rest2 * g * g;
    parameters[i] = parameters[i] * kept -
                    size * first[i] / (std::sqrt(second[i]) / correction2 + T(kAdamEpsilon));
  }
}

// SGD with its momentum buffer in `first`; weight decay is added to the gradient.
// Twin of tolaria.optim._sgd.
template <class T>
void sgd(const Update<T>& update, const T* __restrict gradient, T* __restrict parameters,
         T* __restrict first, ptrdiff_t count) {
  for (ptrdiff_t i = 0; i < count; ++i) {
    const T g = gradient[i] * update.scale + update.weight_decay * parameters[i];
    first[i] = update.momentum * first[i] + g;
    parameters[i] -= update.learning_rate * first[i];
  }
}

// Factor of the learning rate of each block, by its relative gradient norm (Auto-RGN).
// Twin of tolaria.optim.relative_rates.
template <class T>
std::vector<T> relative_rates(const T* gradient, const T* parameters, const std::vector<int>& sizes) {
  constexpr T least = T(1e-8);
  std::vector<T> factors;
  T largest = least;
  for (int size : sizes) {
    factors.push_back(norm(gradient, size) / std::max(norm(parameters, size), least));
    largest = std::max(largest, factors.back());
    gradient += size;
    parameters += size;
  }
  for (T& factor : factors) factor /= largest;
  return factors;
}

template <class T>
void apply(const Update<T>& update, const T* gradient, T* parameters, T* first, T* second,
           ptrdiff_t count) {
  if (update.rule == Rule::adamw)
    adamw(update, gradient, parameters, first, second, count);
  else
    sgd(update, gradient, parameters, first, count);
}

}  // namespace esper::hosts
