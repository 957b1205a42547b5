// One step of generation on a CPU: the next token of a few rows through the whole model, in one call.
//
// With few rows the time is that of reading the weights from memory. Every weight is read once, by one of the threads,
// and widened to fp32 in a register; between the products nothing is allocated and nobody else is called. A plain C
// interface without headers of others, so that building takes a second.
// Letters of shapes: B rows, D hidden, F inside the feed-forward layer, N heads, H head size, S tokens the cache can
// hold, V vocabulary.
#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

extern "C" {

struct Matrix {         // y = x values^T * scale + bias
  const void* values;   // [outputs, depth]: float, the upper halves of floats (bf16), or int8
  const float* scale;   // [outputs] or null
  const float* bias;    // [outputs] or null
  int64_t outputs, depth, width;  // width: bytes of a value
};

struct Layer {
  const float *ln1_weight, *ln1_bias, *ln2_weight, *ln2_bias;
  Matrix qkv, out, up, down;  // rows of qkv: (head, q|k|v, head size)
};

struct Model {
  const Layer* layers;
  Matrix embedding, head;
  const float *positions, *ln_f_weight, *ln_f_bias;
  int64_t num_layers, hidden, num_heads, head_size, ffn, gelu;  // gelu: 0 tanh, 1 erf, 2 sigmoid
  float eps;
};

struct Step {
  const int64_t *tokens, *lengths;  // [B]: what is read, and how much each row has read before
  float *keys, *values;             // [layers, B, N, S, H]
  float* logits;                    // [B, V]
  float* work;                      // B * (6 D + F + N S)
  int64_t rows, cache_len, threads;
};
}

namespace {

constexpr int kLanes = 8;
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Bytes = int8_t __attribute__((vector_size(kLanes)));
using Words = uint16_t __attribute__((vector_size(2 * kLanes)));
using Bits = uint32_t __attribute__((vector_size(4 * kLanes)));

template <typename Vector, typename T>
inline Vector load(const T* from) {
  Vector found;
  std::memcpy(&found, from, sizeof(found));
  return found;
}

inline Floats widen(const float* from) { return load<Floats>(from); }
inline Floats widen(const int8_t* from) {
#ifdef __AVX2__  // said outright: GCC 12 takes the eight numbers apart
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return __builtin_convertvector(load<Bytes>(from), Floats);
#endif
}
inline Floats widen(const uint16_t* from) {
  return (Floats)(__builtin_convertvector(load<Words>(from), Bits) << 16);
}

inline float widen_one(float value) { return value; }
inline float widen_one(int8_t value) { return value; }
inline float widen_one(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof(found));
  return found;
}

inline float sum(Floats v) {
  float total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += v[lane];
  return total;
}

inline float dot(const float* a, const float* b, int64_t n) {
  Floats sums = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sums += load<Floats>(a + i) * load<Floats>(b + i);
  float total = sum(sums);
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

float gelu(float x, int64_t kind) {
  if (kind == 1) return 0.5f * x * (1.0f + std::erf(x * 0.70710678f));
  // 0.5 (1 + tanh(u)) is the logistic function of 2u
  const float u = kind == 0 ? 1.5957691f * (x + 0.044715f * x * x * x) : 1.702f * x;
  return x / (1.0f + std::exp(-u));
}

// What becomes of a product: written over what is there, or added to it, or through GELU.
enum class Then { kStore, kAdd, kGelu };

struct Product {
  const Matrix& matrix;
  const float* x;
  float* y;
  Then then;
  int64_t gelu;

  void finish(int64_t row, int64_t n, float total) const {
    if (matrix.scale) total *= matrix.scale[n];
    if (matrix.bias) total += matrix.bias[n];
    float& to = y[row * matrix.outputs + n];
    if (then == Then::kAdd) to += total;
    else to = then == Then::kGelu ? ::gelu(total, gelu) : total;
  }
};

// R rows x N outputs, U steps at a time: enough sums in registers that no addition waits for the one before it.
template <int R, int N, int U, typename W>
inline void block(const Product& product, int64_t row, int64_t n) {
  const int64_t depth = product.matrix.depth;
  const W* w[N];
  const float* x[R];
  for (int j = 0; j < N; ++j) w[j] = static_cast<const W*>(product.matrix.values) + (n + j) * depth;
  for (int r = 0; r < R; ++r) x[r] = product.x + (row + r) * depth;
  Floats sums[U][R][N] = {};
  int64_t k = 0;
  for (; k + U * kLanes <= depth; k += U * kLanes)
    for (int u = 0; u < U; ++u) {
      Floats wide[N];
      for (int j = 0; j < N; ++j) wide[j] = widen(w[j] + k + u * kLanes);
      for (int r = 0; r < R; ++r) {
        const Floats value = load<Floats>(x[r] + k + u * kLanes);
        for (int j = 0; j < N; ++j) sums[u][r][j] += value * wide[j];
      }
    }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < N; ++j) {
      Floats folded = sums[0][r][j];
      for (int u = 1; u < U; ++u) folded += sums[u][r][j];
      float total = sum(folded);
      for (int64_t rest = k; rest < depth; ++rest) total += x[r][rest] * widen_one(w[j][rest]);
      product.finish(row + r, n + j, total);
    }
}

// The shapes of blocks were found by trying: fp32 is read in four streams, narrow types are best read in one.
template <int N, typename W>
inline void outputs(const Product& product, int64_t rows, int64_t n) {
  constexpr bool kWide = sizeof(W) == 4;
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) {
    if constexpr (N == 4 && !kWide) {
      block<4, 2, 1, W>(product, row, n);
      block<4, 2, 1, W>(product, row, n + 2);
    } else {
      block<4, N, 1, W>(product, row, n);
    }
  }
  for (; row < rows; ++row) {
    if constexpr (kWide) {
      block<1, N, 1, W>(product, row, n);
    } else {
      for (int j = 0; j < N; ++j) block<1, 1, 4, W>(product, row, n + j);
    }
  }
}

