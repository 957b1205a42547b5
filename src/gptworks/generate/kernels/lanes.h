// Sixteen floats side by side, in as many registers as the instruction set needs: 1 (AVX-512), 2 (AVX2), 4 (others).
//
// A sum always has sixteen partial sums, which are folded in halves, and products are fused into it: so AVX-512, AVX2
// and NEON give the same bits. Only the portable form, which may have no fused instruction, differs in the last ones.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

// kWidth: floats in a register. A tile of kTokens x kOutputs sums, or kStreams for one token, stays in registers.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define GPTWORKS_AVX512
#if defined(__AVX512VNNI__)
constexpr const char* kInstructions = "avx512-vnni";
#else
constexpr const char* kInstructions = "avx512";
#endif
constexpr int kWidth = 16, kTokens = 4, kOutputs = 6, kStreams = 8;
#elif defined(__AVX2__) && defined(__FMA__)
#define GPTWORKS_AVX2
constexpr const char* kInstructions = "avx2";
constexpr int kWidth = 8, kTokens = 2, kOutputs = 3, kStreams = 4;
#elif defined(__aarch64__)
#define GPTWORKS_NEON
constexpr const char* kInstructions = "neon";
constexpr int kWidth = 4, kTokens = 2, kOutputs = 3, kStreams = 4;
#else
constexpr const char* kInstructions = "portable";
constexpr int kWidth = 4, kTokens = 1, kOutputs = 2, kStreams = 2;
#endif
constexpr int kLanes = 16, kPieces = kLanes / kWidth;

constexpr int kFew = 8;  // tokens: so many wait at each tile of rows, and every weight is read from memory once

constexpr int rows_of_tile(int tokens) { return tokens == 1 ? kStreams : kOutputs; }

// What is wanted next of a row, or of one behind it. Into all caches: past the second one an Intel Xeon reads at half
// the speed.
INLINE void fetch_ahead(const void* at, int64_t distance) { __builtin_prefetch(static_cast<const char*>(at) + distance); }

// The rows that are multiplied together: side by side in memory, or spread over all rows of a thread, so that each is
// in a stream of its own, which the processor foresees by itself.
struct Apart {
  int64_t rows;  // from one to the next

  INLINE int64_t distance(int64_t num_rows, int64_t row_bytes) const {
    if (rows > 1) return 2048;
    return num_rows == 1 ? 8192 : std::max<int64_t>(num_rows * row_bytes, 8192);
  }
};

using Floats = float __attribute__((vector_size(4 * kWidth)));
using Ints = int32_t __attribute__((vector_size(4 * kWidth)));
using Words = uint16_t __attribute__((vector_size(2 * kWidth)));
using Shorts = int16_t __attribute__((vector_size(4 * kWidth)));  // two in the place of a float

template <typename Vector, typename T>
INLINE Vector load(const T* from) {
  Vector found;
  std::memcpy(&found, from, sizeof(found));
  return found;
}
INLINE Floats load(const float* from) { return load<Floats>(from); }
INLINE void store(float* to, Floats v) { std::memcpy(to, &v, sizeof(v)); }
INLINE Floats all(float value) { return Floats{} + value; }
INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

INLINE Floats fused(Floats a, Floats b, Floats c) {  // a b + c
#if defined(GPTWORKS_AVX512)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(GPTWORKS_AVX2)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(GPTWORKS_NEON)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
INLINE float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// The upper halves of floats (bf16) as floats.
INLINE Floats widen(const float* from) { return load(from); }
INLINE Floats widen(const uint16_t* from) {
  return (Floats)(__builtin_convertvector(load<Words>(from), Ints) << 16);
}
INLINE float widen_one(float value) { return value; }
INLINE float widen_one(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

// Whole numbers of one byte as such of two.
INLINE Shorts widen_to_shorts(const int8_t* from) {
#if defined(GPTWORKS_AVX512)
  return (Shorts)_mm512_cvtepi8_epi16(load<__m256i>(from));
#elif defined(GPTWORKS_AVX2)
  return (Shorts)_mm256_cvtepi8_epi16(load<__m128i>(from));
#else
  using HalfBytes = int8_t __attribute__((vector_size(2 * kWidth)));
  return __builtin_convertvector(load<HalfBytes>(from), Shorts);
#endif
}

// c + a b, where the two products in the place of one number of c are added up. Whole numbers: nothing is rounded.
INLINE Ints add_pairs(Shorts a, Shorts b, Ints c) {
#if defined(GPTWORKS_AVX512) && defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
#elif defined(GPTWORKS_AVX512)
  return c + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(GPTWORKS_AVX2)
  return c + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(GPTWORKS_NEON)
  const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
  return c + (Ints)vpaddq_s32(low, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
#else
  for (int i = 0; i < kWidth; ++i) c[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return c;
#endif
}

// Sixteen partial sums to one, always in the same order: lanes 8 apart, then 4, 2, 1.
INLINE float fold(const Floats (&v)[kPieces]) {
#if defined(GPTWORKS_AVX512) || defined(GPTWORKS_AVX2)
#if defined(GPTWORKS_AVX512)
  const __m512 whole = (__m512)v[0];
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps(whole, 1));
#else
  const __m256 eight = _mm256_add_ps((__m256)v[0], (__m256)v[1]);
#endif
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  const Floats four = (v[0] + v[2]) + (v[1] + v[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
#endif
}

// e^x as 2^n p(r), r = x - n ln 2 in [-0.35, 0.35]; relative error below 2e-7. Of what is below -87: about 1e-38.
INLINE Floats exponential(Floats x) {
  x = larger(smaller(x, all(88.0f)), all(-87.0f));
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats shifted = fused(x, all(1.44269504f), magic);
  const Floats n = shifted - magic;
  Floats r = fused(n, all(-0.693359375f), x);  // ln 2 in two parts
  r = fused(n, all(2.12194440e-4f), r);
  Floats p = all(1.9875691500e-4f);
  p = fused(p, r, all(1.3981999507e-3f));
  p = fused(p, r, all(8.3334519073e-3f));
  p = fused(p, r, all(4.1665795894e-2f));
  p = fused(p, r, all(1.6666665459e-1f));
  p = fused(p, r, all(5.0000001201e-1f));
  p = fused(p * r, r, r + 1.0f);
  return (Floats)((Ints)p + ((Ints)shifted << 23));
}

}  // namespace
