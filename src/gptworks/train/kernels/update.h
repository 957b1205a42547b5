// AdamW over all parameters at once, with the clipping of the gradients in the same pass, as torch's fused kernel has it.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

struct Update {
  int64_t count;  // of tensors, and of each:
  float* const* parameters;
  const float* const* gradients;
  float* const* means;    // of the gradients,
  float* const* squares;  // and of their squares
  const int64_t* sizes;
  const float* kept;  // what decay leaves of a parameter
  float factor;       // of the gradients
  float beta2, new_mean, new_square, eps;  // new_mean, new_square: 1 - beta, which fp32 would round
  float step_size;   // the learning rate by the correction of the means
  float correction;  // the root of that of the squares
};

namespace {

inline void update_some(const Update& update, int64_t tensor, int64_t from, int64_t to) {
  float* __restrict parameter = update.parameters[tensor];
  const float* __restrict gradient = update.gradients[tensor];
  float* __restrict mean = update.means[tensor];
  float* __restrict square = update.squares[tensor];
  const float kept = update.kept[tensor], factor = update.factor, eps = update.eps;
  const float beta2 = update.beta2, new_mean = update.new_mean, new_square = update.new_square;
  const float step_size = update.step_size, correction = update.correction;
#pragma omp simd
  for (int64_t i = from; i < to; i++) {
    const float g = gradient[i] * factor;
    mean[i] += new_mean * (g - mean[i]);
    square[i] = square[i] * beta2 + new_square * g * g;
    parameter[i] = parameter[i] * kept - step_size * mean[i] / (std::sqrt(square[i]) / correction + eps);
  }
}

// Each thread has as many numbers, wherever a tensor ends.
inline void update_share(const Update& update) {
  int64_t total = 0;
  for (int64_t tensor = 0; tensor < update.count; tensor++) total += update.sizes[tensor];
  const int64_t threads = omp_get_num_threads(), mine = omp_get_thread_num();
  const int64_t from = total * mine / threads / 16 * 16;
  const int64_t to = mine + 1 == threads ? total : total * (mine + 1) / threads / 16 * 16;
  int64_t begin = 0;
  for (int64_t tensor = 0; tensor < update.count && begin < to; tensor++) {
    const int64_t end = begin + update.sizes[tensor];
    if (end > from) update_some(update, tensor, std::max(from, begin) - begin, std::min(to, end) - begin);
    begin = end;
  }
}

}  // namespace
