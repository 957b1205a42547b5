// softmax(QK / sqrt(H)) V of one head, some queries at a time; only keys that a query may see are read.
#pragma once
#include <limits>

#include "elementwise.h"
#include "tiles.h"

namespace {

// At a time. What they may not see of each other is multiplied in vain, which is much of a short row; of a long one the
// gradients of keys and values would be read and written too often.
inline int64_t queries_of(int64_t tokens) { return tokens <= 128 ? 16 : 64; }

// Of one head of one row of the batch. Strides are those from one token to the next.
struct Head {
  int64_t tokens, size;
  const float *q, *k, *v;
  int64_t stride;        // of q, k, v
  const int64_t* first;  // of each token the first that it may see; null: token 0
  float* mixed;
  int64_t mixed_stride;
  float* log_sums;  // of each token the logarithm of the sum of its exponentials
  int64_t log_sums_stride;
};

struct HeadGradient {
  const float* mixed;  // stride as in Head
  float *q, *k, *v;    // k and v are added to
};

INLINE int64_t first_of(const Head& head, int64_t token) { return head.first ? head.first[token] : 0; }

// Queries from..to and the keys they are multiplied with: begin..to, of which `low` to `high` may be seen by one.
struct Queries {
  int64_t from, to, begin, keys, wide, stride;  // stride: from one row to the next, no power of two
  Queries(const Head& head, int64_t from) : from(from), to(std::min(from + queries_of(head.tokens), head.tokens)) {
    begin = first_of(head, from);
    for (int64_t i = from + 1; i < to; i++) begin = std::min(begin, first_of(head, i));
    begin = begin / kLanes * kLanes;
    keys = to - begin;
    wide = padded(keys);
    stride = wide + kLanes;
  }
  int64_t count() const { return to - from; }
  int64_t low(const Head& head, int64_t query) const { return first_of(head, query) - begin; }
  int64_t high(int64_t query) const { return query + 1 - begin; }
};

INLINE float* cut(float*& memory, int64_t size) {
  float* found = memory;
  memory += padded(size);
  return found;
}

// A row is gone through by whole vectors: what is left over by a vector would cost as much as many of them. `task` gets
// the place of a vector and, as numbers within it, the first that is seen and the first behind them.
template <typename Task>
INLINE void by_vectors(int64_t low, int64_t high, int64_t wide, const Task& task) {
  for (int64_t at = 0; at < wide; at += kLanes)
    task(at, static_cast<int32_t>(low - at), static_cast<int32_t>(high - at));
}

// Of the numbers low..high of a row; others become 0. Returns the logarithm of the sum of exponentials.
INLINE float softmax(float* row, int64_t low, int64_t high, int64_t wide) {
  const float none = -std::numeric_limits<float>::infinity();
  float highest[kLanes], total[kLanes] = {};
  std::fill_n(highest, kLanes, none);
  by_vectors(low, high, wide, [&](int64_t at, int32_t from, int32_t to) {
#pragma omp simd
    for (int32_t i = 0; i < kLanes; i++) {
      const float x = i >= from && i < to ? row[at + i] : none;
      highest[i] = x > highest[i] ? x : highest[i];
    }
  });
  float most = none, sum = 0.0f;
#pragma omp simd reduction(max : most)
  for (int32_t i = 0; i < kLanes; i++) most = highest[i] > most ? highest[i] : most;
  by_vectors(low, high, wide, [&](int64_t at, int32_t from, int32_t to) {
#pragma omp simd
    for (int32_t i = 0; i < kLanes; i++) {
      const float power = exponential(row[at + i] - most);
      row[at + i] = i >= from && i < to ? power : 0.0f;
      total[i] += row[at + i];
    }
  });
#pragma omp simd reduction(+ : sum)
  for (int32_t i = 0; i < kLanes; i++) sum += total[i];
  const float inverse = 1.0f / sum;
  by_vectors(low, high, wide, [&](int64_t at, int32_t, int32_t) {
#pragma omp simd
    for (int32_t i = 0; i < kLanes; i++) row[at + i] *= inverse;
  });
  return most + std::log(sum);
}

INLINE void attend(const Head& head, Work& work) {
  const int64_t T = head.tokens, H = head.size, HP = padded(H), most = queries_of(T);
  const float scale = 1.0f / std::sqrt(static_cast<float>(H));
  float* memory = work.of(panels_size(T, H) + T * HP + most * (padded(T) + kLanes));
  float *k = cut(memory, panels_size(T, H)), *v = cut(memory, T * HP), *scores = memory;
  pack_transposed(head.k, head.stride, T, H, k);
  pack(head.v, head.stride, T, H, v);
  for (int64_t from = 0; from < T; from += most) {
    const Queries part(head, from);
    const Left q{head.q + from * head.stride, head.stride, 1};
    multiply_panels(q, part.count(), k, H, part.begin, part.begin + part.wide, scale, scores, part.stride);
    for (int64_t i = from; i < part.to; i++) {
      float* row = scores + (i - from) * part.stride;
      const float log_sum = softmax(row, part.low(head, i), part.high(i), part.wide);
      head.log_sums[i * head.log_sums_stride] = log_sum;
    }
    multiply({scores, part.stride, 1}, part.count(), v + part.begin * HP, HP, part.keys, 1.0f, false,
             head.mixed + from * head.mixed_stride, head.mixed_stride, H);
  }
}

INLINE void attend_backward(const Head& head, const HeadGradient& grad, Work& work) {
  const int64_t T = head.tokens, H = head.size, HP = padded(H), stride = head.stride, panels = panels_size(T, H);
  const int64_t most = queries_of(T), scores = most * (padded(T) + kLanes);
  const float scale = 1.0f / std::sqrt(static_cast<float>(H));
  float* memory = work.of(2 * panels + (T + 2 * most) * HP + 2 * scores);
  float *k_panels = cut(memory, panels), *v_panels = cut(memory, panels), *k = cut(memory, T * HP);
  float *q = cut(memory, most * HP), *mixed_grad = cut(memory, most * HP);
  float *weights = cut(memory, scores), *changes = memory;
  pack_transposed(head.k, stride, T, H, k_panels);
  pack_transposed(head.v, stride, T, H, v_panels);
  pack(head.k, stride, T, H, k);
  for (int64_t from = 0; from < T; from += most) {
    const Queries part(head, from);
    const int64_t count = part.count(), wide = part.wide, row = part.stride, begin = part.begin;
    pack(head.q + from * stride, stride, count, H, q);
    pack(grad.mixed + from * head.mixed_stride, head.mixed_stride, count, H, mixed_grad);
    multiply_panels({q, HP, 1}, count, k_panels, H, begin, begin + wide, scale, weights, row);
    multiply_panels({mixed_grad, HP, 1}, count, v_panels, H, begin, begin + wide, 1.0f, changes, row);
    for (int64_t i = from; i < part.to; i++) {
      float *weight = weights + (i - from) * row, *change = changes + (i - from) * row;
      const int64_t low = part.low(head, i), high = part.high(i);
      const float *out = head.mixed + i * head.mixed_stride, *out_grad = mixed_grad + (i - from) * HP;
      const float log_sum = head.log_sums[i * head.log_sums_stride];
      float along = 0.0f;
#pragma omp simd reduction(+ : along)
      for (int64_t j = 0; j < H; j++) along += out[j] * out_grad[j];
      by_vectors(low, high, wide, [&](int64_t at, int32_t seen_from, int32_t seen_to) {
#pragma omp simd
        for (int32_t j = 0; j < kLanes; j++) {
          const bool is_seen = j >= seen_from && j < seen_to;
          const float share = exponential(weight[at + j] - log_sum);
          weight[at + j] = is_seen ? share : 0.0f;
          change[at + j] = is_seen ? share * (change[at + j] - along) * scale : 0.0f;
        }
      });
    }
    multiply({weights, 1, row}, part.keys, mixed_grad, HP, count, 1.0f, true, grad.v + begin * stride, stride, H);
    multiply({changes, 1, row}, part.keys, q, HP, count, 1.0f, true, grad.k + begin * stride, stride, H);
    multiply({changes, row, 1}, count, k + begin * HP, HP, part.keys, 1.0f, false, grad.q + from * stride, stride, H);
  }
}

}  // namespace
