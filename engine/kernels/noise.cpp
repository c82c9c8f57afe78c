// Gumbel-max over a vocabulary in one sweep; tandem/rng.py and engine/sampling/gumbel.py are its reference.
//
// Chooses the very token that noise for every token chooses: a token is passed over only where its score cannot
// exceed the best so far, and whatever is not passed over is scored as the reference does. Rounding keeps order
// (a <= b gives fl(v + a) <= fl(v + b)), so a bound on the noise bounds the rounded score, in the scores' own type.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace tandem {
namespace {

// The widest vectors of the target: the compiler splits wider ones badly.
#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

template <class T>
struct Vector {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T>
using Vec = typename Vector<T>::type;
template <class T>
constexpr int kLanes = kBytes / sizeof(T);

typedef Vec<uint64_t> Wide;
constexpr int kWides = 2;                                  // counters of a group, in vectors
constexpr int kTokens = 4 * kWides * kLanes<uint64_t>;     // of a group
constexpr int kWords = kTokens / kLanes<uint32_t>;         // bits of a group, in vectors
constexpr double kLowestNoise = -2.82, kHighestNoise = 16.64;  // the noise lies between -2.8116 and 16.6356

struct NoiseKey {
  uint64_t seed;
  uint32_t word, position, sample_index;
};

template <class T>
inline Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}

template <class Mask>
inline bool any(Mask mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  return (((Wide)mask)[0] | ((Wide)mask)[1]) != 0;
#endif
}

// Lane by lane, the 64-bit product of the lower 32 bits.
inline Wide multiply(Wide x, uint32_t factor) {
#if defined(__AVX512F__)
  return (Wide)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (Wide)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#elif defined(__SSE2__)
  return (Wide)_mm_mul_epu32((__m128i)x, _mm_set1_epi64x(factor));
#else
  return (x & 0xffffffffu) * (uint64_t)factor;
#endif
}

// ---------------------------------------------------------------- noise

// Philox4x32-10 of one group's counters -> the bits of its tokens, in order. A word is the lower half of a lane;
// what is above it is never read.
inline void draw(uint32_t first_block, const NoiseKey& key, Vec<uint32_t> (&bits)[kWords]) {
  Wide x0[kWides], x1[kWides], x2[kWides], x3[kWides];
  Wide lane, zip;  // 0, 1, 2, ...; and lanes of two vectors by turns
  for (int i = 0; i < kLanes<uint64_t>; ++i) lane[i] = i, zip[i] = i / 2 + i % 2 * kLanes<uint64_t>;
  for (int w = 0; w < kWides; ++w) {
    x0[w] = lane + (first_block + w * kLanes<uint64_t>);
    x1[w] = Wide{} + key.position, x2[w] = Wide{} + key.sample_index, x3[w] = Wide{} + key.word;
  }
  uint32_t key0 = (uint32_t)key.seed, key1 = (uint32_t)(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int w = 0; w < kWides; ++w) {
      const Wide product0 = multiply(x0[w], 0xD2511F53), product1 = multiply(x2[w], 0xCD9E8D57);
      x0[w] = (product1 >> 32) ^ x1[w] ^ key0, x1[w] = product1;
      x2[w] = (product0 >> 32) ^ x3[w] ^ key1, x3[w] = product0;
    }
    key0 += 0x9E3779B9, key1 += 0xBB67AE85;
  }
  for (int w = 0; w < kWides; ++w) {
    const Wide low = (x0[w] & 0xffffffffu) | (x1[w] << 32), high = (x2[w] & 0xffffffffu) | (x3[w] << 32);
    bits[2 * w] = (Vec<uint32_t>)__builtin_shuffle(low, high, zip);
    bits[2 * w + 1] = (Vec<uint32_t>)__builtin_shuffle(low, high, zip + kLanes<uint64_t> / 2);
  }
}

// rng.gumbel_from_bits for one token.
inline float noise_of(uint32_t bits) { return (float)-std::log(-std::log(((bits >> 9) + 0.5) * 0x1p-23)); }

// Not below `noise_of`, without logarithms. With t = 1 - u, -log u >= t, so the noise is at most -log t. Here
// f = 2^23 t is exact in a float, and its bits, read as an integer, are 2^23 (127 + e + x) for f = 2^e (1 + x);
// log2(1 + x) >= x makes 2^23 (150 - log2 f) at most 2^23 * 150 minus that integer, and ln 2 * 2^-23 of it bounds
// -log t. The factor is 5e-6 larger than ln 2 * 2^-23: dozens of times what three roundings to float can lose.
inline Vec<float> bound_of(Vec<uint32_t> bits) {
  const Vec<float> f = __builtin_convertvector((Vec<int32_t>)(~bits >> 9), Vec<float>) + 0.5f;
  return __builtin_convertvector(0x4b000000 - (Vec<int32_t>)f, Vec<float>) * 8.26300e-8f;
}

// ---------------------------------------------------------------- argmax

