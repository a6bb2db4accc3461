// Copies pages into larger blocks. Pure data movement, so one build serves every instruction set.
#include <omp.h>

#include <cstring>

#include "kernels.h"

namespace kvr {

void stage_pages(const PageStaging& s) {
  const int64_t row = int64_t(s.page_size) * s.element_size;     // of transposed keys
  const int64_t half = row * s.head_size;                        // a page's keys, or its values
  const int64_t block_row = row * s.pages_per_block, block_half = half * s.pages_per_block;
  const auto* source = static_cast<const char*>(s.source);
  auto* target = static_cast<char*>(s.target);
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t i = 0; i < s.num_pages; ++i) {
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      const int64_t block = i / s.pages_per_block, part = i % s.pages_per_block;
      const char* from = source + (s.pages[i] * int64_t(s.kv_heads) + h) * 2 * half;
      char* to = target + (block * s.kv_heads + h) * 2 * block_half;
      for (int c = 0; c < s.head_size; ++c)
        std::memcpy(to + c * block_row + part * row, from + c * row, row);
      std::memcpy(to + block_half + part * half, from + half, half);
    }
  }
}

}  // namespace kvr
