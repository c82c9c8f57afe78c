// The layer kernels of engine/kernels/base.py, compiled; engine/kernels/cpu_reference.py is their reference.
//
// A row (a token, or a token's head) is computed by one thread, in one order of summation that depends on that
// row alone. Letters: P rows, T tokens, E hidden size, I intermediate size, H query heads, KH key-value heads,
// G = H / KH, D head size, C context. Sizes of rows are multiples of 16.

#include <cmath>

#include "vector.h"

namespace tandem {
namespace {

constexpr int kChunk = 64;       // keys whose scores are held at once
constexpr int kMaxGroup = 4;     // query heads computed together
constexpr int kMaxHeadDim = 128;

// ---------------------------------------------------------------- norm and activation

inline float inverse_rms(const float* x, int size, float eps) {
  Vec squares = {};
  for (int i = 0; i < size; i += kLanes) {
    Vec v = load(x + i);
    squares += v * v;
  }
  return 1.0f / std::sqrt(sum(squares) / size + eps);
}

template <class T>
void add_rms_norm(float* residual, const T* delta, const float* weight, float eps, T* out, int rows, int size,
                  int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int row = 0; row < rows; ++row) {
    float* x = residual + (int64_t)row * size;
    if (delta != nullptr) {
      for (int i = 0; i < size; i += kLanes) store(x + i, load(x + i) + load(delta + (int64_t)row * size + i));
    }
    float scale = inverse_rms(x, size, eps);
    for (int i = 0; i < size; i += kLanes) store(out + (int64_t)row * size + i, load(x + i) * scale * load(weight + i));
  }
}

template <class T>
void silu_mul(const T* gate_up, T* out, int rows, int size, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int row = 0; row < rows; ++row) {
    const T* gate = gate_up + (int64_t)row * 2 * size;
    for (int i = 0; i < size; i += kLanes) {
      Vec g = load(gate + i);
      store(out + (int64_t)row * size + i, g / (1.0f + exp(-g)) * load(gate + size + i));
    }
  }
}

// ---------------------------------------------------------------- attention

// One step's constants; the Python side fills the same structure.
struct AttentionStep {
  const int32_t* positions;      // [T]
  const int32_t* sequence_rows;  // [T] -> row of block_tables
  const int32_t* slot_mapping;   // [T]
  const int32_t* block_tables;   // [N, max_blocks]
  const float* cosines;          // [max_context, D / 2]
  const float* sines;            // [max_context, D / 2]
  void* cache;                   // [layers, 2, blocks, KH, block_size, D]
  int64_t values_offset;         // elements from a layer's keys to its values; twice that from layer to layer
  int32_t num_tokens;
  int32_t max_blocks;
  int32_t block_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t num_threads;
  float eps;
};

// One head of a token: norm (optional), rotation, scale -> float [D].
template <class T>
void rotate_head(const AttentionStep& step, const T* head, int token, const float* norm, float scale, float* out) {
  const int dim = step.head_dim, half = dim / 2;
  float x[kMaxHeadDim];
  for (int i = 0; i < dim; i += kLanes) store(x + i, load(head + i));
  if (norm != nullptr) {
    float inverse = inverse_rms(x, dim, step.eps);
    for (int i = 0; i < dim; i += kLanes) store(x + i, load(x + i) * inverse * load(norm + i));
  }
  const float* cosines = step.cosines + (int64_t)step.positions[token] * half;
  const float* sines = step.sines + (int64_t)step.positions[token] * half;
  for (int i = 0; i < half; ++i) {
    out[i] = (x[i] * cosines[i] - x[i + half] * sines[i]) * scale;
    out[i + half] = (x[i + half] * cosines[i] + x[i] * sines[i]) * scale;
  }
}