template <class T>
T largest(const T* values, int64_t size) {
  constexpr int kUnroll = 4;
  const T lowest = -std::numeric_limits<T>::infinity();
  Vec<T> most[kUnroll];
  for (auto& v : most) v = Vec<T>{} + lowest;
  int64_t i = 0;
  for (; i + kUnroll * kLanes<T> <= size; i += kUnroll * kLanes<T>) {
    for (int j = 0; j < kUnroll; ++j) most[j] = larger(load(values + i + j * kLanes<T>), most[j]);
  }
  T result = lowest;
  for (const auto& v : most) {
    for (int lane = 0; lane < kLanes<T>; ++lane) result = larger(v[lane], result);
  }
  for (; i < size; ++i) result = larger(values[i], result);
  return result;
}

// A group's values plus the bounds of their noise.
inline void add_bounds(const float* values, const Vec<uint32_t> (&bits)[kWords], Vec<float> (&reach)[kWords]) {
  for (int w = 0; w < kWords; ++w) reach[w] = load(values + w * kLanes<float>) + bound_of(bits[w]);
}

inline void add_bounds(const double* values, const Vec<uint32_t> (&bits)[kWords], Vec<double> (&reach)[2 * kWords]) {
  for (int w = 0; w < kWords; ++w) {
    const Vec<float> bounds = bound_of(bits[w]);
    for (int half = 0; half < 2; ++half) {
      Vec<double> wide;
      for (int i = 0; i < kLanes<double>; ++i) wide[i] = bounds[half * kLanes<double> + i];
      reach[2 * w + half] = load(values + (2 * w + half) * kLanes<double>) + wide;
    }
  }
}

template <class V, int N>
inline V largest_of(const V (&vectors)[N]) {
  V most = vectors[0];
  for (int i = 1; i < N; ++i) most = larger(vectors[i], most);
  return most;
}

// The best score so far, and whose it is. Scores that are not larger are lost: they would come later.
template <class T>
struct Best {
  T score;
  int64_t token;
};

template <class T>
void visit_group(const T* values, int64_t first, const NoiseKey& key, Best<T>& best) {
  constexpr int kVecs = kTokens / kLanes<T>;
  Vec<T> reach[kVecs];
  for (int i = 0; i < kVecs; ++i) reach[i] = load(values + i * kLanes<T>);
  if (!any(largest_of(reach) + (T)kHighestNoise > best.score)) return;
  Vec<uint32_t> words[kWords];
  draw((uint32_t)(first / 4), key, words);
  add_bounds(values, words, reach);
  if (!any(largest_of(reach) > best.score)) return;
  T scores[kTokens];
  uint32_t bits[kTokens];
  std::memcpy(scores, reach, sizeof scores);
  std::memcpy(bits, words, sizeof bits);
  for (int i = 0; i < kTokens; ++i) {
    if (!(scores[i] > best.score)) continue;
    const T score = values[i] + (T)noise_of(bits[i]);
    if (score > best.score) best = {score, first + i};
  }
}

// Without a NaN among the values. Token 0 where none has a score above -infinity.
template <class T>
int64_t gumbel_argmax(const T* values, int64_t size, const NoiseKey& key) {
  const T masked = -std::numeric_limits<T>::infinity();
  // The winner scores at least this, whoever it is; one step less, because only a larger score is taken.
  Best<T> best = {std::nextafter(largest(values, size) + (T)kLowestNoise, masked), 0};
  int64_t first = 0;
  for (; first + kTokens <= size; first += kTokens) visit_group(values + first, first, key, best);
  if (first < size) {
    T rest[kTokens];
    for (int i = 0; i < kTokens; ++i) rest[i] = first + i < size ? values[first + i] : masked;
    visit_group(rest, first, key, best);
  }
  return best.token;
}

}  // namespace
}  // namespace tandem

#define TANDEM_GUMBEL_ARGMAX(T, SUFFIX)                                                                             \
  extern "C" int64_t tandem_gumbel_argmax_##SUFFIX(const T* values, int64_t size, uint64_t seed, uint32_t word,     \
                                                   uint32_t position, uint32_t sample_index) {                      \
    return tandem::gumbel_argmax(values, size, {seed, word, position, sample_index});                               \
  }

TANDEM_GUMBEL_ARGMAX(float, float32)
TANDEM_GUMBEL_ARGMAX(double, float64)

// What the Python side checks before it trusts this library: the bits of sixteen tokens from a block on; the noise
// of each of N bit patterns, and its bound. N is a multiple of 16.
extern "C" void tandem_noise_bits(uint32_t first_block, uint64_t seed, uint32_t word, uint32_t position,
                                  uint32_t sample_index, uint32_t* out) {
  tandem::Vec<uint32_t> bits[tandem::kWords];
  tandem::draw(first_block, {seed, word, position, sample_index}, bits);
  std::memcpy(out, bits, 16 * sizeof *out);
}

extern "C" void tandem_noise_and_bounds(const uint32_t* bits, int64_t count, float* noise, float* bounds) {
  for (int64_t i = 0; i < count; ++i) noise[i] = tandem::noise_of(bits[i]);
  for (int64_t i = 0; i < count; i += tandem::kLanes<uint32_t>) {
    const auto bound = tandem::bound_of(tandem::load(bits + i));
    std::memcpy(bounds + i, &bound, sizeof bound);
  }
}
