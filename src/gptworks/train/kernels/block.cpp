// One block of a GPT and its gradients for training on a CPU: what `model/gpt.py` computes, a second time.
//
// All threads go through a block together: a thread has some of the tokens, or of the heads, or of the rows of a weight's
// gradient, and they wait for each other as seldom as can be: once in the backward pass where each has whole rows of the
// batch, and twice more each way where it has not. So a product is computed by one thread alone, on what it has just
// written, and nothing is handed out operator by operator: at small sizes that takes longer than the products.
#include <omp.h>

#include "attention.h"
#include "elementwise.h"
#include "head.h"
#include "product.h"
#include "share.h"
#include "update.h"

// Shapes: B rows, T tokens, D hidden, N heads, K of keys and values, H head size, F inner size, Q = (N + 2 K) H,
// R = B T. Where the block has no such tensor the pointer is null.
struct Weights {
  const float *ln1_weight, *ln1_bias, *qkv_weight, *qkv_bias, *out_weight, *out_bias;
  const float *ln2_weight, *ln2_bias, *gate_weight, *gate_bias, *up_weight, *up_bias, *down_weight, *down_bias;
};

struct WeightGradients {
  float *ln1_weight, *ln1_bias, *qkv_weight, *qkv_bias, *out_weight, *out_bias;
  float *ln2_weight, *ln2_bias, *gate_weight, *gate_bias, *up_weight, *up_bias, *down_weight, *down_bias;
};

struct Block {
  int64_t rows, tokens, hidden, heads, kv_heads, head_size, ffn;
  int64_t is_rms, activation, is_narrow;  // is_narrow: factors of products are rounded to bf16
  int64_t turns_per_row, first_per_row;  // 1: each row of the batch has its own; 0: all the same
  double eps;
  Sgemm sgemm;
  const float *cos, *sin;  // [T, H] or [B, T, H]
  const int64_t* first;    // [T] or [B, T]
  Weights weights;
  const float* x;                                                     // [R, D]
  float *normal1, *stats1, *qkv, *log_sums, *mixed, *middle;          // [R, D], [R, 2], [R, Q], [R, N], [R, N H], [R, D]
  float *normal2, *stats2, *gate, *up, *inner, *y;                    // [R, D], [R, 2], [R, F], [R, F], [R, F], [R, D]
};

struct Gradients {
  const float* y;
  float* x;
  WeightGradients weights;
  float *qkv, *mixed, *middle, *normal, *gate, *inner;  // [R, Q], [R, N H], [R, D], [R, D], [R, F], [R, F]
  float* sums;                                          // [threads, 4, D]
};

namespace {

thread_local Work attention_work;

struct Pass {  // of a thread through a block
  const Block& block;
  const Gemm gemm{block.sgemm, block.is_narrow != 0};
  const int64_t D = block.hidden, H = block.head_size, F = block.ffn, NH = block.heads * H;
  const int64_t Q = (block.heads + 2 * block.kv_heads) * H, R = block.rows * block.tokens;
  const int64_t group = block.heads / block.kv_heads;
  const Norm norm1{block.is_rms != 0, static_cast<float>(block.eps), block.weights.ln1_weight, block.weights.ln1_bias};
  const Norm norm2{block.is_rms != 0, static_cast<float>(block.eps), block.weights.ln2_weight, block.weights.ln2_bias};
  const Share tokens{R};
  // Where rows can be shared out evenly, a thread's tokens are whole rows, and it attends within what it has itself written.
  const bool has_whole_rows = block.rows % omp_get_num_threads() == 0;

  // out[r] = x[r] weight^T (+ what is there), of this thread's tokens
  void linear(const float* x, int64_t inputs, const float* weight, float* out, int64_t outputs, bool add) const {
    gemm.times_transposed({x + tokens.from * inputs, inputs}, {weight, inputs}, {out + tokens.from * outputs, outputs},
                          tokens.size(), outputs, inputs, add);
  }
  // grad_x[r] = grad[r] weight (+ what is there), of this thread's tokens
  void linear_input(const float* grad, int64_t outputs, const float* weight, float* grad_x, int64_t inputs,
                    bool add = false) const {
    gemm.times({grad + tokens.from * outputs, outputs}, {weight, inputs}, {grad_x + tokens.from * inputs, inputs},
               tokens.size(), inputs, outputs, add);
  }
  // This thread's rows of grad^T x, and of the sums of grad over all tokens.
  void linear_weight(const float* grad, int64_t outputs, const float* x, int64_t inputs, float* grad_weight,
                     float* grad_bias) const {
    const Share share(outputs, 16);
    gemm.transposed_times({grad + share.from, outputs}, {x, inputs}, {grad_weight + share.from * inputs, inputs},
                          share.size(), inputs, R);
    if (!grad_bias) return;
    std::fill(grad_bias + share.from, grad_bias + share.to, 0.0f);
    for (int64_t r = 0; r < R; r++) {
      const float* row = grad + r * outputs;
#pragma omp simd
      for (int64_t i = share.from; i < share.to; i++) grad_bias[i] += row[i];
    }
  }
  // out = (x or 0) + bias
  void begin_with(float* out, const float* x, const float* bias, int64_t size) const {
    for (int64_t r = tokens.from; r < tokens.to; r++) {
      float* row = out + r * size;
      const float* from = x ? x + r * size : nullptr;
#pragma omp simd
      for (int64_t i = 0; i < size; i++) row[i] = (from ? from[i] : 0.0f) + (bias ? bias[i] : 0.0f);
    }
  }

