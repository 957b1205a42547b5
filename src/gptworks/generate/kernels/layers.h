// What is between the products: embedding, norms, activations, rotary positions and attention. All is of one token, whatever its neighbours.
#pragma once
#include "integers.h"

namespace {

float number_of(const Matrix& matrix, int64_t n, int64_t k) {
  const int64_t at = n * matrix.depth + k;
  if (matrix.type == kFp32) return static_cast<const float*>(matrix.values)[at];
  if (matrix.type == kBf16) return widen_one(static_cast<const uint16_t*>(matrix.values)[at]);
  if (matrix.type == kInt8)
    return static_cast<const int8_t*>(matrix.values)[at] * static_cast<const float*>(matrix.scale)[n];
  const int64_t group = n * ((matrix.depth + kGroup - 1) / kGroup) + k / kGroup, place = k % kGroup;
  const uint8_t byte = static_cast<const uint8_t*>(matrix.values)[group * (kGroup / 2) + place % 16];
  const int bits = place < 16 ? byte & 15 : byte >> 4;
  return static_cast<float>(bits - 8) * widen_one(static_cast<const uint16_t*>(matrix.scale)[group]);
}

void embed(const Model& model, const Batch& batch, float* x) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < batch.num_tokens; ++i) {
    float* to = x + i * model.hidden;
    for (int64_t d = 0; d < model.hidden; ++d) to[d] = number_of(model.embedding, batch.tokens[i], d);
    if (!model.positions) continue;
    const float* position = model.positions + batch.positions[i] * model.hidden;
    for (int64_t d = 0; d < model.hidden; ++d) to[d] += position[d];
  }
}

INLINE float sum_of(const float* x, int64_t size, float shift, bool is_squared) {
  Floats sums[kPieces] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    for (int piece = 0; piece < kPieces; ++piece) {
      const Floats value = load(x + i + piece * kWidth) - shift;
      sums[piece] = is_squared ? fused(value, value, sums[piece]) : sums[piece] + value;
    }
  float total = fold(sums);
  for (; i < size; ++i) total += is_squared ? (x[i] - shift) * (x[i] - shift) : x[i] - shift;
  return total;
}

// x may be y. RMSNorm is a LayerNorm that shifts nothing.
void normalize(const float* x, const Norm& norm, float* y, int64_t size, float eps, bool is_rms) {
  const float mean = is_rms ? 0.0f : sum_of(x, size, 0, false) / size;
  const float scale = 1 / std::sqrt(sum_of(x, size, mean, true) / size + eps);
  for (int64_t i = 0; i < size; ++i) y[i] = (x[i] - mean) * scale * norm.weight[i];
  if (norm.bias)
    for (int64_t i = 0; i < size; ++i) y[i] += norm.bias[i];
}

// Few tokens: every thread for itself, each into its own memory.
void normalize_all(const Model& model, const float* x, const Norm& norm, float* y, int64_t tokens) {
  const auto one = [&](int64_t token) {
    normalize(x + token * model.hidden, norm, y + token * model.hidden, model.hidden, model.eps, model.is_rms);
  };
  if (tokens <= kFew) {
    for (int64_t token = 0; token < tokens; ++token) one(token);
    return;
  }
#pragma omp for schedule(static)
  for (int64_t token = 0; token < tokens; ++token) one(token);
}

// Number i of a head and number i + H/2 are turned by the angle of the token's position.
void turn(float* head, const float* cosines, int64_t size) {
  const float* sines = cosines + size / 2;
  for (int64_t i = 0; i < size / 2; ++i) {
    const float first = head[i], second = head[i + size / 2];
    head[i] = first * cosines[i] - second * sines[i];
    head[i + size / 2] = second * cosines[i] + first * sines[i];
  }
}

INLINE Floats gelu(Floats x, int64_t kind) {
  // 0.5 (1 + tanh(u)) is the logistic function of 2u
  const Floats u = kind == 0 ? 1.5957691f * (x + 0.044715f * x * x * x) : 1.702f * x;
  return x / (1.0f + exponential(-u));
}

INLINE Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

INLINE Floats activated(Floats x, Floats gate, bool is_gated, int64_t kind) {
  return is_gated ? silu(gate) * x : gelu(x, kind);
}

// x = gelu(x), or where there are gates x = silu(gates) x. The last numbers, fewer than a register, are padded.
void activate(float* x, const float* gates, int64_t count, int64_t kind) {
  if (!gates && kind == 1) {
    for (int64_t i = 0; i < count; ++i) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
    return;
  }
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth)
    store(x + i, activated(load(x + i), gates ? load(gates + i) : Floats{}, gates, kind));
  if (i == count) return;
  float some[kWidth] = {}, gate[kWidth] = {};
  std::memcpy(some, x + i, (count - i) * sizeof(float));
  if (gates) std::memcpy(gate, gates + i, (count - i) * sizeof(float));
  store(some, activated(load(some), load(gate), gates, kind));
  std::memcpy(x + i, some, (count - i) * sizeof(float));
}

