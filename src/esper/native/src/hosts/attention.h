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
        for (int s = 0; s <= t; ++s) {
          const Vector<T> score = head.product(joint_, kQuery, t, joint_, kKey, s) * head.scale;
          most = score > most ? score : most;
          store(row + s * joint.lanes, score);
        }
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
        for (int s = 0; s <= t; ++s) {
          const Vector<T> change = head.product(dy, 0, t, joint_, kValue, s);
          mean += change * load(row + s * lanes);
          store(scores + s * lanes, change);
        }
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

    // Scalar product of pixel t of a and pixel s of b.
    Vector<T> product(const Maps<T>& a, int a_third, int t, const Maps<T>& b, int b_third,
                      int s) const {
      const T *left = at(a, a_third, t), *right = at(b, b_third, s);
      Vector<T> total = {};
      for (int i = 0; i < size; ++i)
        total += load(left + i * a.plane()) * load(right + i * b.plane());
      return total;
    }

    // Pixel t of y: the sum of factor(s) times pixel s of x, from `begin` to `end`.
    template <class Factor>
    void sum(const Maps<T>& y, int y_third, int t, const Maps<T>& x, int x_third, int begin,
             int end, Factor factor) const {
      for (int i = 0; i < size; ++i) {
        const T* from = at(x, x_third, 0) + i * x.plane();
        Vector<T> total = {};
        for (int s = begin; s < end; ++s)
          total += factor(s) * load(from + ptrdiff_t(s) * lanes);
        store(at(y, y_third, t) + i * y.plane(), total);
      }
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
