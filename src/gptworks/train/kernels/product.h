// Products of matrices whose rows lie one after the other, each computed by one thread alone.
//
// By the sgemm that torch itself multiplies with where that uses what the processor has. MKL's does so on Intel's
// processors only: on another one with AVX-512 it multiplies at half of the speed, and products of our own are taken.
// Those can also round their factors to bf16.
#pragma once
#include <cstdint>

#include "narrow.h"
#include "tiles.h"

namespace {

struct Rows {  // from one row to the next: `stride` numbers
  const float* data;
  int64_t stride;
};
struct Target {
  float* data;
  int64_t stride;
};

// Fortran's: matrices by columns, so that each of ours is its own transpose there.
using Sgemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*, const float*,
                       const int*, const float*, const int*, const float*, float*, const int*);

// A part of the left side of kTall x kDeep and of the right side of kDeep x kBroad numbers stay in the second cache,
// and of the latter a panel in the first one.
constexpr int64_t kDeep = 128, kBroad = 8 * kPanel, kTall = 32 * kHigh;

thread_local Work product_work;

struct Gemm {
  Sgemm sgemm;     // null: products of our own
  bool is_narrow;  // of factors that are rounded to bf16; only where the processor multiplies them

  // c[m, n] = a[m, k] b[n, k]^T (+ what is there)
  void times_transposed(Rows a, Rows b, Target c, int64_t m, int64_t n, int64_t k, bool add = false) const {
    if (sgemm) return call('T', 'N', n, m, k, b, a, c, add);
#ifdef __AVX512BF16__
    if (is_narrow)
      return narrow<false>(a, c, m, n, k, add, [&](int64_t depth, int64_t deep, int64_t column, int64_t broad, int32_t* to) {
        pair_panels_transposed(b.data + column * b.stride + depth, b.stride, broad, deep, to);
      });
#endif
    own<false>({a.data, a.stride, 1}, c, m, n, k, add, [&](int64_t depth, int64_t deep, int64_t column, int64_t broad, float* to) {
      pack_transposed(b.data + column * b.stride + depth, b.stride, broad, deep, to);
    });
  }
  // c[m, n] = a[m, k] b[k, n] (+ what is there)
  void times(Rows a, Rows b, Target c, int64_t m, int64_t n, int64_t k, bool add = false) const {
    if (sgemm) return call('N', 'N', n, m, k, b, a, c, add);
    times_rows<false>(a, b, c, m, n, k, add);
  }
  // c[m, n] = a[k, m]^T b[k, n] (+ what is there)
  void transposed_times(Rows a, Rows b, Target c, int64_t m, int64_t n, int64_t k, bool add = false) const {
    if (sgemm) return call('N', 'T', n, m, k, b, a, c, add);
    times_rows<true>(a, b, c, m, n, k, add);
  }

 private:
  template <bool is_transposed>  // the left side
  void times_rows(Rows a, Rows b, Target c, int64_t m, int64_t n, int64_t k, bool add) const {
#ifdef __AVX512BF16__
    if (is_narrow)
      return narrow<is_transposed>(
          a, c, m, n, k, add, [&](int64_t depth, int64_t deep, int64_t column, int64_t broad, int32_t* to) {
            pair_panels(b.data + depth * b.stride + column, b.stride, deep, broad, kPanel, to);
          });
#endif
    const Left left = is_transposed ? Left{a.data, 1, a.stride} : Left{a.data, a.stride, 1};
    own<is_transposed>(left, c, m, n, k, add, [&](int64_t depth, int64_t deep, int64_t column, int64_t broad, float* to) {
      pack_panels(b.data + depth * b.stride + column, b.stride, deep, broad, to);
    });
  }

  void call(char left, char right, int64_t n, int64_t m, int64_t k, Rows b, Rows a, Target c, bool add) const {
    if (m == 0 || n == 0) return;
    const int rows = m, columns = n, depth = k, a_stride = a.stride, b_stride = b.stride, c_stride = c.stride;
    const float alpha = 1.0f, beta = add ? 1.0f : 0.0f;
    sgemm(&left, &right, &columns, &rows, &depth, &alpha, b.data, &b_stride, a.data, &a_stride, &beta, c.data, &c_stride);
  }

