// The losses of tokens and their gradients: head and cross-entropy in one, some tokens at a time, as `model/loss.py`
// has it. Logits become exponentials where they are; what they are divided by goes to the tokens instead, of which there
// are fewer numbers.
#pragma once
#include <omp.h>

#include <limits>

#include "elementwise.h"
#include "product.h"
#include "share.h"

// Shapes: R tokens, D hidden, W words, C tokens at a time.
struct HeadLoss {
  int64_t tokens, hidden, words, chunk, unscored, is_narrow;  // unscored: the label of a token that is not scored
  Sgemm sgemm;
  const float *x, *weight;  // [R, D], [W, D]
  const int64_t* labels;    // [R]
  float* losses;            // [R]
  float *grad_x, *grad_weight;        // [R, D], [W, D]; null where not wanted
  float *logits, *scaled, *inverses;  // [C, W], [C, D], [C]
};

namespace {

struct LossPass {  // of a thread through the tokens from..from + count
  const HeadLoss& head;
  const int64_t from, count;
  const Gemm gemm{head.sgemm, head.is_narrow != 0};
  const int64_t D = head.hidden, W = head.words;
  const Share rows{count}, words{W, kPanel};

  void logits() const {
    gemm.times_transposed({head.x + from * D, D}, {head.weight + words.from * D, D}, {head.logits + words.from, W}, count,
                          words.size(), D);
  }

  // The loss of a row; its logits become exp(logit - the highest), whose sum is 1 / `inverse`, 0 where it is not scored.
  float loss(float* row, int64_t label, float& inverse) const {
    float most = -std::numeric_limits<float>::infinity(), sum = 0.0f;
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < W; i++) most = row[i] > most ? row[i] : most;
    const bool is_scored = label != head.unscored;
    const float target = is_scored ? row[label] : 0.0f;
    // Sums of pieces: one of fifty thousand numbers would round each to a hundred thousandth.
    for (int64_t begin = 0; begin < W; begin += 1024) {
      const int64_t end = std::min(W, begin + 1024);
      float part = 0.0f;
#pragma omp simd reduction(+ : part)
      for (int64_t i = begin; i < end; i++) {
        row[i] = exponential(row[i] - most);
        part += row[i];
      }
      sum += part;
    }
    inverse = is_scored ? 1.0f / sum : 0.0f;
    return is_scored ? std::log(sum) - (target - most) : 0.0f;
  }

  void softmax() const {
    for (int64_t r = rows.from; r < rows.to; r++) {
      const float* x = head.x + (from + r) * D;
      float& inverse = head.inverses[r];
      head.losses[from + r] = loss(head.logits + r * W, head.labels[from + r], inverse);
      float* scaled = head.scaled + r * D;
#pragma omp simd
      for (int64_t i = 0; i < D; i++) scaled[i] = x[i] * inverse;
    }
  }

  void input_gradient() const {
    float* grad = head.grad_x + from * D;
    gemm.times({head.logits + rows.from * W, W}, {head.weight, D}, {grad + rows.from * D, D}, rows.size(), D, W);
    for (int64_t r = rows.from; r < rows.to; r++) {
      const int64_t label = head.labels[from + r];
      const float* target = head.weight + std::max<int64_t>(label, 0) * D;
      const float inverse = head.inverses[r], one = label == head.unscored ? 0.0f : 1.0f;
#pragma omp simd
      for (int64_t i = 0; i < D; i++) grad[r * D + i] = grad[r * D + i] * inverse - one * target[i];
    }
  }

  void weight_gradient() const {
    gemm.transposed_times({head.logits + words.from, W}, {head.scaled, D}, {head.grad_weight + words.from * D, D},
                          words.size(), D, count, from > 0);
    for (int64_t r = 0; r < count; r++) {
      const int64_t label = head.labels[from + r];
      if (label < words.from || label >= words.to) continue;
      float* grad = head.grad_weight + label * D;
      const float* x = head.x + (from + r) * D;
#pragma omp simd
      for (int64_t i = 0; i < D; i++) grad[i] -= x[i];
    }
  }
};

inline void head_loss(const HeadLoss& head) {
  for (int64_t from = 0; from < head.tokens; from += head.chunk) {
    const LossPass pass{head, from, std::min(head.chunk, head.tokens - from)};
    pass.logits();
#pragma omp barrier
    pass.softmax();
#pragma omp barrier
    if (head.grad_x) pass.input_gradient();
    if (head.grad_weight) pass.weight_gradient();
#pragma omp barrier
  }
}

}  // namespace
