// The activations of one environment, and the memory that holds them.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "vector.h"

namespace esper {

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
};

inline int rounded_up(int count, int unit) { return (count + unit - 1) / unit * unit; }

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