// A token's keys and values, to their slot.
template <class T>
void write_token(const AttentionStep& step, const T* token_qkv, int token, const float* key_norm, T* keys, T* values) {
  const int dim = step.head_dim, slot = step.slot_mapping[token];
  const int64_t block = slot / step.block_size, offset = slot % step.block_size;
  const T* key = token_qkv + (int64_t)step.num_heads * dim;
  const T* value = key + (int64_t)step.num_kv_heads * dim;
  for (int head = 0; head < step.num_kv_heads; ++head) {
    const int64_t place = ((block * step.num_kv_heads + head) * step.block_size + offset) * dim;
    float rotated[kMaxHeadDim];
    rotate_head(step, key + head * dim, token, key_norm, 1.0f, rotated);
    for (int i = 0; i < dim; i += kLanes) store(keys + place + i, load(rotated + i));
    std::memcpy(values + place, value + head * dim, dim * sizeof(T));
  }
}

// Softmax attention of GROUP query heads that share keys, DV * 16 = D, over the first `context` rows of a sequence.
// The context is taken in chunks of kChunk with a running maximum: what happens depends on the context alone.
template <class T, int DV, int GROUP>
void attend_heads(const AttentionStep& step, const float* queries, const T* keys, const T* values,
                  const int32_t* blocks, int kv_head, int context, T* out) {
  constexpr int kDim = DV * kLanes;
  float highest[GROUP], total[GROUP];
  Vec acc[GROUP][DV] = {};
  for (int g = 0; g < GROUP; ++g) highest[g] = -std::numeric_limits<float>::infinity(), total[g] = 0.0f;
  int block_index = 0, offset = 0;
  for (int start = 0; start < context; start += kChunk) {
    const int count = context - start < kChunk ? context - start : kChunk;
    int64_t places[kChunk];
    float weights[GROUP][kChunk];
    for (int i = 0; i < count; ++i) {
      places[i] = (((int64_t)blocks[block_index] * step.num_kv_heads + kv_head) * step.block_size + offset) * kDim;
      if (++offset == step.block_size) offset = 0, ++block_index;
    }
    for (int first = 0; first < count; first += kLanes) {
      const int num_keys = count - first < kLanes ? count - first : kLanes;
      Vec products[GROUP][kLanes];
      for (int i = 0; i < num_keys; ++i) {
        Vec key[DV];
        for (int d = 0; d < DV; ++d) key[d] = load(keys + places[first + i] + d * kLanes);
        for (int g = 0; g < GROUP; ++g) {
          Vec dot = load(queries + g * kDim) * key[0];
          for (int d = 1; d < DV; ++d) dot += load(queries + g * kDim + d * kLanes) * key[d];
          products[g][i] = dot;
        }
      }
      for (int g = 0; g < GROUP; ++g) {
        for (int i = num_keys; i < kLanes; ++i) products[g][i] = Vec{};
        store(weights[g] + first, sum_each(products[g]));
      }
    }
    for (int g = 0; g < GROUP; ++g) {
      for (int i = count; i < kChunk; ++i) weights[g][i] = -std::numeric_limits<float>::infinity();
      Vec most = broadcast(highest[g]);
      for (int i = 0; i < kChunk; i += kLanes) {
        Vec w = load(weights[g] + i);
        most = w > most ? w : most;
      }
      const float now_highest = largest(most);
      const float decay = exp(broadcast(highest[g] - now_highest))[0];
      highest[g] = now_highest;
      Vec added = {};
      for (int i = 0; i < kChunk; i += kLanes) {
        Vec w = exp(load(weights[g] + i) - now_highest);
        store(weights[g] + i, w);
        added += w;
      }
      total[g] = total[g] * decay + sum(added);
      for (int d = 0; d < DV; ++d) acc[g][d] *= decay;
    }
    for (int i = 0; i < count; ++i) {
      for (int d = 0; d < DV; ++d) {
        Vec value = load(values + places[i] + d * kLanes);
        for (int g = 0; g < GROUP; ++g) acc[g][d] += weights[g][i] * value;
      }
    }
  }
  for (int g = 0; g < GROUP; ++g) {
    for (int d = 0; d < DV; ++d) store(out + g * kDim + d * kLanes, acc[g][d] / total[g]);
  }
}

