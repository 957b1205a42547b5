// Products of tokens with matrices of int8 and int4, in whole numbers.
//
// A token's numbers become whole numbers of 16 bits, with one scale for each chunk of kChunk of them: finer than the
// steps of the matrix by two hundred times. Sums of whole numbers are exact, so their order does not matter.
#pragma once
#include "product.h"

namespace {

constexpr int64_t kStep = 4 * kGroup;  // numbers that are multiplied at a time; what is missing at the end is zero
constexpr float kLargest = 32767;

// Tokens in whole numbers. For an int4 matrix they are in the order in which its bits are taken apart (see `Nibbles`).
struct Packed {
  int16_t* numbers;  // [tokens, padded depth]
  int32_t* offsets;  // [tokens, padded depth / kStep, kLanes]: what the sums of an int4 matrix begin with
  float* scales;     // [tokens, chunks]
  int64_t padded, chunks;

  static int64_t padded_to(int64_t depth) { return (depth + kStep - 1) / kStep * kStep; }
  static int64_t bytes_of_token(int64_t depth) {
    const int64_t chunks = (depth + kChunk - 1) / kChunk;
    return (padded_to(depth) * 2 + padded_to(depth) / kStep * kLanes * 4 + chunks * 4 + 63) / 64 * 64;
  }
  Packed(char* memory, int64_t tokens, int64_t depth)
      : padded(padded_to(depth)), chunks((depth + kChunk - 1) / kChunk) {
    numbers = reinterpret_cast<int16_t*>(memory);
    offsets = reinterpret_cast<int32_t*>(numbers + tokens * padded);
    scales = reinterpret_cast<float*>(offsets + tokens * (padded / kStep) * kLanes);
  }
  const int16_t* at(int64_t token, int64_t k) const { return numbers + token * padded + k; }
  const int32_t* offsets_at(int64_t token, int64_t k) const {
    return offsets + (token * padded + k) / kStep * kLanes;
  }
};

// The scale of some numbers, and what they are multiplied with to become whole. Not a number where one of them is none.
INLINE float scale_of(const float* x, int64_t size, float& inverse) {
  Floats highest[kPieces] = {}, nothing[kPieces] = {};
  float top = 0, none = 0;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    for (int piece = 0; piece < kPieces; ++piece) {
      const Floats value = load(x + i + piece * kWidth);
      highest[piece] = larger(highest[piece], larger(value, -value));
      nothing[piece] += value * 0.0f;
    }
  for (; i < size; ++i) {
    top = std::max(top, std::fabs(x[i]));
    none += x[i] * 0.0f;
  }
  for (int piece = 0; piece < kPieces; ++piece)
    for (int lane = 0; lane < kWidth; ++lane) top = std::max(top, highest[piece][lane]);
  none += fold(nothing);
  inverse = top > 1e-30f ? kLargest / top : 0.0f;
  return (top > 1e-30f ? top / kLargest : 0.0f) + none;
}

// Rounds to the nearest, to the even one of two that are equally near.
INLINE void to_whole(const float* x, int64_t size, float inverse, int16_t* to) {
  using Half = int16_t __attribute__((vector_size(2 * kWidth)));
  constexpr float magic = 12582912.0f;  // 1.5 * 2^23
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) {
    const Ints whole = (Ints)(load(x + i) * inverse + magic) - 0x4B400000;
    const Half half = __builtin_convertvector(whole, Half);
    std::memcpy(to + i, &half, sizeof(half));
  }
  for (; i < size; ++i) to[i] = static_cast<int16_t>(std::nearbyint(x[i] * inverse));
}

// 128 numbers in the order of `Nibbles`. A sum begins with -8 times the numbers, since bits mean eight less.
void order_for_nibbles(const int16_t* from, int16_t* to, int32_t* offsets) {
  for (int64_t group = 0; group < 4; ++group, from += kGroup) {
    for (int64_t pair = 0; pair < 8; ++pair) {
      int16_t* word = to + group * 8 + pair;
      word[0] = from[2 * pair];
      word[kGroup] = from[16 + 2 * pair];
      word[2 * kGroup] = from[2 * pair + 1];
      word[3 * kGroup] = from[17 + 2 * pair];
    }
    for (int64_t lane = 0; lane < 4; ++lane) {
      int32_t sum = 0;
      for (int64_t i = 4 * lane; i < 4 * lane + 4; ++i) sum += from[i] + from[16 + i];
      offsets[4 * group + lane] = -8 * sum;
    }
  }
}

