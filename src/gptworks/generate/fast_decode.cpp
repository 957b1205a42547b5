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
#include <type_traits>
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
  float* work;                      // B (6 D + F + N S), and max(D, F) for each of B rounded up to eights
  int64_t rows, cache_len, threads;
};
}

namespace {

constexpr int kLanes = 8;
constexpr int64_t kRowByRow = 2;  // up to so many rows are faster one after the other
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
  using Half = float __attribute__((vector_size(2 * kLanes)));
  Half halves[2];
  std::memcpy(halves, &v, sizeof(v));
  const Half added = halves[0] + halves[1];
  return (added[0] + added[1]) + (added[2] + added[3]);
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

// One row, N outputs, U steps at a time: enough sums in registers that no addition waits for the one before it.
template <int N, int U, typename W>
inline void row_block(const Product& product, int64_t row, int64_t n) {
  const int64_t depth = product.matrix.depth;
  const float* x = product.x + row * depth;
  const W* w[N];
  for (int j = 0; j < N; ++j) w[j] = static_cast<const W*>(product.matrix.values) + (n + j) * depth;
  Floats sums[U][N] = {};
  int64_t k = 0;
  for (; k + U * kLanes <= depth; k += U * kLanes) {
    // Bytes are used up faster than the processor fetches by itself; a page ahead is far enough.
    if (sizeof(W) == 1) __builtin_prefetch(reinterpret_cast<const char*>(w[0] + k) + 4096);
    for (int u = 0; u < U; ++u) {
      const Floats value = load<Floats>(x + k + u * kLanes);
      for (int j = 0; j < N; ++j) sums[u][j] += value * widen(w[j] + k + u * kLanes);
    }
  }
  for (int j = 0; j < N; ++j) {
    Floats folded = sums[0][j];
    for (int u = 1; u < U; ++u) folded += sums[u][j];
    float total = sum(folded);
    for (int64_t rest = k; rest < depth; ++rest) total += x[rest] * widen_one(w[j][rest]);
    product.finish(row, n + j, total);
  }
}

// Eight rows at once, a row in each lane, x as [depth, 8]: a weight is multiplied with all of them in one instruction.
template <int N, typename W>
inline void lanes_block(const Product& product, const float* x, int64_t first_row, int64_t rows, int64_t n) {
  constexpr int64_t kChunk = 512;  // of the depth: N x kChunk widened weights stay in the first cache
  const int64_t depth = product.matrix.depth;
  const W* weights = static_cast<const W*>(product.matrix.values) + n * depth;
  float widened[std::is_same_v<W, float> ? 1 : N * kChunk];
  Floats totals[N] = {};
  for (int64_t begin = 0; begin < depth; begin += kChunk) {
    const int64_t size = depth - begin < kChunk ? depth - begin : kChunk;
    const float* w[N];
    for (int j = 0; j < N; ++j) {
      if constexpr (std::is_same_v<W, float>) {
        w[j] = weights + j * depth + begin;
      } else {
        const W* from = weights + j * depth + begin;
        float* to = widened + j * kChunk;
        int64_t k = 0;
        for (; k + kLanes <= size; k += kLanes) {
          const Floats wide = widen(from + k);
          std::memcpy(to + k, &wide, sizeof(wide));
        }
        for (; k < size; ++k) to[k] = widen_one(from[k]);
        w[j] = to;
      }
    }
    Floats sums[N] = {};
    for (int64_t k = 0; k < size; ++k) {
      const Floats value = load<Floats>(x + (begin + k) * kLanes);
      for (int j = 0; j < N; ++j) sums[j] += value * w[j][k];
    }
    for (int j = 0; j < N; ++j) totals[j] += sums[j];
  }
  for (int j = 0; j < N; ++j)
    for (int64_t lane = 0; lane < kLanes && first_row + lane < rows; ++lane)
      product.finish(first_row + lane, n + j, totals[j][lane]);
}

// The shapes of blocks were found by trying: fp32 is read in four streams, narrow types are best read in one.
template <int N, typename W>
inline void outputs(const Product& product, const float* lanes, int64_t rows, int64_t n) {
  if (lanes) {
    for (int64_t first = 0; first < rows; first += kLanes)
      lanes_block<N, W>(product, lanes + first * product.matrix.depth, first, rows, n);
    return;
  }
  constexpr int kStreams = sizeof(W) == 4 && N >= 4 ? 4 : 1;
  for (int64_t row = 0; row < rows; ++row)
    for (int j = 0; j < N; j += kStreams)
      row_block<kStreams, sizeof(W) == 4 ? 2 : 8 / sizeof(W), W>(product, row, n + j);
}

template <typename W>
void multiply(const Product& product, const float* lanes, int64_t rows) {
  constexpr int N = 8;
  const int64_t groups = product.matrix.outputs / N;
#pragma omp for schedule(static)
  for (int64_t group = 0; group <= groups; ++group) {
    if (group < groups) outputs<N, W>(product, lanes, rows, group * N);
    else
      for (int64_t n = groups * N; n < product.matrix.outputs; ++n) outputs<1, W>(product, lanes, rows, n);
  }
}

// [rows, depth] as groups of eight rows, each [depth, 8]; absent rows are zeros.
void put_rows_into_lanes(const float* x, float* lanes, int64_t rows, int64_t depth) {
#pragma omp for schedule(static)
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t first = 0; first < rows; first += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane)
        lanes[(first * depth) + k * kLanes + lane] = first + lane < rows ? x[(first + lane) * depth + k] : 0.0f;
}

void linear(const Matrix& matrix, const float* x, float* y, float* lanes, int64_t rows, Then then = Then::kStore,
            int64_t gelu = 0) {
  const Product product{matrix, x, y, then, gelu};
  if (rows <= kRowByRow) lanes = nullptr;
  if (lanes) put_rows_into_lanes(x, lanes, rows, matrix.depth);
  if (matrix.width == 1) multiply<int8_t>(product, lanes, rows);
  else if (matrix.width == 2) multiply<uint16_t>(product, lanes, rows);
  else multiply<float>(product, lanes, rows);
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
  float* lanes = scores + rows * model.num_heads * step.cache_len;
#pragma omp parallel num_threads(step.threads)
  {
    embed(model, step, x);
    for (int64_t number = 0; number < model.num_layers; ++number) {
      const Layer& layer = model.layers[number];
      layer_norm(x, layer.ln1_weight, layer.ln1_bias, normed, rows, hidden, model.eps);
      linear(layer.qkv, normed, qkv, lanes, rows);
#pragma omp for schedule(static)
      for (int64_t place = 0; place < rows * model.num_heads; ++place) {  // of row and head
        const int64_t cached = (number * rows * model.num_heads + place) * step.cache_len * size;
        attend(qkv + place * 3 * size, step.keys + cached, step.values + cached, scores + place * step.cache_len,
               mixed + place * size, step.lengths[place / model.num_heads], size);
      }
      linear(layer.out, mixed, x, lanes, rows, Then::kAdd);
      layer_norm(x, layer.ln2_weight, layer.ln2_bias, normed, rows, hidden, model.eps);
      linear(layer.up, normed, inner, lanes, rows, Then::kGelu, model.gelu);
      linear(layer.down, inner, x, lanes, rows, Then::kAdd);
    }
    layer_norm(x, model.ln_f_weight, model.ln_f_bias, normed, rows, hidden, model.eps);
    linear(model.head, normed, step.logits, lanes, rows);
  }
}