  void turn_all(float* qkv, float direction) const {
    if (!block.cos) return;
    for (int64_t r = tokens.from; r < tokens.to; r++) {
      const int64_t place = (block.turns_per_row ? r : r % block.tokens) * H;
      for (int64_t part = 0; part < Q / H; part++)
        if (part % (group + 2) != group + 1)  // values are not turned
          turn(qkv + r * Q + part * H, block.cos + place, block.sin + place, direction, H);
    }
  }

  Head head(int64_t row, int64_t kv, int64_t member) const {
    const int64_t start = row * block.tokens, number = kv * group + member;
    const float* own = block.qkv + start * Q + kv * (group + 2) * H;
    const int64_t* first = block.first ? block.first + (block.first_per_row ? start : 0) : nullptr;
    return {block.tokens, H, own + member * H, own + group * H, own + (group + 1) * H, Q, first,
            block.mixed + start * NH + number * H, NH, block.log_sums + start * block.heads + number, block.heads};
  }

  void attention() const {
    const Share share(block.rows * block.heads);
    for (int64_t task = share.from; task < share.to; task++) {
      const int64_t number = task % block.heads;
      attend(head(task / block.heads, number / group, number % group), attention_work);
    }
  }

  // Heads that share keys and values are one task: both of their gradients are sums over them.
  void attention_backward(const Gradients& grad) const {
    const Share share(block.rows * block.kv_heads);
    for (int64_t task = share.from; task < share.to; task++) {
      const int64_t row = task / block.kv_heads, kv = task % block.kv_heads, start = row * block.tokens;
      float* own = grad.qkv + start * Q + kv * (group + 2) * H;
      for (int64_t t = 0; t < block.tokens; t++) std::fill_n(own + t * Q + group * H, 2 * H, 0.0f);
      for (int64_t member = 0; member < group; member++) {
        const float* mixed = grad.mixed + start * NH + (kv * group + member) * H;
        attend_backward(head(row, kv, member), {mixed, own + member * H, own + group * H, own + (group + 1) * H},
                        attention_work);
      }
    }
  }

  template <int64_t kind>
  void activation() const {
    for (int64_t r = tokens.from; r < tokens.to; r++) {
      add_bias(block.up + r * F, block.weights.up_bias, F);
      activate<kind>(block.up + r * F, block.inner + r * F, F);
    }
  }

  void wait_for_parts_of_rows() const {
    if (!has_whole_rows) {
#pragma omp barrier
    }
  }

  void forward() const {
    const Weights& w = block.weights;
    for (int64_t r = tokens.from; r < tokens.to; r++)
      normalize(norm1, block.x + r * D, block.normal1 + r * D, block.stats1 + r * 2, D);
    if (w.qkv_bias) begin_with(block.qkv, nullptr, w.qkv_bias, Q);
    linear(block.normal1, D, w.qkv_weight, block.qkv, Q, w.qkv_bias != nullptr);
    turn_all(block.qkv, 1.0f);
    wait_for_parts_of_rows();
    attention();
    wait_for_parts_of_rows();
    begin_with(block.middle, block.x, w.out_bias, D);
    linear(block.mixed, NH, w.out_weight, block.middle, D, true);
    for (int64_t r = tokens.from; r < tokens.to; r++)
      normalize(norm2, block.middle + r * D, block.normal2 + r * D, block.stats2 + r * 2, D);
    linear(block.normal2, D, w.up_weight, block.up, F, false);
    if (block.activation == kSwiGLU) {
      linear(block.normal2, D, w.gate_weight, block.gate, F, false);
      for (int64_t r = tokens.from; r < tokens.to; r++) {
        add_bias(block.gate + r * F, w.gate_bias, F);
        add_bias(block.up + r * F, w.up_bias, F);
        gate_forward(block.gate + r * F, block.up + r * F, block.inner + r * F, F);
      }
    }
    if (block.activation == kTanh) activation<kTanh>();
    if (block.activation == kErf) activation<kErf>();
    if (block.activation == kSigmoid) activation<kSigmoid>();
    begin_with(block.y, block.middle, w.down_bias, D);
    linear(block.inner, F, w.down_weight, block.y, D, true);
  }