template <typename W>
void multiply(const Product& product, int64_t rows) {
  constexpr int N = 4;
  const int64_t groups = product.matrix.outputs / N;
#pragma omp for schedule(static)
  for (int64_t group = 0; group <= groups; ++group) {
    if (group < groups) outputs<N, W>(product, rows, group * N);
    else
      for (int64_t n = groups * N; n < product.matrix.outputs; ++n) outputs<1, W>(product, rows, n);
  }
}

void linear(const Matrix& matrix, const float* x, float* y, int64_t rows, Then then = Then::kStore, int64_t gelu = 0) {
  const Product product{matrix, x, y, then, gelu};
  if (matrix.width == 1) multiply<int8_t>(product, rows);
  else if (matrix.width == 2) multiply<uint16_t>(product, rows);
  else multiply<float>(product, rows);
}

void layer_norm(const float* x, const float* weight, const float* bias, float* y, int64_t rows, int64_t size,
                float eps) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = x + row * size;
    double mean = 0, square = 0;
    for (int64_t i = 0; i < size; ++i) mean += from[i];
    mean /= size;
    for (int64_t i = 0; i < size; ++i) square += (from[i] - mean) * (from[i] - mean);
    const float shift = static_cast<float>(mean), scale = static_cast<float>(1 / std::sqrt(square / size + eps));
    for (int64_t i = 0; i < size; ++i) y[row * size + i] = (from[i] - shift) * scale * weight[i] + bias[i];
  }
}

// Of one row and head: the new key and value join the cache, and the row looks at all it has read.
void attend(const float* qkv, float* keys, float* values, float* scores, float* mixed, int64_t length, int64_t size) {
  const float *q = qkv, *k = qkv + size, *v = qkv + 2 * size;
  std::memcpy(keys + length * size, k, size * sizeof(float));
  std::memcpy(values + length * size, v, size * sizeof(float));
  const float scale = 1 / std::sqrt(static_cast<float>(size));
  float highest = -INFINITY;
  for (int64_t s = 0; s <= length; ++s) {
    scores[s] = dot(q, keys + s * size, size) * scale;
    highest = std::fmax(highest, scores[s]);
  }
  float total = 0;
  for (int64_t s = 0; s <= length; ++s) total += scores[s] = std::exp(scores[s] - highest);
  std::memset(mixed, 0, size * sizeof(float));
  for (int64_t s = 0; s <= length; ++s) {
    const float weight = scores[s] / total;
    const float* value = values + s * size;
    for (int64_t i = 0; i < size; ++i) mixed[i] += weight * value[i];
  }
}

template <typename W>
void embed_row(const Matrix& table, int64_t token, const float* position, float* x) {
  const W* row = static_cast<const W*>(table.values) + token * table.depth;
  const float scale = table.scale ? table.scale[token] : 1.0f;
  for (int64_t i = 0; i < table.depth; ++i) x[i] = widen_one(row[i]) * scale + position[i];
}

void embed(const Model& model, const Step& step, float* x) {
  const Matrix& table = model.embedding;
#pragma omp for schedule(static)
  for (int64_t row = 0; row < step.rows; ++row) {
    const int64_t token = step.tokens[row];
    const float* position = model.positions + step.lengths[row] * model.hidden;
    float* to = x + row * model.hidden;
    if (table.width == 1) embed_row<int8_t>(table, token, position, to);
    else if (table.width == 2) embed_row<uint16_t>(table, token, position, to);
    else embed_row<float>(table, token, position, to);
  }
}

}  // namespace

extern "C" void gptworks_decode(const Model* of, const Step* at) {
  const Model& model = *of;
  const Step& step = *at;
  const int64_t rows = step.rows, hidden = model.hidden, size = model.head_size;
  float* x = step.work;                      // [B, D]
  float* normed = x + rows * hidden;         // [B, D]
  float* qkv = normed + rows * hidden;       // [B, N, 3, H]
  float* mixed = qkv + 3 * rows * hidden;    // [B, D]
  float* inner = mixed + rows * hidden;      // [B, F]
  float* scores = inner + rows * model.ffn;  // [B, N, S]
#pragma omp parallel num_threads(step.threads)
  {
    embed(model, step, x);
    for (int64_t number = 0; number < model.num_layers; ++number) {
      const Layer& layer = model.layers[number];
      layer_norm(x, layer.ln1_weight, layer.ln1_bias, normed, rows, hidden, model.eps);
      linear(layer.qkv, normed, qkv, rows);
#pragma omp for schedule(static)
      for (int64_t place = 0; place < rows * model.num_heads; ++place) {  // of row and head
        const int64_t cached = (number * rows * model.num_heads + place) * step.cache_len * size;
        attend(qkv + place * 3 * size, step.keys + cached, step.values + cached, scores + place * step.cache_len,
               mixed + place * size, step.lengths[place / model.num_heads], size);
      }
      linear(layer.out, mixed, x, rows, Then::kAdd);
      layer_norm(x, layer.ln2_weight, layer.ln2_bias, normed, rows, hidden, model.eps);
      linear(layer.up, normed, inner, rows, Then::kGelu, model.gelu);
      linear(layer.down, inner, x, rows, Then::kAdd);
    }
    layer_norm(x, model.ln_f_weight, model.ln_f_bias, normed, rows, hidden, model.eps);
    linear(model.head, normed, step.logits, rows);
  }
}
