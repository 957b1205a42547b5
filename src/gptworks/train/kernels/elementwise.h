// What is done to each number, or to each row of numbers, between the products.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tiles.h"

namespace {

// e^x as 2^n p(r), r = x - n ln 2 in [-0.35, 0.35]; relative error below 2e-7. NaN stays NaN: a step that has gone wrong
// must be seen. Written for one number, so that the compiler does as many at once as the processor has lanes.
INLINE float exponential(float x) {
  x = x > 88.0f ? 88.0f : x;
  x = x < -87.0f ? -87.0f : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const float shifted = x * 1.44269504f + magic;
  const float n = shifted - magic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + (r + 1.0f);
  int32_t bits, power;
  std::memcpy(&bits, &p, sizeof(bits));
  std::memcpy(&power, &shifted, sizeof(power));
  bits += static_cast<int32_t>(static_cast<uint32_t>(power) << 23);
  std::memcpy(&p, &bits, sizeof(p));
  return x == x ? p : x;  // with some of a NaN's bits the sum above is a number
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Phi(x), the share of a normal distribution below x, by Abramowitz and Stegun 7.1.26: error below 1e-7.
INLINE float normal_share(float x, float density) {  // density: exp(-x^2 / 2)
  const float t = 1.0f / (1.0f + 0.3275911f * 0.70710678f * std::fabs(x));
  const float poly = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  const float tail = 0.5f * poly * density;
  return x < 0.0f ? tail : 1.0f - tail;
}

constexpr float kA = 1.5957691216f, kB = kA * 0.044715f;  // 2u = A x + B x^3 in tanh's approximation of GELU

enum Activation : int64_t { kTanh = 0, kErf = 1, kSigmoid = 2, kSwiGLU = 3 };

INLINE void add_bias(float* row, const float* bias, int64_t size) {
  if (!bias) return;
#pragma omp simd
  for (int64_t i = 0; i < size; i++) row[i] += bias[i];
}

// inner = f(up)
template <int64_t kind>
INLINE void activate(const float* up, float* inner, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; i++) {
    const float x = up[i];
    if (kind == kTanh) inner[i] = x * sigmoid(x * (kA + kB * x * x));
    if (kind == kErf) inner[i] = x * normal_share(x, exponential(-0.5f * x * x));
    if (kind == kSigmoid) inner[i] = x * sigmoid(1.702f * x);
  }
}

// grad: of what `activate` gave, becomes that of up.
template <int64_t kind>
INLINE void activate_backward(const float* up, float* grad, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; i++) {
    const float x = up[i];
    if (kind == kErf) {
      const float density = exponential(-0.5f * x * x);
      grad[i] *= normal_share(x, density) + x * 0.39894228f * density;
    } else {
      const float z = kind == kTanh ? x * (kA + kB * x * x) : 1.702f * x;
      const float slope = kind == kTanh ? kA + 3.0f * kB * x * x : 1.702f;
      const float s = sigmoid(z);
      grad[i] *= s + s * (1.0f - s) * x * slope;
    }
  }
}

INLINE void gate_forward(const float* gate, const float* up, float* inner, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; i++) inner[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

// grad: of inner, becomes that of up; grad_gate is that of gate.
INLINE void gate_backward(const float* gate, const float* up, float* grad, float* grad_gate, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; i++) {
    const float g = gate[i], s = sigmoid(g), silu = g * s;
    grad_gate[i] = grad[i] * up[i] * (s + silu * (1.0f - s));
    grad[i] *= silu;
  }
}

struct Norm {
  bool is_rms;
  float eps;
  const float *weight, *bias;  // bias may be null
};

// stats: mean (0 for RMSNorm) and 1 / deviation.
INLINE void normalize(const Norm& norm, const float* x, float* out, float* stats, int64_t size) {
  float mean = 0.0f, squares = 0.0f;
  if (!norm.is_rms) {
#pragma omp simd reduction(+ : mean)
    for (int64_t i = 0; i < size; i++) mean += x[i];
    mean /= size;
  }
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < size; i++) squares += (x[i] - mean) * (x[i] - mean);
  const float scale = 1.0f / std::sqrt(squares / size + norm.eps);
  stats[0] = mean;
  stats[1] = scale;
#pragma omp simd
  for (int64_t i = 0; i < size; i++) {
    const float y = (x[i] - mean) * scale * norm.weight[i];
    out[i] = norm.bias ? y + norm.bias[i] : y;
  }
}

// into = residual + the gradient of x; sums of the gradients of weight and bias are added to.
INLINE void normalize_backward(const Norm& norm, const float* x, const float* stats, const float* grad,
                               const float* residual, float* into, float* sum_weight, float* sum_bias, int64_t size) {
  const float mean = stats[0], scale = stats[1];
  float along = 0.0f, level = 0.0f;
#pragma omp simd reduction(+ : along, level)
  for (int64_t i = 0; i < size; i++) {
    const float normal = (x[i] - mean) * scale, g = grad[i] * norm.weight[i];
    along += g * normal;
    level += g;
    sum_weight[i] += grad[i] * normal;
    if (sum_bias) sum_bias[i] += grad[i];
  }
  along /= size;
  level = norm.is_rms ? 0.0f : level / size;
#pragma omp simd
  for (int64_t i = 0; i < size; i++) {
    const float normal = (x[i] - mean) * scale;
    into[i] = residual[i] + scale * (grad[i] * norm.weight[i] - level - normal * along);
  }
}

// Turns pairs (i, i + H/2) of a head in place; direction -1 turns back. cos and sin are those of `rope.py`: sin of the
// first half is negative.
INLINE void turn(float* head, const float* cos, const float* sin, float direction, int64_t size) {
  const int64_t half = size / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; i++) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] + direction * sin[i] * b;
    head[i + half] = b * cos[i + half] + direction * sin[i + half] * a;
  }
}

}  // namespace
