// How products of factors are computed: in the precision of T, or rounded to bfloat16 in pairs.
//
// Memory of pairs has the type float: a register holds two numbers for each lane. `kNumbers` numbers
// take the place of one, `pack` combines those of two registers, `put` stores neighbouring lanes
// as pairs, and `add` returns total + a b, summed over the numbers of a place.

#pragma once

#include "maps.h"

namespace esper::hosts {

template <class T>
struct Whole {
  static constexpr int kNumbers = 1;

  static Vector<T> pack(Vector<T>, Vector<T> b) { return b; }
  static void put(T* to, Vector<T> value) { store(to, value); }
  static Vector<T> add(Vector<T> total, Vector<T> a, T b) { return total + a * b; }
};

// Older compilers may come with an assembler that does not know the instructions.
#if defined(__AVX512BW__) && defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 11
#define ESPER_PAIRS

// The instructions stand as assembly so that a library for any processor with AVX-512 has them; it
// asks for them when it is loaded. They round to nearest and add in float.
struct Pairs {
  static constexpr int kNumbers = 2;

  typedef int16_t Numbers __attribute__((vector_size(kVectorBytes)));

  // The numbers of a, then those of b: neighbours become pairs.
  static Vector<float> join(Vector<float> a, Vector<float> b) {
    Vector<float> both;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(a), "v"(b));
    return both;
  }

  static Vector<float> pack(Vector<float> a, Vector<float> b) {
    Numbers order;
#pragma GCC unroll 32
    for (int i = 0; i < 32; ++i) order[i] = int16_t(i / 2 + i % 2 * 16);
    return reinterpret_cast<Vector<float>>(
        __builtin_shuffle(reinterpret_cast<Numbers>(join(a, b)), order));
  }

  static void put(float* to, Vector<float> value) {
    typedef float Half __attribute__((vector_size(kVectorBytes / 2), may_alias));
    Half rounded;
    asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(value));
    *reinterpret_cast<Half*>(to) = rounded;
  }

  static Vector<float> add(Vector<float> total, Vector<float> a, float b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(total) : "v"(a), "v"(broadcast(b)));
    return total;
  }
};
#endif

// Whether this processor computes products of pairs.
inline bool has_pairs() {
#if defined(ESPER_PAIRS)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

}  // namespace esper::hosts