void pack(const float* x, int64_t depth, bool is_int4, const Packed& to, int64_t token) {
  for (int64_t k = 0; k < depth; k += kChunk) {
    const int64_t size = std::min(depth - k, kChunk);
    int16_t* numbers = to.numbers + token * to.padded + k;
    int16_t ordered[kChunk];
    int16_t* whole = is_int4 ? ordered : numbers;
    float inverse;
    to.scales[token * to.chunks + k / kChunk] = scale_of(x + k, size, inverse);
    to_whole(x + k, size, inverse, whole);
    std::fill(whole + size, whole + Packed::padded_to(size), int16_t{0});
    if (!is_int4) continue;
    for (int64_t i = 0; i < size; i += kStep)
      order_for_nibbles(ordered + i, numbers + i, const_cast<int32_t*>(to.offsets_at(token, k + i)));
  }
}

// Rows of int8, 32 numbers at a time.
struct WholeBytes {
  const int8_t* values;
  int64_t stride, distance = 0;  // distance: bytes that are fetched ahead

  INLINE WholeBytes tile(int64_t n, int64_t num_rows, Apart apart) const {
    return {values + n * stride, apart.rows * stride, apart.distance(num_rows, stride)};
  }

  template <int T, int R>
  INLINE void add(const int16_t* x, int64_t x_stride, const int8_t* w, int64_t w_stride,
                  Ints (&sums)[T][R][kPieces]) const {
    for (int piece = 0; piece < kPieces; ++piece) {
      Shorts numbers[T];
      for (int t = 0; t < T; ++t) numbers[t] = load<Shorts>(x + t * x_stride + piece * 2 * kWidth);
      for (int r = 0; r < R; ++r) {
        const Shorts weights = widen_to_shorts(w + r * w_stride + piece * 2 * kWidth);
        if (piece == 0) fetch_ahead(w + r * w_stride, distance);
        for (int t = 0; t < T; ++t) sums[t][r][piece] = add_pairs(weights, numbers[t], sums[t][r][piece]);
      }
    }
  }

  template <int T, int R>
  INLINE void chunk(const Packed& x, int64_t token, int64_t k, int64_t size, Floats (&to)[T][R][kPieces]) const {
    Ints sums[T][R][kPieces] = {};
    const int16_t* numbers = x.at(token, k);
    const int8_t* w = values + k;
    int64_t i = 0;
    for (; i + kGroup <= size; i += kGroup) add(numbers + i, x.padded, w + i, stride, sums);
    if (i < size) {
      int8_t rest[R][kGroup] = {};
      for (int r = 0; r < R; ++r) std::memcpy(rest[r], w + r * stride + i, size - i);
      add(numbers + i, x.padded, rest[0], kGroup, sums);
    }
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < R; ++r)
        for (int piece = 0; piece < kPieces; ++piece)
          to[t][r][piece] = __builtin_convertvector(sums[t][r][piece], Floats);
  }
};

// Rows of int4, four groups of 32 at a time: 64 bytes, taken as 32 words of four numbers each. A word has numbers
// 2j, 16 + 2j, 2j + 1, 17 + 2j of its group. Four lanes of the sums belong to a group, and are multiplied by its scale.
struct Nibbles {
  const uint8_t* values;
  const uint16_t* scale;
  int64_t groups, left;              // of a row; from the last row of a tile to the end of the matrix
  int64_t stride = 0, distance = 0;  // groups from one row of a tile to the next; bytes that are fetched ahead
  static constexpr int64_t kBytes = kGroup / 2;

  INLINE Nibbles tile(int64_t n, int64_t num_rows, Apart apart) const {
    const int64_t first = n * groups, between = apart.rows * groups, distance = apart.distance(num_rows, groups * kBytes);
    return {values + first * kBytes, scale + first, groups, left - first - (num_rows - 1) * between, between, distance};
  }

