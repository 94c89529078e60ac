// Causal attention over the pixels of a sequence.

#pragma once

#include <cmath>
#include <limits>

#include "layer.h"

namespace esper::hosts {

// Attention of each pixel to itself and to all earlier ones. The input holds query, key and value,
// [3 channels, 1, width, lanes].
// Twin of kasmina.ops.causal_attention.
template <class T>
class CausalAttention : public Layer<T> {
 public:
  explicit CausalAttention(int heads) : heads_(heads) {}

  Maps<T> forward(Maps<T> joint, Arena<T>& arena) override {
    joint_ = joint;
    weights_ = triangles(arena);
    const Maps<T> y = arena.maps(joint, joint.channels / 3);
    for_each_head([&](const Head& head) {
      for (int t = 0; t < joint.width; ++t) {
        T* row = weights_ + head.row(t);
        Vector<T> most = broadcast(-std::numeric_limits<T>::infinity()), total = {};
        head.products(joint_, kQuery, t, joint_, kKey, t + 1, [&](int s, Vector<T> product) {
          const Vector<T> score = product * head.scale;
          most = score > most ? score : most;
          store(row + s * joint.lanes, score);
        });
        for (int s = 0; s <= t; ++s) {
          const Vector<T> weight = exponential<T>(load(row + s * joint.lanes) - most);
          total += weight;
          store(row + s * joint.lanes, weight);
        }
        for (int s = 0; s <= t; ++s)
          store(row + s * joint.lanes, load(row + s * joint.lanes) / total);
        head.sum(y, 0, t, joint_, kValue, 0, t + 1,
                 [&](int s) { return load(row + s * joint.lanes); });
      }
    });
    return y;
  }

  Maps<T> backward(Maps<T> dy, bool, Arena<T>& arena) override {
    const Maps<T> gradient = arena.maps(joint_);
    T* const score_gradients = triangles(arena);
    const int lanes = dy.lanes;
    for_each_head([&](const Head& head) {
      for (int t = 0; t < dy.width; ++t) {
        const T* row = weights_ + head.row(t);
        T* scores = score_gradients + head.row(t);
        Vector<T> mean = {};
        head.products(dy, 0, t, joint_, kValue, t + 1, [&](int s, Vector<T> change) {
          mean += change * load(row + s * lanes);
          store(scores + s * lanes, change);
        });
        for (int s = 0; s <= t; ++s)
          store(scores + s * lanes, load(row + s * lanes) *
                                        (load(scores + s * lanes) - mean) * head.scale);
        head.sum(gradient, kQuery, t, joint_, kKey, 0, t + 1,
                 [&](int s) { return load(scores + s * lanes); });
      }
      for (int s = 0; s < dy.width; ++s) {
        head.sum(gradient, kKey, s, joint_, kQuery, s, dy.width,
                 [&](int t) { return load(score_gradients + head.row(t) + s * lanes); });
        head.sum(gradient, kValue, s, dy, 0, s, dy.width,
                 [&](int t) { return load(weights_ + head.row(t) + s * lanes); });
      }
    });
    return gradient;
  }

 private:
  // Thirds of the joint channels.
  enum Third { kQuery, kKey, kValue };

  // One head of one register of sequences.
  struct Head {
    int first, size, channels;  // its channels in each third of `channels`
    int lane, lanes;
    ptrdiff_t triangle;  // its weights, [width (width + 1) / 2, lanes]
    T scale;

    // Offset of the weights of pixel t.
    ptrdiff_t row(int t) const { return triangle + ptrdiff_t(t) * (t + 1) / 2 * lanes + lane; }

    T* at(const Maps<T>& maps, int third, int pixel) const {
      return maps.channel(third * channels + first) + ptrdiff_t(pixel) * lanes + lane;
    }

    // Calls f(s, product) with the scalar products of pixel t of a and the pixels of b before `end`.
    template <class Function>
    void products(const Maps<T>& a, int a_third, int t, const Maps<T>& b, int b_third, int end,
                  Function f) const {
      in_registers(end, [&](auto count, int s) {
        const T *left = at(a, a_third, t), *right = at(b, b_third, s);
        Vector<T> totals[count()] = {};
        for (int i = 0; i < size; ++i, left += a.plane(), right += b.plane())
          for (int n = 0; n < count(); ++n) totals[n] += load(left) * load(right + n * lanes);
        for (int n = 0; n < count(); ++n) f(s + n, totals[n]);
      });
    }

    // Pixel t of y: the sum of factor(s) times pixel s of x, from `begin` to `end`.
    template <class Factor>
    void sum(const Maps<T>& y, int y_third, int t, const Maps<T>& x, int x_third, int begin,
             int end, Factor factor) const {
      in_registers(size, [&](auto count, int i) {
        const T* from = at(x, x_third, 0) + i * x.plane();
        Vector<T> totals[count()] = {};
        for (int s = begin; s < end; ++s)
          for (int n = 0; n < count(); ++n)
            totals[n] += factor(s) * load(from + n * x.plane() + ptrdiff_t(s) * lanes);
        for (int n = 0; n < count(); ++n) store(at(y, y_third, t) + (i + n) * y.plane(), totals[n]);
      });
    }
  };

  ptrdiff_t triangle() const {
    return ptrdiff_t(joint_.width) * (joint_.width + 1) / 2 * joint_.lanes;
  }

  T* triangles(Arena<T>& arena) const { return arena.take(heads_ * triangle()); }

  template <class Function>
  void for_each_head(Function f) const {
    const int channels = joint_.channels / 3, size = channels / heads_;
    for (int h = 0; h < heads_; ++h)
      for (int lane = 0; lane < joint_.lanes; lane += kLanes<T>)
        f(Head{h * size, size, channels, lane, joint_.lanes, h * triangle(),
               T(1) / std::sqrt(T(size))});
  }

  int heads_;
  Maps<T> joint_;
  T* weights_ = nullptr;
};

}  // namespace esper::hosts
