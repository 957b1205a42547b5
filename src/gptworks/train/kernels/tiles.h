// What products of matrices are made of: the right side is packed into panels, and sums stay in registers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#define INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kWide = 4;  // numbers of a vector; vectors that are summed side by side
#elif defined(__AVX__)
constexpr int64_t kLanes = 8, kWide = 2;
#else
constexpr int64_t kLanes = 4, kWide = 2;
#endif
constexpr int64_t kHigh = 6;  // rows that are summed at once: 6 x 4 vectors, beside those that are read, fill 32 registers
constexpr int64_t kPanel = kWide * kLanes;

using Lanes = float __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

// Memory of a thread that is used again. It begins at a line of the cache: a vector that lies in two takes twice as long.
class Work {
 public:
  float* of(size_t size) {
    if (size > size_) {
      std::free(data_);
      data_ = nullptr, size_ = 0;
      data_ = static_cast<float*>(std::aligned_alloc(64, (size * sizeof(float) + 63) / 64 * 64));
      if (!data_) throw std::bad_alloc();
      size_ = size;
    }
    return data_;
  }
  ~Work() { std::free(data_); }

 private:
  float* data_ = nullptr;
  size_t size_ = 0;
};

inline int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

struct Left {  // a[r, k] is at data[r * row + k * depth]
  const float* data;
  int64_t row, depth;
};

template <int64_t rows, int64_t vectors>
INLINE void sum_tile(Left a, const float* b, int64_t b_stride, int64_t depth, float scale,
                                                    bool add, float* c, int64_t c_stride, int64_t columns) {
  Lanes sum[rows][vectors] = {};
  for (int64_t k = 0; k < depth; k++) {
    const Lanes* right = reinterpret_cast<const Lanes*>(b + k * b_stride);
#pragma GCC unroll 8
    for (int64_t r = 0; r < rows; r++) {
      const float left = a.data[r * a.row + k * a.depth];
#pragma GCC unroll 8
      for (int64_t v = 0; v < vectors; v++) sum[r][v] += left * right[v];
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int64_t v = 0; v < vectors; v++) {
      float* to = c + r * c_stride + v * kLanes;
      const int64_t left = std::min(kLanes, columns - v * kLanes);
      Lanes value = sum[r][v] * scale;
      if (left == kLanes) {
        Lanes* whole = reinterpret_cast<Lanes*>(to);
        *whole = add ? *whole + value : value;
      } else {
        for (int64_t i = 0; i < left; i++) to[i] = add ? to[i] + value[i] : value[i];
      }
    }
}

template <int64_t vectors>
void sum_rows(Left a, int64_t rows, const float* b, int64_t b_stride, int64_t depth, float scale, bool add, float* c,
              int64_t c_stride, int64_t columns) {
  int64_t r = 0;
  const auto next = [&](int64_t count) {
    a.data += count * a.row;
    c += count * c_stride;
    r += count;
  };
  for (; rows - r >= kHigh; next(kHigh)) sum_tile<kHigh, vectors>(a, b, b_stride, depth, scale, add, c, c_stride, columns);
  for (; rows - r >= 4; next(4)) sum_tile<4, vectors>(a, b, b_stride, depth, scale, add, c, c_stride, columns);
  for (; r < rows; next(1)) sum_tile<1, vectors>(a, b, b_stride, depth, scale, add, c, c_stride, columns);
}

// c[rows, columns] = scale a[rows, depth] b[depth, columns] (+ what is there); rows of b are whole vectors.
inline void multiply(Left a, int64_t rows, const float* b, int64_t b_stride, int64_t depth, float scale, bool add,
                     float* c, int64_t c_stride, int64_t columns) {
  int64_t done = 0;
  for (; kWide == 4 && columns - done > 3 * kLanes; done += 4 * kLanes)
    sum_rows<4>(a, rows, b + done, b_stride, depth, scale, add, c + done, c_stride, columns - done);
  for (; columns - done > kLanes; done += 2 * kLanes)
    sum_rows<2>(a, rows, b + done, b_stride, depth, scale, add, c + done, c_stride, columns - done);
  if (columns > done) sum_rows<1>(a, rows, b + done, b_stride, depth, scale, add, c + done, c_stride, columns - done);
}

// to[rows, padded(size)] = from[rows, size], zeros behind it
inline void pack(const float* from, int64_t stride, int64_t rows, int64_t size, float* to) {
  const int64_t wide = padded(size);
  for (int64_t r = 0; r < rows; r++) {
    std::memcpy(to + r * wide, from + r * stride, size * sizeof(float));
    std::fill(to + r * wide + size, to + (r + 1) * wide, 0.0f);
  }
}

// to: for every `kPanel` columns of `from` a panel [rows, kPanel] of them, zeros behind the last
inline void pack_panels(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to) {
  for (int64_t at = 0; at < columns; at += kPanel, to += rows * kPanel) {
    const int64_t here = std::min(kPanel, columns - at);
    for (int64_t r = 0; r < rows; r++) {
      if (here == kPanel) {
        std::memcpy(to + r * kPanel, from + r * stride + at, kPanel * sizeof(float));
      } else {
        std::memcpy(to + r * kPanel, from + r * stride + at, here * sizeof(float));
        std::fill(to + r * kPanel + here, to + (r + 1) * kPanel, 0.0f);
      }
    }
  }
}

INLINE void transpose(Lanes (&square)[kLanes]) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector) && defined(__AVX512F__)
#define GPTWORKS_SHUFFLES 1
#endif
#endif
#ifdef GPTWORKS_SHUFFLES
  for (int64_t turn = 0; turn < 4; turn++) {  // each brings rows i and i + 8 together, number by number
    Lanes next[kLanes];
#pragma GCC unroll 8
    for (int64_t i = 0; i < 8; i++) {
      const Lanes a = square[i], b = square[i + 8];
      next[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; i++) square[i] = next[i];
  }
#else
  for (int64_t i = 0; i < kLanes; i++)
    for (int64_t j = 0; j < i; j++) {
      const float kept = square[i][j];
      square[i][j] = square[j][i];
      square[j][i] = kept;
    }
#endif
}