  static INLINE Floats scales_of(const uint16_t* from, [[maybe_unused]] int piece) {
#if defined(GPTWORKS_AVX512)
    const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    const __m128i four = _mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16);
    const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return (Floats)_mm512_permutexvar_epi32(lanes, _mm512_castsi128_si512(four));
#else
    Floats found;
    for (int lane = 0; lane < kWidth; ++lane) found[lane] = widen_one(from[(piece * kWidth + lane) / 4]);
    return found;
#endif
  }

  template <int T, int R>
  INLINE void add(const int16_t* x, int64_t x_stride, const int32_t* offsets, const uint8_t* w, int64_t w_stride,
                  const uint16_t* scale, int64_t scale_stride, Floats (&sums)[T][R][kPieces]) const {
    const Shorts lowest = Shorts{} + 15;
    for (int piece = 0; piece < kPieces; ++piece)
      for (int r = 0; r < R; ++r) {
        using Unsigned = uint16_t __attribute__((vector_size(4 * kWidth)));
        const Unsigned words = load<Unsigned>(w + r * w_stride + piece * 4 * kWidth);
        if (piece == 0) fetch_ahead(w + r * w_stride, distance);
        const Shorts parts[4] = {(Shorts)words & lowest, (Shorts)(words >> 4) & lowest, (Shorts)(words >> 8) & lowest,
                                 (Shorts)(words >> 12)};
        const Floats scales = scales_of(scale + r * scale_stride, piece);
        for (int t = 0; t < T; ++t) {
          Ints sum = load<Ints>(offsets + t * (x_stride / kStep) * kLanes + piece * kWidth);
          for (int part = 0; part < 4; ++part)
            sum = add_pairs(parts[part], load<Shorts>(x + t * x_stride + part * kGroup + piece * 2 * kWidth), sum);
          sums[t][r][piece] = fused(__builtin_convertvector(sum, Floats), scales, sums[t][r][piece]);
        }
      }
  }

  template <int T, int R>
  INLINE void chunk(const Packed& x, int64_t token, int64_t k, int64_t size, Floats (&to)[T][R][kPieces]) const {
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < R; ++r)
        for (int piece = 0; piece < kPieces; ++piece) to[t][r][piece] = Floats{};
    const int64_t first = k / kGroup, end = (size + kGroup - 1) / kGroup;
    int64_t group = 0;
    const auto step = [&](const uint8_t* w, int64_t w_stride, const uint16_t* scales, int64_t scale_stride) {
      const int64_t at = k + group * kGroup;
      add(x.at(token, at), x.padded, x.offsets_at(token, at), w, w_stride, scales, scale_stride, to);
    };
    // Behind the end of a row the token has zeros: what is read there, of the next row, is multiplied by them.
    const int64_t direct = left - groups >= 3 ? end : end / 4 * 4;
    for (; group < direct; group += 4)
      step(values + (first + group) * kBytes, stride * kBytes, scale + first + group, stride);
    if (group >= end) return;
    uint8_t rest[R][4 * kBytes] = {};
    uint16_t scales[R][4] = {};
    for (int r = 0; r < R; ++r) {
      const int64_t from = first + r * stride + group;
      std::memcpy(rest[r], values + from * kBytes, (end - group) * kBytes);
      std::memcpy(scales[r], scale + from, (end - group) * sizeof(uint16_t));
    }
    step(rest[0], 4 * kBytes, scales[0], 4);
  }
};

template <int T, int R, typename Rows>
INLINE void whole_tile(const Product& product, const Packed& x, const Rows& all, int64_t token, int64_t n,
                       Apart apart = {1}) {
  const Rows rows = all.tile(n, R, apart);
  float totals[T][R] = {};
  const int64_t depth = product.matrix.depth;
  for (int64_t k = 0; k < depth; k += kChunk) {
    Floats sums[T][R][kPieces];
    rows.chunk(x, token, k, std::min(depth - k, kChunk), sums);
    for (int t = 0; t < T; ++t) {
      const float scale = x.scales[(token + t) * x.chunks + k / kChunk];
      for (int r = 0; r < R; ++r) totals[t][r] += fold(sums[t][r]) * scale;
    }
  }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) product.finish(token + t, n + r * apart.rows, totals[t][r]);
}

template <typename Rows>
void multiply_whole(const Product& product, const Packed& x, const Rows& rows) {
  const int64_t outputs = product.matrix.outputs, tokens = product.tokens;
  if (tokens <= kFew) {
    const auto one = [&](auto T, auto R, int64_t token, int64_t n, Apart apart) {
      whole_tile<T, R>(product, x, rows, token, n, apart);
    };
    for_tiles<kStreams>(tokens, outputs_of_thread(outputs, tokens), product.is_apart, one);
    return;
  }
  const int64_t blocks = (outputs + kBlock - 1) / kBlock, panels = (tokens + kPanel - 1) / kPanel;
#pragma omp for schedule(dynamic)
  for (int64_t item = 0; item < blocks * panels; ++item) {
    const int64_t n = item / panels * kBlock, first = item % panels * kPanel;
    const int64_t end = std::min(n + kBlock, outputs), last = std::min(first + kPanel, tokens);
    for (int64_t token = first; token < last; token += kTokens)
      with_constant<kTokens>(std::min<int64_t>(last - token, kTokens), [&](auto T) {
        int64_t r = n;
        for (; r + kOutputs <= end; r += kOutputs) whole_tile<T, kOutputs>(product, x, rows, token, r);
        for (; r < end; ++r) whole_tile<T, 1>(product, x, rows, token, r);
      });
  }
}

void multiply_whole(const Product& product, const Packed& x) {
  const Matrix& matrix = product.matrix;
  const int64_t groups = (matrix.depth + kGroup - 1) / kGroup;
  if (matrix.type == kInt8)
    multiply_whole(product, x, WholeBytes{static_cast<const int8_t*>(matrix.values), matrix.depth});
  else
    multiply_whole(product, x, Nibbles{static_cast<const uint8_t*>(matrix.values),
                                       static_cast<const uint16_t*>(matrix.scale),
                                       groups, matrix.outputs * groups});
}

}  // namespace