  void norm_backward(const Norm& norm, const float* x, const float* stats, const float* grad, const float* residual,
                     float* into, float* sums) const {
    for (int64_t r = tokens.from; r < tokens.to; r++)
      normalize_backward(norm, x + r * D, stats + r * 2, grad + r * D, residual + r * D, into + r * D, sums,
                         norm.bias ? sums + D : nullptr, D);
  }

  void feed_forward_backward(const Gradients& grad, float* sums) const {
    const Weights& w = block.weights;
    const int64_t from = tokens.from * F, size = tokens.size() * F;
    linear_input(grad.y, D, w.down_weight, grad.inner, F);
    if (block.activation == kTanh) activate_backward<kTanh>(block.up + from, grad.inner + from, size);
    if (block.activation == kErf) activate_backward<kErf>(block.up + from, grad.inner + from, size);
    if (block.activation == kSigmoid) activate_backward<kSigmoid>(block.up + from, grad.inner + from, size);
    if (block.activation == kSwiGLU)
      gate_backward(block.gate + from, block.up + from, grad.inner + from, grad.gate + from, size);
    linear_input(grad.inner, F, w.up_weight, grad.normal, D);
    if (block.activation == kSwiGLU) linear_input(grad.gate, F, w.gate_weight, grad.normal, D, true);
    norm_backward(norm2, block.middle, block.stats2, grad.normal, grad.y, grad.middle, sums);
  }

  void sum_norm_gradients(const Gradients& grad) const {
    float* const targets[] = {grad.weights.ln1_weight, grad.weights.ln1_bias, grad.weights.ln2_weight,
                              grad.weights.ln2_bias};
    const Share share(D);
    for (int64_t which = 0; which < 4; which++)
      for (int64_t i = share.from; targets[which] && i < share.to; i++) {
        float sum = 0.0f;
        for (int64_t thread = 0; thread < omp_get_num_threads(); thread++) sum += grad.sums[(thread * 4 + which) * D + i];
        targets[which][i] = sum;
      }
  }

  void backward(const Gradients& grad) const {
    const WeightGradients& out = grad.weights;
    float* sums = grad.sums + omp_get_thread_num() * 4 * D;
    std::fill_n(sums, 4 * D, 0.0f);
    feed_forward_backward(grad, sums + 2 * D);
    linear_input(grad.middle, D, block.weights.out_weight, grad.mixed, NH);
    wait_for_parts_of_rows();
    attention_backward(grad);
    wait_for_parts_of_rows();
    turn_all(grad.qkv, -1.0f);
    linear_input(grad.qkv, Q, block.weights.qkv_weight, grad.normal, D);
    norm_backward(norm1, block.x, block.stats1, grad.normal, grad.middle, grad.x, sums);
#pragma omp barrier
    sum_norm_gradients(grad);
    linear_weight(grad.y, D, block.inner, F, out.down_weight, out.down_bias);
    linear_weight(grad.inner, F, block.normal2, D, out.up_weight, out.up_bias);
    if (block.activation == kSwiGLU) linear_weight(grad.gate, F, block.normal2, D, out.gate_weight, out.gate_bias);
    linear_weight(grad.middle, D, block.mixed, NH, out.out_weight, out.out_bias);
    linear_weight(grad.qkv, Q, block.normal1, D, out.qkv_weight, out.qkv_bias);
  }
};

struct Product {  // c[rows, columns] = a[rows, depth] b[depth, columns]
  int64_t rows, columns, depth, is_narrow;
  Sgemm sgemm;
  const float *a, *b;
  float* c;
};

void multiply_share(const Product& product) {
  const Share rows(product.rows);
  const int64_t n = product.columns, k = product.depth;
  Gemm{product.sgemm, product.is_narrow != 0}.times({product.a + rows.from * k, k}, {product.b, n},
                                                    {product.c + rows.from * n, n}, rows.size(), n, k);
}

}  // namespace

extern "C" {

void gptworks_block_forward(const Block* block) {
#pragma omp parallel
  Pass{*block}.forward();
}

void gptworks_block_backward(const Block* block, const Gradients* gradients) {
#pragma omp parallel
  Pass{*block}.backward(*gradients);
}

void gptworks_head_loss(const HeadLoss* head) {
#pragma omp parallel
  head_loss(*head);
}

void gptworks_product(const Product* product) {
#pragma omp parallel
  multiply_share(*product);
}

// Of what is handed over, by its place in: Block, Gradients, HeadLoss, Update, Product.
int64_t gptworks_size_of(int64_t which) {
  const int64_t sizes[] = {sizeof(Block), sizeof(Gradients), sizeof(HeadLoss), sizeof(Update), sizeof(Product)};
  return sizes[which];
}

int64_t gptworks_knows_bf16() {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}

void gptworks_update(const Update* update) {
#pragma omp parallel
  update_share(*update);
}
}