// to: for every `kPanel` rows of `from` a panel [size, kPanel] of their columns, zeros behind the last row
inline void pack_transposed(const float* from, int64_t stride, int64_t rows, int64_t size, float* to) {
  for (int64_t r = 0; r < rows; r += kLanes) {
    float* panel = to + r / kPanel * kPanel * size + r % kPanel;
    for (int64_t i = 0; i < size; i += kLanes) {
      const int64_t here = std::min(kLanes, size - i);
      Lanes square[kLanes] = {};
      for (int64_t j = 0; j < std::min(kLanes, rows - r); j++)
        std::memcpy(&square[j], from + (r + j) * stride + i, here * sizeof(float));
      transpose(square);
      for (int64_t j = 0; j < here; j++) std::memcpy(panel + (i + j) * kPanel, &square[j], sizeof(Lanes));
    }
  }
}

inline int64_t panels_size(int64_t rows, int64_t size) { return (rows + kPanel - 1) / kPanel * kPanel * size; }

// c[rows, from..to] = scale a[rows, size] b[from..to, size]^T, of what pack_transposed made of b; `from` and `to` are
// whole vectors.
inline void multiply_panels(Left a, int64_t rows, const float* panels, int64_t size, int64_t from, int64_t to, float scale,
                            float* c, int64_t c_stride) {
  for (int64_t at = from; at < to;) {
    const int64_t end = std::min(to, (at / kPanel + 1) * kPanel);
    const float* b = panels + at / kPanel * kPanel * size + at % kPanel;
    multiply(a, rows, b, kPanel, size, scale, false, c + at - from, c_stride, end - at);
    at = end;
  }
}

}  // namespace
