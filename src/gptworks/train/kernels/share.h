// What a thread has of so many things that all threads share.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace {

struct Share {  // in whole units
  int64_t from, to;
  Share(int64_t size, int64_t unit = 1) {
    const int64_t units = (size + unit - 1) / unit, threads = omp_get_num_threads(), mine = omp_get_thread_num();
    from = std::min(size, units * mine / threads * unit);
    to = std::min(size, units * (mine + 1) / threads * unit);
  }
  int64_t size() const { return to - from; }
};

}  // namespace