  static void clear(Target c, int64_t m, int64_t n) {
    for (int64_t row = 0; row < m; row++) std::fill_n(c.data + row * c.stride, n, 0.0f);
  }

  // packs_left: where the numbers of a row of a lie far apart
  template <bool packs_left, typename PackRight>
  static void own(Left a, Target c, int64_t m, int64_t n, int64_t k, bool add, const PackRight& pack_right) {
    if (k == 0 && !add) clear(c, m, n);
    float* right = product_work.of(kDeep * (kBroad + kTall));
    float* left = right + kDeep * kBroad;
    for (int64_t column = 0; column < n; column += kBroad) {
      const int64_t broad = std::min(kBroad, n - column);
      for (int64_t depth = 0; depth < k; depth += kDeep) {
        const int64_t deep = std::min(kDeep, k - depth);
        pack_right(depth, deep, column, broad, right);
        for (int64_t row = 0; row < m; row += kTall) {
          const int64_t tall = std::min(kTall, m - row);
          const float* part = a.data + row * a.row + depth * a.depth;
          if (packs_left) pack_left(part, a.depth, deep, tall, left);
          for (int64_t at = 0; at < broad; at += kPanel)
            panel<packs_left>(packs_left ? Left{left, 1, 0} : Left{part, a.row, a.depth}, tall, right + at * deep, deep,
                              add || depth > 0, c.data + row * c.stride + column + at, c.stride,
                              std::min(kPanel, broad - at));
        }
      }
    }
  }

#ifdef __AVX512BF16__
  template <bool is_transposed, typename PackRight>
  static void narrow(Rows a, Target c, int64_t m, int64_t n, int64_t k, bool add, const PackRight& pack_right) {
    if (k == 0 && !add) clear(c, m, n);
    int32_t* right = reinterpret_cast<int32_t*>(product_work.of(kPairs * (kBroad + kTall)));
    int32_t* left = right + kPairs * kBroad;
    for (int64_t column = 0; column < n; column += kBroad) {
      const int64_t broad = std::min(kBroad, n - column);
      for (int64_t depth = 0; depth < k; depth += kDeepNarrow) {
        const int64_t deep = std::min(kDeepNarrow, k - depth), pairs = (deep + 1) / 2;
        pack_right(depth, deep, column, broad, right);
        for (int64_t row = 0; row < m; row += kTall) {
          const int64_t tall = std::min(kTall, m - row);
          if (is_transposed)
            pair_panels(a.data + depth * a.stride + row, a.stride, deep, tall, kTall, left);
          else
            pair_rows(a.data + row * a.stride + depth, a.stride, tall, deep, left);
          for (int64_t at = 0; at < broad; at += kPanel)
            multiply_narrow(is_transposed ? LeftPairs{left, 1, kTall} : LeftPairs{left, pairs, 1}, tall, right + at * pairs,
                            pairs, add || depth > 0, c.data + row * c.stride + column + at, c.stride,
                            std::min(kPanel, broad - at));
        }
      }
    }
  }
#endif

  // to: for every kHigh columns of `from` their numbers row by row, [rows, kHigh]
  static void pack_left(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t at = 0; at < columns; at += kHigh)
        for (int64_t i = 0; i < std::min(kHigh, columns - at); i++)
          to[at * rows + r * kHigh + i] = from[r * stride + at + i];
  }

  template <bool is_packed>
  static void panel(Left a, int64_t rows, const float* b, int64_t deep, bool add, float* c, int64_t c_stride,
                    int64_t columns) {
    if (!is_packed) return multiply(a, rows, b, kPanel, deep, 1.0f, add, c, c_stride, columns);
    for (int64_t r = 0; r < rows; r += kHigh)
      multiply({a.data + r * deep, 1, kHigh}, std::min(kHigh, rows - r), b, kPanel, deep, 1.0f, add, c + r * c_stride,
               c_stride, columns);
  }
};

}  // namespace
