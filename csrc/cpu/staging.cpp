// Copies of tokens and pages. Pure data movement, so one build serves every instruction set.
#include <omp.h>

#include <cstring>

#include "kernels.h"

namespace kvr {

namespace {

constexpr int64_t kSerialHeads = 256;  // keys below which waking the other threads costs more

// Rows of a page, [tokens, 2 * d] -> keys [d, stride] and values [tokens, d].
template <class Element>
void spread_rows(const char* page, int tokens, int d, char* keys, int64_t stride, char* values) {
  const auto* row = reinterpret_cast<const Element*>(page);
  auto* columns = reinterpret_cast<Element*>(keys);
  for (int t = 0; t < tokens; ++t, row += 2 * d) {
    for (int c = 0; c < d; ++c) columns[c * stride + t] = row[c];
    std::memcpy(values + t * d * sizeof(Element), row + d, d * sizeof(Element));
  }
}

}  // namespace

void write_rows(const RowWrite& w) {
  const int64_t size = int64_t(w.head_size) * w.element_size;
  const auto* keys = static_cast<const char*>(w.keys);
  const auto* values = static_cast<const char*>(w.values);
#pragma omp parallel for schedule(static) if (w.num_tokens * w.kv_heads > kSerialHeads)
  for (int64_t t = 0; t < w.num_tokens; ++t) {
    const int64_t slot = w.slot_mapping[t];
    if (slot < 0) continue;
    const int64_t page = slot / w.page_size, offset = slot % w.page_size;
    for (int64_t h = 0; h < w.kv_heads; ++h) {
      char* row = static_cast<char*>(w.cache) +
                  ((page * w.kv_heads + h) * w.page_size + offset) * 2 * size;
      std::memcpy(row, keys + t * w.key_stride * w.element_size + h * size, size);
      std::memcpy(row + size, values + t * w.value_stride * w.element_size + h * size, size);
    }
  }
}

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
      if (s.rows) {
        const auto spread = s.element_size == 4 ? spread_rows<uint32_t> : spread_rows<uint16_t>;
        spread(from, s.page_size, s.head_size, to + part * row,
               int64_t(s.page_size) * s.pages_per_block, to + block_half + part * half);
        continue;
      }
      for (int c = 0; c < s.head_size; ++c)
        std::memcpy(to + c * block_row + part * row, from + c * row, row);
      std::memcpy(to + block_half + part * half, from + half, half);
    }
  }
}

}  // namespace kvr
