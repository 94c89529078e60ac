// The positions of a kernel that lie inside an image.

#pragma once

#include <algorithm>

#include "maps.h"

namespace esper::hosts {

// A kernel position inside the image: the offsets of its pixel and of its weight.
struct Tap {
  ptrdiff_t pixel;
  int weight;
};

// The taps at one pixel; pixel offsets are relative to it. Returns their number.
template <class T>
inline int taps_at(const Maps<T>& x, int kernel, int row, int column, Tap* taps) {
  const int reach = kernel / 2;
  int count = 0;
  for (int i = std::max(-reach, -row); i <= std::min(reach, x.height - 1 - row); ++i)
    for (int j = std::max(-reach, -column); j <= std::min(reach, x.width - 1 - column); ++j)
      taps[count++] = {i * x.row() + ptrdiff_t(j) * x.lanes, (i + reach) * kernel + j + reach};
  return count;
}

}  // namespace esper::hosts
