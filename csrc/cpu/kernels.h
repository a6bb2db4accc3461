// The retrieval ops of the CPU platform: what they take, independent of the instruction set.
//
// The specification of every op is its plain-torch twin in vllm_kvretrieval/kernels/reference.py.
// Nothing here knows PyTorch: pointers, strides and sizes only.
#pragma once

#include <cstdint>
#include <vector>

namespace kvr {

enum class DType : int32_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// The requests of a step that decode one token each; the same for every layer.
struct DecodeRows {
  int32_t rows;
  const int32_t* block_table;    // [rows, block_table_width]; page ids in context order
  int64_t block_table_width, block_table_stride;
  const int32_t* seq_lens;       // [rows]; tokens in context, the new one included
  const int32_t* slots;          // [rows]; the request's entry in the state tensors
  const int32_t* sink_pages;     // [rows]
  const int32_t* window_pages;   // [rows]
  const int32_t* select_pages;   // [rows]; negative: attend to the whole context
  const float* threshold;        // [rows]; correction threshold tau
  const uint8_t* fresh;          // [rows]; no previous decode step: correct every head
  int64_t* corrected;            // [corrected_slots]; counts corrected heads
  int64_t corrected_slots;
  int32_t* page_table;           // out, [page_table_rows >= rows * kv_heads, page_table_width]
  int64_t page_table_rows, page_table_width, page_table_stride;
};

// What one layer keeps: its page index and, per running request, the previous decode step.
struct LayerState {
  DType dtype;
  int32_t kv_heads, group, head_size, page_size;
  int32_t summary_size;          // tokens per entry of the index; page_size over a power of two
  float scale;                   // softmax scale of the layer
  void* index;                   // [index_entries, kv_heads, 2 (min, max), head_size]
  int64_t index_entries;         // pages * page_size / summary_size
  void* prev_query;              // [state_slots, kv_heads * group, head_size]
  int32_t* prev_selection;       // [state_slots, kv_heads, max_selected]
  int32_t state_slots, max_selected;
};

// New keys and where they were written.
struct IndexUpdate {
  const LayerState& layer;
  const void* keys;              // [num_tokens, kv_heads, head_size]
  int64_t key_stride;            // elements from one token to the next
  const int64_t* slot_mapping;   // [num_tokens]; page * page_size + offset, negative = padding
  int64_t num_tokens;
};

struct DecodePlan {
  const DecodeRows& rows;
  const LayerState& layer;
  const void* query;             // [rows, kv_heads * group, head_size]
  int64_t query_stride;          // elements from one row to the next
};

// How a (page, KV head) of vLLM's CPU cache holds its keys, in front of its values.
enum class KeyLayout : int32_t {
  kTransposed = 0,               // [head_size, page_size]
  kAmx = 1,                      // words of 4 bytes: [page_size / 16, words of a key, 16 tokens]
};

// Pages whose keys are in the cache, to be taken into the index.
struct PageIndexing {
  const LayerState& layer;
  const void* cache;             // [pages, kv_heads, 2 * page_size * head_size]
  KeyLayout layout;
  const int32_t* pages;          // [num_pages], distinct
  const int32_t* lengths;        // [num_pages]; tokens in each, 1..page_size
  int64_t num_pages;
};

// Pages of one layer, to be laid out as larger blocks. In both, a (page, KV head) holds its keys
// transposed, [head_size, tokens], and then its values, [tokens, head_size].
struct PageStaging {
  const void* source;            // [pages, kv_heads, 2 * page_size * head_size]
  const int32_t* pages;          // [num_pages]; a multiple of pages_per_block
  int64_t num_pages;
  void* target;                  // [num_pages / pages_per_block, kv_heads, ...]
  int32_t pages_per_block, kv_heads, page_size, head_size, element_size;
};
void stage_pages(const PageStaging&);

// The functions that one instruction set provides.
struct KernelTable {
  const char* isa;
  void (*update_index)(const IndexUpdate&);
  void (*plan_decode)(const DecodePlan&);
  void (*index_pages)(const PageIndexing&);
};

// The fastest table that this machine runs.
const KernelTable& kernels();
// A table by name ("avx512_bf16", "avx512", "avx2", "portable"), or null where it is not compiled in
// or cannot run.
const KernelTable* kernels_for(const char* isa);
// The names of all tables compiled in, fastest first, whether they run here or not.
std::vector<const char*> compiled_isas();

}  // namespace kvr
