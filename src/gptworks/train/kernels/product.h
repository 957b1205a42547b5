// Products of matrices whose rows lie one after the other, by the sgemm that torch itself multiplies with.
#pragma once
#include <cstdint>

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

struct Gemm {
  Sgemm sgemm;

  // c[m, n] = alpha a[m, k] b[n, k]^T + beta c
  void times_transposed(Rows a, Rows b, Target c, int64_t m, int64_t n, int64_t k, float alpha, float beta) const {
    call('T', 'N', n, m, k, b, a, c, alpha, beta);
  }
  // c[m, n] = alpha a[m, k] b[k, n] + beta c
  void times(Rows a, Rows b, Target c, int64_t m, int64_t n, int64_t k, float alpha, float beta) const {
    call('N', 'N', n, m, k, b, a, c, alpha, beta);
  }
  // c[m, n] = alpha a[k, m]^T b[k, n] + beta c
  void transposed_times(Rows a, Rows b, Target c, int64_t m, int64_t n, int64_t k, float alpha, float beta) const {
    call('N', 'T', n, m, k, b, a, c, alpha, beta);
  }

 private:
  void call(char left, char right, int64_t n, int64_t m, int64_t k, Rows b, Rows a, Target c, float alpha,
            float beta) const {
    if (m == 0 || n == 0) return;
    const int rows = m, columns = n, depth = k, a_stride = a.stride, b_stride = b.stride, c_stride = c.stride;
    sgemm(&left, &right, &columns, &rows, &depth, &alpha, b.data, &b_stride, a.data, &a_stride, &beta, c.data, &c_stride);
  }
};

}  // namespace
