// Laying out a page as a part of a larger block.
#pragma once

#include <cstdint>

namespace kvr {

// A (page, KV head) of kTransposed layout, which becomes part `part` of `parts` of a block.
void lay_out_unit(const char* unit, char* block, int64_t part, int64_t parts, int page_size,
                  int head_size, int element_size);

}  // namespace kvr
