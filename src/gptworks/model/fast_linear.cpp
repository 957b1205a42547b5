// y[r, n] = bias[n] + scale[n] * sum over k of x[r, k] * weight[n, k], for a handful of rows r.
//
// With few rows the time is that of reading the weights from memory: every weight is read once, by one of the threads,
// and widened to fp32 in a register. Blocks of 2 outputs x 4 rows keep 8 sums in registers, enough that no addition
// waits for the one before it. A plain C interface, so that building takes a second and needs no headers.
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

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
// The upper half of an fp32 number is a bf16 number.
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

struct Task {
  const float* x;
  const float* scale;  // may be null
  const float* bias;   // may be null
  float* y;
  int64_t depth, outputs;
};

template <int R, int N, int U, typename W>
void block(const Task& task, const W* weight, int64_t row, int64_t n) {
  const W* w[N];
  const float* x[R];
  for (int j = 0; j < N; ++j) w[j] = weight + (n + j) * task.depth;
  for (int r = 0; r < R; ++r) x[r] = task.x + (row + r) * task.depth;
  Floats sums[U][R][N] = {};
  int64_t k = 0;
  for (; k + U * kLanes <= task.depth; k += U * kLanes)
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
      for (int64_t rest = k; rest < task.depth; ++rest) total += x[r][rest] * widen_one(w[j][rest]);
      if (task.scale) total *= task.scale[n + j];
      if (task.bias) total += task.bias[n + j];
      task.y[(row + r) * task.outputs + n + j] = total;
    }
}

template <int N, typename W>
void outputs_of_all_rows(const Task& task, const W* weight, int64_t rows, int64_t n) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) block<4, N, 1>(task, weight, row, n);
  for (; row + 2 <= rows; row += 2) block<2, N, 2>(task, weight, row, n);
  for (; row < rows; ++row) block<1, N, 2>(task, weight, row, n);
}

template <typename W>
void linear(const Task& task, const W* weight, int64_t rows) {
  constexpr int N = 2;
  const int64_t pairs = task.outputs / N;
#pragma omp parallel for schedule(static)
  for (int64_t pair = 0; pair < pairs; ++pair) outputs_of_all_rows<N>(task, weight, rows, pair * N);
  if (task.outputs % N) outputs_of_all_rows<1>(task, weight, rows, task.outputs - 1);
}

}  // namespace

extern "C" void gptworks_linear(const float* x, const void* weight, int width, const float* scale, const float* bias,
                                float* y, int64_t rows, int64_t depth, int64_t outputs) {
  const Task task{x, scale, bias, y, depth, outputs};
  if (width == 1) linear(task, static_cast<const int8_t*>(weight), rows);
  if (width == 2) linear(task, static_cast<const uint16_t*>(weight), rows);
  if (width == 4) linear(task, static_cast<const float*>(weight), rows);
}
