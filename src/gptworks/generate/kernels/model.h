// What Python hands over: plain C, the same fields in the same order as in fast_decode.py.
//
// Letters of shapes: N tokens of a batch, M of them whose logits are wanted, D hidden, F inside the feed-forward layer,
// H head size, S tokens that a slot of the cache can hold, V vocabulary.
#pragma once
#include <cstdint>

extern "C" {

enum Type : int64_t { kFp32, kBf16, kInt8, kInt4 };

struct Matrix {        // y = x values^T + bias
  const void* values;  // [outputs, depth]; int4: two values in a byte, groups of 32 along the depth
  const void* scale;   // int8: float [outputs]; int4: bf16 [outputs, groups]; else null
  const float* bias;   // [outputs] or null
  int64_t outputs, depth, type;
};

struct Norm {
  const float *weight, *bias;  // null: not there
};

struct Layer {
  Norm ln1, ln2, q_norm, k_norm;
  Matrix qkv, out, gate, up, down;  // rows of qkv: (head of keys and values, [queries of its heads|k|v], head size)
};

struct Model {
  const Layer* layers;
  Matrix embedding, head;
  const float* positions;  // [positions, D] that are added, or null
  const float* turns;      // [positions, H]: cosines, then sines, by which pairs of a head are turned; or null
  Norm ln_f;
  int64_t num_layers, hidden, num_heads, num_kv_heads, head_size, ffn, max_positions;
  int64_t is_rms, window, gelu;  // window: tokens that a token sees, 0 = all; gelu: 0 tanh, 1 erf, 2 sigmoid
  int64_t is_apart;              // rows that are multiplied together are not neighbours; changes no number
  float eps;
};

struct Batch {
  const int64_t *tokens, *slots, *positions;  // [N]
  const int64_t* wanted;                      // [M]: places in the batch
  float *keys, *values;                       // [layers, slots, heads of keys and values, S, H]
  float* logits;                              // [M, V]
  void* work;                                 // gptworks_work_size bytes
  int64_t num_tokens, num_wanted, num_slots, cache_len, threads;
};
}
