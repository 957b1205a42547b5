// Products of tokens with a matrix, y = x W^T: x [tokens, depth], W [outputs, depth].
//
// The order of every sum depends on the depth alone, never on how many tokens there are: along each chunk of kChunk
// numbers sixteen partial sums grow, are folded to one, and the chunks are added up. So a token has the same numbers,
// bit for bit, whether it is alone or one of many.
#pragma once
#include <omp.h>

#include <algorithm>

#include "lanes.h"
#include "model.h"

namespace {

constexpr int64_t kChunk = 1024;  // of the depth
constexpr int64_t kBlock = 48;    // outputs, and
constexpr int64_t kPanel = 48;    // tokens: so many chunks of both stay in the second cache
constexpr int64_t kGroup = 32;    // numbers of an int4 matrix that share a scale

// Rows of fp32 or bf16 from some place on. widen: a register of the numbers of row n at k.
template <typename T>
struct PlainRows {
  // Side by side, rows of fp32 are read one after the other where there is one token: several at a time keep the memory
  // waiting. With bf16 that is no faster.
  static constexpr int kSideBySide = sizeof(T) == 4 ? 1 : kStreams;
  const T* values;
  int64_t stride, distance = 0;  // distance: bytes that are fetched ahead
  INLINE PlainRows from(int64_t n, int64_t k) const { return {values + n * stride + k, stride, distance}; }
  INLINE Floats widen(int64_t n, int64_t k) const { return ::widen(values + n * stride + k); }
  INLINE float one(int64_t n, int64_t k) const { return widen_one(values[n * stride + k]); }
  INLINE PlainRows tile(int64_t n, int64_t num_rows, Apart apart) const {
    return {values + n * stride, apart.rows * stride, apart.distance(num_rows, stride * sizeof(T))};
  }
  INLINE void fetch(int64_t n, int64_t k) const {  // once for a line of 64 bytes
    if (k * sizeof(T) % 64 == 0) fetch_ahead(values + n * stride + k, distance);
  }
};

// T tokens with R rows over one chunk.
template <bool is_fetching, int T, int R, typename Rows>
INLINE void chunk_tile(const float* x, int64_t x_stride, const Rows& rows, int64_t size, float (&totals)[T][R]) {
  Floats sums[T][R][kPieces] = {};
  int64_t k = 0;
  for (; k + kLanes <= size; k += kLanes)
    for (int piece = 0; piece < kPieces; ++piece) {
      Floats values[T];
      for (int t = 0; t < T; ++t) values[t] = load(x + t * x_stride + k + piece * kWidth);
      for (int r = 0; r < R; ++r) {
        const Floats weights = rows.widen(r, k + piece * kWidth);
        if (is_fetching && piece == 0) rows.fetch(r, k);
        for (int t = 0; t < T; ++t) sums[t][r][piece] = fused(values[t], weights, sums[t][r][piece]);
      }
    }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) {
      float total = fold(sums[t][r]);
      for (int64_t rest = k; rest < size; ++rest) total = fused(x[t * x_stride + rest], rows.one(r, rest), total);
      totals[t][r] += total;
    }
}

template <bool is_fetching = false, int T, int R, typename Rows>
INLINE void tile(const float* x, int64_t x_stride, const Rows& rows, int64_t depth, float (&totals)[T][R]) {
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) totals[t][r] = 0;
  for (int64_t k = 0; k < depth; k += kChunk)
    chunk_tile<is_fetching>(x + k, x_stride, rows.from(0, k), std::min(depth - k, kChunk), totals);
}

template <int number>
using Constant = std::integral_constant<int, number>;

// Calls with the number as a constant: the compiler keeps a tile of known size in registers.
template <int most, typename Function>
INLINE void with_constant(int64_t number, Function&& call) {
  if constexpr (most > 1)
    if (number < most) return with_constant<most - 1>(number, call);
  call(Constant<most>{});
}

enum class Then { kStore, kAdd };  // write over what is there, or add to it

struct Product {
  const Matrix& matrix;
  const float* x;
  float* y;
  int64_t tokens;
  Then then;
  bool is_apart;  // see Apart

  INLINE void finish(int64_t token, int64_t n, float total) const {
    if (matrix.type == kInt8) total *= static_cast<const float*>(matrix.scale)[n];
    if (matrix.bias) total += matrix.bias[n];
    float& to = y[token * matrix.outputs + n];
    to = then == Then::kAdd ? to + total : total;
  }
};

struct Range {
  int64_t first, end;
};

// Whole tiles for each thread. The threads do not wait for each other at the end: what follows may go on with the same
// outputs.
INLINE Range outputs_of_thread(int64_t outputs, int64_t tokens) {
  const int64_t tile = rows_of_tile(tokens), threads = omp_get_num_threads();
  const int64_t share = ((outputs + tile - 1) / tile + threads - 1) / threads * tile;
  const int64_t first = std::min(omp_get_thread_num() * share, outputs);
  return {first, std::min(first + share, outputs)};
}

