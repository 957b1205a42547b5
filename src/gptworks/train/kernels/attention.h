// softmax(QK / sqrt(H)) V of one head, some queries at a time; only keys that a query may see are read.
#pragma once
#include <limits>
#include <vector>

#include "elementwise.h"
#include "product.h"

namespace {

constexpr int64_t kQueries = 64;  // at a time: their scores stay in the cache

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

// The keys from `begin` to the last query of the block are multiplied; `begin` is the first that any of them may see.
INLINE int64_t begin_of(const Head& head, int64_t from, int64_t to) {
  int64_t begin = first_of(head, from);
  for (int64_t i = from + 1; i < to; i++) begin = std::min(begin, first_of(head, i));
  return begin;
}

INLINE void attend(const Gemm& gemm, const Head& head, std::vector<float>& work) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(head.size));
  work.resize(std::max<size_t>(work.size(), kQueries * head.tokens));
  float* scores = work.data();
  for (int64_t from = 0; from < head.tokens; from += kQueries) {
    const int64_t to = std::min(from + kQueries, head.tokens), begin = begin_of(head, from, to), keys = to - begin;
    const float *q = head.q + from * head.stride, *k = head.k + begin * head.stride, *v = head.v + begin * head.stride;
    gemm.times_transposed({q, head.stride}, {k, head.stride}, {scores, keys}, to - from, keys, head.size, scale, 0.0f);
    for (int64_t i = from; i < to; i++) {
      float* row = scores + (i - from) * keys;
      const int64_t low = first_of(head, i) - begin, high = i + 1 - begin;
      float most = -std::numeric_limits<float>::infinity(), sum = 0.0f;
#pragma omp simd reduction(max : most)
      for (int64_t j = low; j < high; j++) most = row[j] > most ? row[j] : most;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = low; j < high; j++) sum += row[j] = exponential(row[j] - most);
      const float inverse = 1.0f / sum;
#pragma omp simd
      for (int64_t j = low; j < high; j++) row[j] *= inverse;
      std::fill(row, row + low, 0.0f);
      std::fill(row + high, row + keys, 0.0f);
      head.log_sums[i * head.log_sums_stride] = most + std::log(sum);
    }
    float* mixed = head.mixed + from * head.mixed_stride;
    gemm.times({scores, keys}, {v, head.stride}, {mixed, head.mixed_stride}, to - from, head.size, keys, 1.0f, 0.0f);
  }
}

INLINE void attend_backward(const Gemm& gemm, const Head& head, const HeadGradient& grad, std::vector<float>& work) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(head.size));
  work.resize(std::max<size_t>(work.size(), 2 * kQueries * head.tokens));
  float *weights = work.data(), *changes = weights + kQueries * head.tokens;
  for (int64_t from = 0; from < head.tokens; from += kQueries) {
    const int64_t to = std::min(from + kQueries, head.tokens), begin = begin_of(head, from, to);
    const int64_t keys = to - begin, queries = to - from, stride = head.stride;
    const float *q = head.q + from * stride, *k = head.k + begin * stride, *v = head.v + begin * stride;
    const Rows mixed_grad{grad.mixed + from * head.mixed_stride, head.mixed_stride};
    gemm.times_transposed({q, stride}, {k, stride}, {weights, keys}, queries, keys, head.size, scale, 0.0f);
    gemm.times_transposed(mixed_grad, {v, stride}, {changes, keys}, queries, keys, head.size, 1.0f, 0.0f);
    for (int64_t i = from; i < to; i++) {
      float *weight = weights + (i - from) * keys, *change = changes + (i - from) * keys;
      const int64_t low = first_of(head, i) - begin, high = i + 1 - begin;
      const float *out = head.mixed + i * head.mixed_stride, *out_grad = grad.mixed + i * head.mixed_stride;
      const float log_sum = head.log_sums[i * head.log_sums_stride];
      float along = 0.0f;
#pragma omp simd reduction(+ : along)
      for (int64_t j = 0; j < head.size; j++) along += out[j] * out_grad[j];
#pragma omp simd
      for (int64_t j = low; j < high; j++) {
        weight[j] = exponential(weight[j] - log_sum);
        change[j] = weight[j] * (change[j] - along);
      }
      for (float* row : {weight, change}) {
        std::fill(row, row + low, 0.0f);
        std::fill(row + high, row + keys, 0.0f);
      }
    }
    float *k_grad = grad.k + begin * stride, *v_grad = grad.v + begin * stride;
    gemm.transposed_times({weights, keys}, mixed_grad, {v_grad, stride}, keys, head.size, queries, 1.0f, 1.0f);
    gemm.transposed_times({changes, keys}, {q, stride}, {k_grad, stride}, keys, head.size, queries, scale, 1.0f);
    gemm.times({changes, keys}, {k, stride}, {grad.q + from * stride, stride}, queries, head.size, keys, scale, 0.0f);
  }
}

}  // namespace