// [tokens, size]. Few tokens: each thread what it has itself multiplied.
void activate_all(float* x, const float* gates, int64_t tokens, int64_t size, int64_t kind) {
  if (tokens <= kFew) {
    const Range mine = outputs_of_thread(size, tokens);
    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t at = token * size + mine.first;
      activate(x + at, gates ? gates + at : nullptr, mine.end - mine.first, kind);
    }
    return;
  }
#pragma omp for schedule(static)
  for (int64_t token = 0; token < tokens; ++token)
    activate(x + token * size, gates ? gates + token * size : nullptr, size, kind);
}

// Scores of positions first to last become weights, still to be divided by their sum, which is returned. A position is
// always in the same of sixteen partial sums; what pads the first and last sixteen becomes zero.
float exponentials(float* scores, int64_t first, int64_t last) {
  const int64_t begin = first / kLanes * kLanes, end = (last / kLanes + 1) * kLanes;
  for (int64_t s = begin; s < first; ++s) scores[s] = scores[first];
  for (int64_t s = last + 1; s < end; ++s) scores[s] = scores[first];
  Floats highest = load(scores + begin);
  for (int64_t s = begin; s < end; s += kWidth) highest = larger(highest, load(scores + s));
  float top = highest[0];
  for (int i = 1; i < kWidth; ++i) top = std::max(top, highest[i]);
  for (int64_t s = begin; s < end; s += kWidth) store(scores + s, exponential(load(scores + s) - top));
  for (int64_t s = begin; s < first; ++s) scores[s] = 0;
  for (int64_t s = last + 1; s < end; ++s) scores[s] = 0;
  Floats sums[kPieces] = {};
  for (int64_t s = begin; s < end; s += kLanes)
    for (int piece = 0; piece < kPieces; ++piece) sums[piece] += load(scores + s + piece * kWidth);
  return fold(sums);
}

// One head of T consecutive tokens of a slot, the last of them at position `last`; the first looks back to `first`.
struct Look {
  const float* q;  // of the first token; those of the next are q_stride further
  int64_t q_stride;
  const float *keys, *values;  // [S, H]
  float* scores;               // [T, stride]
  int64_t stride;
  float* mixed;
  int64_t mixed_stride, first, last, size, window;
};

// C registers of the weighted sum of the values: it runs over the positions in their order.
template <int T, int C>
INLINE void mix(const Look& look, int64_t h, const float* totals) {
  Floats sums[T][C] = {};
  for (int64_t s = look.first; s <= look.last; ++s) {
    Floats value[C];
    for (int c = 0; c < C; ++c) value[c] = load(look.values + s * look.size + h + c * kWidth);
    for (int t = 0; t < T; ++t)
      for (int c = 0; c < C; ++c) sums[t][c] = fused(all(look.scores[t * look.stride + s]), value[c], sums[t][c]);
  }
  for (int t = 0; t < T; ++t)
    for (int c = 0; c < C; ++c) store(look.mixed + t * look.mixed_stride + h + c * kWidth, sums[t][c] / totals[t]);
}

template <int T>
INLINE void score(const Look& look) {
  const PlainRows<float> keys{look.keys, look.size};
  const float scale = 1 / std::sqrt(static_cast<float>(look.size));
  const auto some = [&](auto R, int64_t s) {
    float found[T][R];
    tile(look.q, look.q_stride, keys.from(s, 0), look.size, found);
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < R; ++r) look.scores[t * look.stride + s + r] = found[t][r] * scale;
  };
  int64_t s = look.first;
  for (; s + kOutputs <= look.last + 1; s += kOutputs) some(Constant<kOutputs>{}, s);
  for (; s <= look.last; ++s) some(Constant<1>{}, s);
}

template <int T>
void attend(const Look& look) {
  score<T>(look);
  float totals[T];
  for (int t = 0; t < T; ++t) {
    float* scores = look.scores + t * look.stride;
    const int64_t own = look.last - (T - 1 - t), first = look.window ? std::max(own - look.window + 1, look.first) : 0;
    totals[t] = exponentials(scores, first, own);
    for (int64_t s = look.first; s < first; ++s) scores[s] = 0;  // what is beyond its window or after it is not seen
    for (int64_t s = own + 1; s <= look.last; ++s) scores[s] = 0;
  }
  constexpr int C = 4;
  int64_t h = 0;
  for (; h + C * kWidth <= look.size; h += C * kWidth) mix<T, C>(look, h, totals);
  for (; h + kWidth <= look.size; h += kWidth) mix<T, 1>(look, h, totals);
  for (int t = 0; t < T; ++t)
    for (int64_t rest = h; rest < look.size; ++rest) {
      float total = 0;
      for (int64_t s = look.first; s <= look.last; ++s)
        total = fused(look.scores[t * look.stride + s], look.values[s * look.size + rest], total);
      look.mixed[t * look.mixed_stride + rest] = total / totals[t];
    }
}

}  // namespace