// All query heads of a token that share one key-value head, at most kMaxGroup at a time.
template <class T, int DV>
void attend_token(const AttentionStep& step, const T* token_qkv, int token, int kv_head, const float* query_norm,
                  const T* keys, const T* values, T* token_out) {
  constexpr int kDim = DV * kLanes;
  const int group = step.num_heads / step.num_kv_heads;
  const int32_t* blocks = step.block_tables + (int64_t)step.sequence_rows[token] * step.max_blocks;
  const int context = step.positions[token] + 1;
  const float scale = 1.0f / std::sqrt((float)kDim);
  for (int first = 0; first < group; first += kMaxGroup) {
    const int count = group - first < kMaxGroup ? group - first : kMaxGroup;
    const int64_t place = (int64_t)(kv_head * group + first) * kDim;
    float queries[kMaxGroup * kDim];
    for (int g = 0; g < count; ++g) {
      rotate_head(step, token_qkv + place + g * kDim, token, query_norm, scale, queries + g * kDim);
    }
    auto run = count == 4   ? attend_heads<T, DV, 4>
               : count == 3 ? attend_heads<T, DV, 3>
               : count == 2 ? attend_heads<T, DV, 2>
                            : attend_heads<T, DV, 1>;
    run(step, queries, keys, values, blocks, kv_head, context, token_out + place);
  }
}

template <class T, int DV>
void attention(const AttentionStep& step, int layer, const T* qkv, const float* query_norm, const float* key_norm,
               T* out) {
  const int64_t qkv_size = (int64_t)(step.num_heads + 2 * step.num_kv_heads) * step.head_dim;
  const int64_t out_size = (int64_t)step.num_heads * step.head_dim;
  T* keys = (T*)step.cache + 2 * layer * step.values_offset;
  T* values = keys + step.values_offset;
  const int num_tasks = step.num_tokens * step.num_kv_heads;
#pragma omp parallel num_threads(step.num_threads) if (step.num_threads > 1)
  {
#pragma omp for schedule(static)
    for (int token = 0; token < step.num_tokens; ++token) {
      write_token(step, qkv + token * qkv_size, token, key_norm, keys, values);
    }
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < num_tasks; ++task) {
      const int token = task / step.num_kv_heads, kv_head = task % step.num_kv_heads;
      attend_token<T, DV>(step, qkv + token * qkv_size, token, kv_head, query_norm, keys, values,
                          out + token * out_size);
    }
  }
}

// The head sizes there are code for; cpu.py lists the same.
template <class T>
void dispatch_attention(const AttentionStep& step, int layer, const T* qkv, const float* query_norm,
                        const float* key_norm, T* out) {
  switch (step.head_dim) {
    case 16: return attention<T, 1>(step, layer, qkv, query_norm, key_norm, out);
    case 32: return attention<T, 2>(step, layer, qkv, query_norm, key_norm, out);
    case 64: return attention<T, 4>(step, layer, qkv, query_norm, key_norm, out);
    case 80: return attention<T, 5>(step, layer, qkv, query_norm, key_norm, out);
    case 96: return attention<T, 6>(step, layer, qkv, query_norm, key_norm, out);
    case 128: return attention<T, 8>(step, layer, qkv, query_norm, key_norm, out);
  }
}

}  // namespace
}  // namespace tandem

#define TANDEM_KERNELS(T, SUFFIX)                                                                                   \
  extern "C" void tandem_add_rms_norm_##SUFFIX(float* residual, const T* delta, const float* weight, float eps,     \
                                               T* out, int rows, int size, int num_threads) {                       \
    tandem::add_rms_norm(residual, delta, weight, eps, out, rows, size, num_threads);                               \
  }                                                                                                                 \
  extern "C" void tandem_silu_mul_##SUFFIX(const T* gate_up, T* out, int rows, int size, int num_threads) {         \
    tandem::silu_mul(gate_up, out, rows, size, num_threads);                                                        \
  }                                                                                                                 \
  extern "C" void tandem_attention_##SUFFIX(const tandem::AttentionStep* step, int layer, const T* qkv,             \
                                            const float* query_norm, const float* key_norm, T* out) {               \
    tandem::dispatch_attention(*step, layer, qkv, query_norm, key_norm, out);                                       \
  }

TANDEM_KERNELS(float, float32)
TANDEM_KERNELS(tandem::bfloat16, bfloat16)
