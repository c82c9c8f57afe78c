// Sixteen floats at a time, on whatever vector unit the compiler targets.
//
// Every function works lane by lane or adds up in one written order, so a value never depends on where in memory
// or on which thread it was computed. Compile without -ffast-math.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace tandem {

constexpr int kLanes = 16;

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t VecInt __attribute__((vector_size(64)));
typedef uint32_t VecBits __attribute__((vector_size(64)));
typedef uint16_t VecHalf __attribute__((vector_size(32)));

struct bfloat16 {
  uint16_t bits;
};

inline Vec broadcast(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const bfloat16* p) {
  VecHalf half;
  std::memcpy(&half, p, sizeof half);
  return (Vec)(__builtin_convertvector(half, VecBits) << 16);
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Rounds to nearest, ties to even, as torch does. A NaN stays a NaN.
inline void store(bfloat16* p, Vec v) {
  VecBits bits = (VecBits)v;
  VecBits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  VecBits is_nan = (VecBits)(v != v);
  VecHalf half = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), VecHalf);
  std::memcpy(p, &half, sizeof half);
}

typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));

// Lanes 0+8, 1+9, ...; then halves again: one fixed tree.
inline float sum(Vec v) {
  Vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  Vec4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

inline float largest(Vec v) {
  Vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  Vec8 b = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  a = a > b ? a : b;
  Vec4 c = __builtin_shufflevector(a, a, 0, 1, 2, 3);
  Vec4 d = __builtin_shufflevector(a, a, 4, 5, 6, 7);
  c = c > d ? c : d;
  float low = c[0] > c[1] ? c[0] : c[1];
  float high = c[2] > c[3] ? c[2] : c[3];
  return low > high ? low : high;
}

// e^x to about one unit in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, then a polynomial in r (Cephes).
// Exactly 0 below -87.3, so also for -infinity; saturates near e^88.
inline Vec exp(Vec x) {
  const float kLowest = -87.3f;
  Vec clamped = x > 88.0f ? broadcast(88.0f) : x;
  clamped = clamped > kLowest ? clamped : broadcast(kLowest);
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  Vec shifted = clamped * 1.44269504f + kRound;
  VecInt n = (VecInt)shifted - 0x4b400000;
  Vec whole = shifted - kRound;
  Vec r = clamped - whole * 0.693359375f;
  r = r - whole * -2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Vec result = (Vec)((VecInt)p + (n << 23));
  return x > kLowest ? result : Vec{};
}

}  // namespace tandem
