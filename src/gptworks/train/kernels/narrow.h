// Products of numbers that are rounded to bf16, with sums in fp32: the processor multiplies them two at a time. Both
// sides are packed as pairs: of one row or column the numbers of two neighbouring depths.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>

#include "tiles.h"

namespace {

constexpr int64_t kDeepNarrow = 256, kPairs = kDeepNarrow / 2;

struct LeftPairs {  // the pair p of row r is at data[r * row + p * depth]
  const int32_t* data;
  int64_t row, depth;
};

INLINE __mmask16 first(int64_t count) { return count >= 16 ? 0xffff : (1u << count) - 1; }
INLINE __m512 load(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(first(count), from); }

// Pairs of 32 numbers of which `count` are there, 0 for the others.
INLINE __m512i pairs_of(const float* from, int64_t count) {
  const __m512 low = load(from, count), high = count > 16 ? load(from + 16, count - 16) : _mm512_setzero_ps();
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Pairs of a row of numbers with those of the next row.
INLINE __m512i pairs_of(__m512 row, __m512 next) {
  const __m512i places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                          20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(places, (__m512i)_mm512_cvtne2ps_pbh(next, row));
}

template <int64_t rows, int64_t vectors>
INLINE void sum_narrow_tile(LeftPairs a, const int32_t* b, int64_t pairs, bool add, float* c, int64_t c_stride,
                            int64_t columns) {
  __m512 sum[rows][vectors] = {};
  for (int64_t p = 0; p < pairs; p++) {
    __m512bh right[vectors];
#pragma GCC unroll 8
    for (int64_t v = 0; v < vectors; v++) right[v] = (__m512bh)_mm512_loadu_si512(b + p * kPanel + v * 16);
#pragma GCC unroll 8
    for (int64_t r = 0; r < rows; r++) {
      const __m512bh left = (__m512bh)_mm512_set1_epi32(a.data[r * a.row + p * a.depth]);
#pragma GCC unroll 8
      for (int64_t v = 0; v < vectors; v++) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], left, right[v]);
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int64_t v = 0; v < vectors; v++) {
      float* to = c + r * c_stride + v * 16;
      const __mmask16 here = first(std::max<int64_t>(columns - v * 16, 0));
      _mm512_mask_storeu_ps(to, here, add ? _mm512_add_ps(_mm512_maskz_loadu_ps(here, to), sum[r][v]) : sum[r][v]);
    }
}

inline void multiply_narrow(LeftPairs a, int64_t rows, const int32_t* b, int64_t pairs, bool add, float* c,
                            int64_t c_stride, int64_t columns) {
  int64_t r = 0;
  for (; rows - r >= kHigh; r += kHigh)
    sum_narrow_tile<kHigh, kWide>({a.data + r * a.row, a.row, a.depth}, b, pairs, add, c + r * c_stride, c_stride, columns);
  for (; r < rows; r++)
    sum_narrow_tile<1, kWide>({a.data + r * a.row, a.row, a.depth}, b, pairs, add, c + r * c_stride, c_stride, columns);
}

// to[rows, (size + 1) / 2]
inline void pair_rows(const float* from, int64_t stride, int64_t rows, int64_t size, int32_t* to) {
  const int64_t pairs = (size + 1) / 2;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t p = 0; p < pairs; p += 16)
      _mm512_mask_storeu_epi32(to + r * pairs + p, first(pairs - p), pairs_of(from + r * stride + 2 * p, size - 2 * p));
}

// to: for every `wide` columns of `from` a panel [(rows + 1) / 2, wide], zeros behind the last column
inline void pair_panels(const float* from, int64_t stride, int64_t rows, int64_t columns, int64_t wide, int32_t* to) {
  const int64_t pairs = (rows + 1) / 2;
  for (int64_t at = 0; at < columns; at += wide, to += pairs * wide)
    for (int64_t p = 0; p < pairs; p++)
      for (int64_t i = 0; i < wide; i += 16) {
        const int64_t here = std::max<int64_t>(columns - at - i, 0);
        const float* row = from + 2 * p * stride + at + i;
        const __m512 next = 2 * p + 1 < rows ? load(row + stride, here) : _mm512_setzero_ps();
        _mm512_storeu_si512(to + p * wide + i, pairs_of(load(row, here), next));
      }
}

// to: for every kPanel rows of `from` a panel [(size + 1) / 2, kPanel] of their pairs; what is behind the last row is
// unwritten up to the panel's end but for a whole vector of zeros.
inline void pair_panels_transposed(const float* from, int64_t stride, int64_t rows, int64_t size, int32_t* to) {
  const int64_t pairs = (size + 1) / 2;
  for (int64_t r = 0; r < rows; r += 16) {
    int32_t* panel = to + r / kPanel * kPanel * pairs + r % kPanel;
    for (int64_t p = 0; p < pairs; p += 16) {
      Lanes square[16] = {};
      for (int64_t j = 0; j < std::min<int64_t>(16, rows - r); j++)
        square[j] = (Lanes)pairs_of(from + (r + j) * stride + 2 * p, size - 2 * p);
      transpose(square);
      for (int64_t j = 0; j < std::min<int64_t>(16, pairs - p); j++)
        _mm512_storeu_si512(panel + (p + j) * kPanel, (__m512i)square[j]);
    }
  }
}

}  // namespace
#endif