// call(T, R, token, n, apart) for tiles of all tokens and some outputs; of a single token side_by_side outputs at a time,
// or kStreams. The rows of a tile are in the first cache for all but the first tokens.
template <int side_by_side, typename Function>
INLINE void for_tiles(int64_t tokens, Range outputs, bool is_apart, Function&& call) {
  int64_t n = outputs.first;
  const auto all_tokens = [&](auto R, int64_t n, Apart apart) {
    for (int64_t token = 0; token < tokens; token += kTokens)
      with_constant<kTokens>(std::min<int64_t>(tokens - token, kTokens), [&](auto T) { call(T, R, token, n, apart); });
  };
  const auto one_token = [&](auto R, int64_t n, Apart apart) { call(Constant<1>{}, R, 0, n, apart); };
  const auto all_outputs = [&](auto R, const auto& multiply) {
    const int64_t tiles = (outputs.end - n) / R;
    for (int64_t i = 0; i < tiles; ++i) multiply(R, n + (is_apart ? i : i * R), Apart{is_apart ? tiles : 1});
    n += tiles * R;
  };
  if (tokens > 1) all_outputs(Constant<kOutputs>{}, all_tokens);
  else if (is_apart) all_outputs(Constant<kStreams>{}, one_token);
  else all_outputs(Constant<side_by_side>{}, one_token);
  for (; n < outputs.end; ++n) all_tokens(Constant<1>{}, n, Apart{1});
}

// At most kFew tokens: the matrix is widened in registers.
template <int T, int R, typename Rows>
INLINE void few_outputs(const Product& product, const Rows& rows, int64_t token, int64_t n, Apart apart) {
  float totals[T][R];
  const int64_t depth = product.matrix.depth;
  tile<true>(product.x + token * depth, depth, rows.tile(n, R, apart), depth, totals);
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) product.finish(token + t, n + r * apart.rows, totals[t][r]);
}

template <typename Rows>
void multiply_few(const Product& product, const Rows& rows) {
  const Range mine = outputs_of_thread(product.matrix.outputs, product.tokens);
  const auto one = [&](auto T, auto R, int64_t token, int64_t n, Apart apart) {
    few_outputs<T, R>(product, rows, token, n, apart);
  };
  for_tiles<Rows::kSideBySide>(product.tokens, mine, product.is_apart, one);
}

template <typename Rows>
void widen_rows(const Rows& rows, int64_t count, int64_t size, float* to) {
  for (int64_t r = 0; r < count; ++r) {
    int64_t k = 0;
    for (; k + kWidth <= size; k += kWidth) store(to + r * kChunk + k, rows.widen(r, k));
    for (; k < size; ++k) to[r * kChunk + k] = rows.one(r, k);
  }
}

// Some tokens with some outputs over one chunk, totals [kPanel, kBlock].
INLINE void block(const float* x, int64_t depth, int64_t tokens, const PlainRows<float>& rows, int64_t outputs,
                  int64_t size, float* totals) {
  const auto tiles = [&](auto T, auto R, int64_t t, int64_t r) {
    float found[T][R];
    for (int i = 0; i < T; ++i)
      for (int j = 0; j < R; ++j) found[i][j] = totals[(t + i) * kBlock + r + j];
    chunk_tile<false>(x + t * depth, depth, rows.from(r, 0), size, found);
    for (int i = 0; i < T; ++i)
      for (int j = 0; j < R; ++j) totals[(t + i) * kBlock + r + j] = found[i][j];
  };
  // A tile of rows stays in the first cache while the tokens pass by.
  const auto rows_of_tile = [&](auto R, int64_t r) {
    for (int64_t t = 0; t < tokens; t += kTokens)
      with_constant<kTokens>(std::min<int64_t>(tokens - t, kTokens), [&](auto T) { tiles(T, R, t, r); });
  };
  int64_t r = 0;
  for (; r + kOutputs <= outputs; r += kOutputs) rows_of_tile(Constant<kOutputs>{}, r);
  for (; r < outputs; ++r) rows_of_tile(Constant<1>{}, r);
}

// Many tokens: blocks that stay in the caches; what is not fp32 is widened once for a panel of tokens.
template <typename Rows>
void multiply_many(const Product& product, const Rows& rows, float* widened) {
  const int64_t depth = product.matrix.depth, outputs = product.matrix.outputs;
  const int64_t blocks = (outputs + kBlock - 1) / kBlock, panels = (product.tokens + kPanel - 1) / kPanel;
#pragma omp for schedule(dynamic)
  for (int64_t item = 0; item < blocks * panels; ++item) {
    const int64_t n = item / panels * kBlock, first = item % panels * kPanel;
    const int64_t height = std::min(outputs - n, kBlock), width = std::min(product.tokens - first, kPanel);
    float totals[kPanel * kBlock] = {};
    for (int64_t k = 0; k < depth; k += kChunk) {
      const int64_t size = std::min(depth - k, kChunk);
      const float* x = product.x + first * depth + k;
      if constexpr (std::is_same_v<Rows, PlainRows<float>>) {
        block(x, depth, width, rows.from(n, k), height, size, totals);
      } else {
        widen_rows(rows.from(n, k), height, size, widened);
        block(x, depth, width, {widened, kChunk}, height, size, totals);
      }
    }
    for (int64_t t = 0; t < width; ++t)
      for (int64_t r = 0; r < height; ++r) product.finish(first + t, n + r, totals[t * kBlock + r]);
  }
}

// fp32 and bf16, by all threads of a parallel region. widened: kBlock x kChunk floats of this thread.
template <typename T>
void multiply_floats(const Product& product, float* widened) {
  const PlainRows<T> rows{static_cast<const T*>(product.matrix.values), product.matrix.depth};
  if (product.tokens > kFew) multiply_many(product, rows, widened);
  else multiply_few(product, rows);
}

}  // namespace
