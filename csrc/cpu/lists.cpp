// Lists of tokens of what another layer has selected. Numbers only, so one build serves every
// instruction set.
#include "kernels.h"

namespace kvr {

void list_context(const TokenListing& listing) {
  const DecodeRows& rows = listing.rows;
  const ContextSelector& selector = listing.selector;
  const int heads = listing.kv_heads, size = selector.index.page_size;
#pragma omp parallel for if (rows.rows > 1)
  for (int r = 0; r < rows.rows; ++r) {
    const int32_t* blocks = rows.block_table + r * rows.block_table_stride;
    const int32_t* chosen = selector.selected + int64_t(rows.seats[r]) * selector.max_selected;
    int32_t* lists = rows.lists + int64_t(r) * heads * rows.lists_stride;
    int at = 0;
    const auto append = [&](int32_t token) {
      const int32_t first = blocks[token / size] * heads * size + token % size;
      for (int h = 0; h < heads; ++h) lists[h * rows.lists_stride + at] = first + h * size;
      ++at;
    };
    for (int t = 0; t < rows.sink[r]; ++t) append(t);
    for (int i = 0; i < rows.select[r]; ++i) append(chosen[i]);
    for (int t = rows.seq_lens[r] - rows.window[r]; t < rows.seq_lens[r]; ++t) append(t);
    std::fill_n(rows.lengths + int64_t(r) * heads, heads, at);
  }
}

}  // namespace kvr
