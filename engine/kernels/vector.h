// Sixteen floats at a time, on whatever vector unit the compiler targets.
//
// Every function works lane by lane or adds up in one written order, so a value never depends on where in memory
// or on which thread it was computed. Compile without -ffast-math.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

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
#ifdef __AVX512F__  // GCC 12 widens the sixteen in two halves otherwise
  VecBits wide = (VecBits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
#else
  VecHalf half;
  std::memcpy(&half, p, sizeof half);
  VecBits wide = __builtin_convertvector(half, VecBits);
#endif
  return (Vec)(wide << 16);
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

// Sixteen sums at once: lane i of the result is the sum of rows[i], each over the same fixed tree. Folds halves,
// quarters, eighths and sixteenths, two rows into one vector each time.
inline Vec sum_each(const Vec (&rows)[kLanes]) {
  Vec a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    a[i] = __builtin_shufflevector(rows[i], rows[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(rows[i], rows[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    c[i] = __builtin_shufflevector(b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  return __builtin_shufflevector(c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         __builtin_shufflevector(c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
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
