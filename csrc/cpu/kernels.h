// The arguments of the ops of the CPU platform, for all instruction sets.
//
// The specification of every op of retrieval is its plain-torch twin in tests/spec/ops.py. This code
// does not use PyTorch; it takes pointers, strides and sizes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace kvr {

// The number of scores (floats) that are held at once, unless a single row has more. Each calling
// thread keeps memory for them.
constexpr int64_t kMostScores = 32 << 20;

enum class DType : int32_t { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2 };

// How the units between sink and window of a row are found; see kernels/rows.py.
enum class Mode : uint8_t {
  kSelect = 0,                   // scores select them
  kGiven = 1,                    // they are in the selection, which stays as it is
  kWhole = 2,                    // the row attends to the whole context
};

// The requests of a step that decode; the same for every layer. A request may have draft tokens behind its
// new one, which this step verifies. It selects once, by the query of its new token.
struct DecodeRows {
  int32_t rows;
  const int32_t* block_table;    // [rows, block_table_width]; page ids in context order
  int64_t block_table_width, block_table_stride;
  const int32_t* seq_lens;       // [rows]; tokens in the context, including the new one and drafts
  const int32_t* starts;         // [rows + 1]; the first query of each row; null: each has one
  const int32_t* seats;          // [rows]; the entry of the request in per-request state
  const int32_t* sink;           // [rows]; in units of selection: pages, or tokens
  const int32_t* window;         // [rows]
  const Mode* mode;              // [rows]
  const int32_t* select;         // [rows]; units that rows of mode kSelect select
  const float* threshold;        // [rows]; correction threshold tau
  const uint8_t* fresh;          // [rows]; no previous decode step: correct every head
  const float* mass;             // [rows]; share of the scores that is enough; 1: all of `select`
  int64_t* corrected;            // [corrected_seats]; counts corrected heads
  int64_t corrected_seats;
  int64_t* spared;               // [spared_seats]; counts units that mass made needless
  int64_t spared_seats;
  int32_t* lists;                // out, [lists_rows >= rows * kv_heads, lists_width]
  int64_t lists_rows, lists_width, lists_stride;
  int32_t* lengths;              // out, [lengths_size >= rows * kv_heads]; tokens of each list
  int64_t lengths_size;
  bool per_token;                // whether units of selection are single tokens

  int32_t drafts(int row) const { return starts == nullptr ? 0 : starts[row + 1] - starts[row] - 1; }
  int32_t selected_by(int row) const { return seq_lens[row] - drafts(row); }  // tokens the query sees
  bool scores(int row) const { return mode[row] == Mode::kSelect && select[row] > 0; }
  int32_t unit(int32_t page_size) const { return per_token ? 1 : page_size; }  // tokens
  int32_t units(int row, int32_t page_size) const {  // of the context
    return (seq_lens[row] + unit(page_size) - 1) / unit(page_size);
  }
  int32_t between(int row, int32_t page_size) const {  // sink and window
    return units(row, page_size) - sink[row] - window[row];
  }
};

// The layout of the keys of a (page, KV head) of vLLM's CPU cache, which come before its values.
enum class KeyLayout : int32_t {
  kTransposed = 0,               // [head_size, page_size]
  kAmx = 1,                      // words of 4 bytes: [page_size / 16, words of a key, 16 tokens];
                                 // values are as in PageStaging
  kRows = 2,                     // [page_size, 2 * head_size], each key before its value; ours
};

// The kinds of indexes that have no line in KVR_INDEXES (index/table.h).
constexpr int32_t kOutside = -1;  // an index of another package, which builds and scores it
constexpr int32_t kNoIndex = -2;
constexpr int kMostParameters = 4;

// How the scores of the query heads of a KV head become one; see pooling.h.
enum class Pooling : int32_t { kMeanSoftmax = 0, kRelative = 1, kMax = 2, kSum = 3, kMaxSoftmax = 4 };

// The index of one layer. It has a record for every entry: `entry_tokens` tokens of a page, in a KV
// head, or all tokens of several pages that lie side by side in the cache (low_rank).
struct Index {
  int32_t kind;                  // the place in KVR_INDEXES, or one of the above
  DType dtype;                   // of the KV cache, and of fields of records with its precision
  int32_t kv_heads, head_size, page_size;
  int32_t entry_tokens;          // page_size over or times a power of two
  float parameters[kMostParameters];  // by the names that the index's struct gives them
  bool grows;                    // whether unfinished entries have records
  bool per_token;                // whether single tokens have scores
  uint8_t* records;              // [entries, kv_heads, record_bytes]
  int64_t entries;               // pages * page_size / entry_tokens
  int64_t record_bytes;
  const void* cache;             // vLLM's, [pages, kv_heads, 2 * page_size * head_size], or null
  KeyLayout layout;
  bool means;                    // whether a record ends with means of its values (value_mean.h)

  int parts() const { return std::max(page_size / entry_tokens, 1); }  // entries of a page
  int spans() const { return std::max(entry_tokens / page_size, 1); }  // pages of an entry
  int64_t pages() const { return entries / parts() * spans(); }
  int mean_bytes() const { return 2 + head_size; }
  int64_t scored_bytes() const { return record_bytes - (means ? spans() * mean_bytes() : 0); }
  // The number of entries of a context that have records; unfinished ones do if records grow.
  int entries_of(int32_t seq_len) const {
    return (seq_len + (grows ? entry_tokens - 1 : 0)) / entry_tokens;
  }
  uint8_t* record(int64_t entry, int head) const {
    return records + (entry * kv_heads + head) * record_bytes;
  }
};

// How a layer selects, and what it remembers of the last decode step of each request.
struct Chooser {
  Index index;
  Pooling pooling;
  int32_t group;                 // query heads per KV head
  float scale;                   // softmax scale of the layer
  int32_t rerank;                // candidates per selected unit, scored again by their keys; 0: none
  void* prev_query;              // [seats, kv_heads * group, head_size]
  int32_t* selected;             // [seats, kv_heads, max_selected]; positions of units in the context
  int32_t seats, max_selected;
  const int32_t* counts;         // [seats, kv_heads]; units that a KV head selects; null: see the row
  int64_t count_stride;          // from one seat to the next
  float remainder;               // the share of the attention below which entries have their means stand
                                 // for them; 0: none has
  double outliers;               // the share of the selected units that are outliers (index/landmark.h)

  // The number of units between sink and window that a KV head attends to.
  int32_t select(const DecodeRows& rows, int row, int head) const {
    const int32_t between = rows.between(row, index.page_size);
    if (rows.mode[row] == Mode::kWhole) return between;
    if (rows.mode[row] == Mode::kSelect && (counts == nullptr || rows.select[row] == 0))
      return rows.select[row];
    return std::min(counts[rows.seats[row] * count_stride + head], between);
  }
};

// How a filter layer selects tokens for the layers after it, the same tokens for all their heads.
struct ContextSelector {
  Index index;                   // over the keys of the layer
  int32_t group;                 // query heads per KV head
  float scale;                   // softmax scale of the layer
  float softcap;                 // logits become softcap * tanh(logit / softcap); 0: they stay
  const float* sinks;            // [kv_heads * group]; logits beside those of the tokens; null: none
  int32_t* selected;             // [seats, max_selected]; positions of tokens in the context
  int32_t seats, max_selected;
};

// The latest queries of some requests, by which a filter selects. Sink, window and selection are
// counted in tokens.
struct ContextSelection {
  const DecodeRows& rows;
  const ContextSelector& selector;
  const void* query;             // [rows, queries, kv_heads * group, head_size], the latest last
  int64_t query_stride;          // elements from one query to the next
  int32_t queries;               // per row
  const float* weights;          // [rows, queries]; 0: there is no such query
  // [rows, queries, rating_stride]; the logarithm of the highest attention that any head gives a
  // token. If other workers have some heads, a first call writes the ratings of the heads here and
  // selects nothing, and a second one (`rated`) selects by the highest ratings of all workers. Null:
  // one call does both.
  float* ratings;
  int64_t rating_stride;
  bool rated;
};

// The lists of tokens of layers that follow a filter.
struct TokenListing {
  const DecodeRows& rows;
  const ContextSelector& selector;
  int32_t kv_heads;              // of the layers that follow
};
void list_context(const TokenListing&);

// New keys, and the places in the cache where they were written.
struct IndexUpdate {
  const Index& index;
  const void* keys;              // [num_tokens, kv_heads, head_size]
  int64_t key_stride;            // elements from one token to the next
  const int64_t* slot_mapping;   // [num_tokens]; page * page_size + offset, negative = padding
  int64_t num_tokens;
};

struct DecodePlan {
  const DecodeRows& rows;
  const Chooser& chooser;
  const void* query;             // [rows, kv_heads * group, head_size]
  int64_t query_stride;          // elements from one row to the next
  const float* scores;           // of kOutside: [rows, kv_heads, group, score_stride], of entries or
                                 // of tokens; else null
  int64_t score_stride;
  float* rest_values;            // out, [rows, kv_heads * group, head_size]: the remainder's values, or null
  float* rest_lse;               // out, [rows, kv_heads * group]: the logarithm of its attention
};

// Pages of the cache that are to be taken into the index.
struct PageIndexing {
  const Index& index;
  const int32_t* pages;          // [num_pages], distinct
  const int32_t* lengths;        // [num_pages]; tokens in each, 1..page_size
  int64_t num_pages;
};

// Entries whose keys are to be read.
struct KeyReading {
  const Index& index;
  const int64_t* entries;        // [num_entries]
  int64_t num_entries;
  float* keys;                   // out, [num_entries, entry_tokens, kv_heads, head_size]
};

// New keys and values for a cache.
struct CacheWrite {
  const void *keys, *values;     // [num_tokens, kv_heads, head_size]
  int64_t key_stride, value_stride;  // elements from one token to the next
  const int64_t* slot_mapping;   // [num_tokens]; page * page_size + offset, negative = padding
  int64_t num_tokens;
  void* cache;                   // [pages, kv_heads, 2 * page_size * head_size]
  int32_t kv_heads, page_size, head_size, element_size;
  KeyLayout layout;              // kAmx: elements of 2 bytes
};
void write_cache(const CacheWrite&);

// Pages of one layer that are to be laid out as larger blocks: from kTransposed (keys [head_size,
// tokens], then values [tokens, head_size]) to kTransposed, or from kRows to kTransposed or kAmx. In
// kAmx values are words of two tokens, [head_size / 16, tokens / 2, 16 channels].
struct PageStaging {
  const void* source;            // [source_pages, kv_heads, 2 * page_size * head_size]
  int64_t source_pages;
  const int32_t* pages;          // [num_pages]; a multiple of pages_per_block
  int64_t num_pages;
  void* target;                  // [blocks, kv_heads, ...]
  int64_t blocks;
  int32_t pages_per_block, kv_heads, page_size, head_size, element_size;
  KeyLayout from, to;            // kAmx: elements of 2 bytes, pages of a multiple of 16 tokens
};
void stage_pages(const PageStaging&);

// Tokens of a token-major cache that are to be laid out as blocks. Each row begins a new block.
struct TokenStaging {
  const void* source;            // [cache_tokens, 2 * head_size]
  int64_t cache_tokens;
  const int32_t* entries;        // [rows * kv_heads, width]; numbers of tokens in source
  int64_t width, stride;
  const int32_t* lengths;        // [rows * kv_heads]; equal for all heads of a row
  void* target;                  // [blocks, kv_heads, 2 * block_tokens * head_size]; out
  int64_t blocks;
  int32_t rows, block_tokens, kv_heads, head_size, element_size;
  KeyLayout to;                  // kTransposed, or kAmx with elements of 2 bytes

  int64_t blocks_of(int64_t row) const {
    return (lengths[row * kv_heads] + block_tokens - 1) / block_tokens;
  }
};
void stage_tokens(const TokenStaging&);

// Attention of rows that decode. A (page, KV head) is a unit; its tokens have the numbers unit * page_size +
// offset. An entry of a list is `run` adjacent tokens. A row's last query sees all tokens of its lists, and
// the query before one token less.
struct Attention {
  DType dtype;
  KeyLayout layout;              // kAmx: elements of 2 bytes
  int32_t rows, kv_heads, group, head_size, page_size;
  const void* cache;             // [units, 2 * page_size * head_size]
  int64_t cache_tokens;
  const int32_t* starts;         // [rows + 1]; the first query of each row; null: each has one
  const void* query;             // [queries, kv_heads * group, head_size]
  int64_t query_stride;          // elements from one query to the next
  void* out;                     // [queries, kv_heads * group, head_size]
  int64_t out_stride;
  bool out_floats;               // whether out is of floats, whatever the dtype
  float* lse;                    // out, [queries, kv_heads * group], or null
  float* weights;                // out, [rows, kv_heads * group, weight_stride], or null; of single queries
  int64_t weight_stride;
  // [rows * kv_heads, entries_width]. If all KV heads of a row share a list: [rows, entries_width],
  // pages, of which each KV head reads its unit.
  const int32_t* entries;
  int64_t entries_width, entries_stride;
  bool per_head;
  const int32_t* lengths;        // [rows * kv_heads]; tokens; the last entry may have fewer than run
  int32_t run;                   // a power of two; 16 or more, except for kRows
  float scale;
  float softcap;                 // logits become softcap * tanh(logit / softcap); 0: they stay
  const float* sinks;            // [kv_heads * group]; a further logit, with a value of zero; or null
  const float* rest_values;      // [queries, kv_heads * group, head_size]; a further part of the softmax, or null
  const float* rest_lse;         // [queries, kv_heads * group]; the logarithm of its sum of exponentials

  int first_query(int row) const { return starts == nullptr ? row : starts[row]; }
  int queries(int row) const { return first_query(row + 1) - first_query(row); }
};

// Attention of prompts: sequences of queries, each with lists of pages. A query sees the first tokens
// of its list, and the next query one token more.
struct PromptAttention {
  DType dtype;
  KeyLayout layout;              // kAmx: elements of 2 bytes
  int32_t sequences, kv_heads, group, head_size, page_size;
  const void* cache;             // [units, 2 * page_size * head_size]; a unit is a (page, KV head)
  int64_t units;
  const void* query;             // [tokens, kv_heads * group, head_size]
  int64_t query_stride;          // elements from one token to the next
  void* out;                     // [tokens, kv_heads * group, head_size]
  int64_t out_stride, tokens;
  float* lse;                    // out, [tokens, kv_heads * group], or null
  const int32_t* starts;         // [sequences + 1]; the first query of each sequence
  const int32_t* seen;           // tokens of a list that the first query sees, of each list
  // [lists, width], pages, of which each KV head reads its unit; with per_head units.
  const int32_t* entries;
  int64_t width, stride;
  bool per_head;                 // whether each KV head of a sequence has a list, or all share one
  int32_t window;                // a query attends to the last tokens that it sees; 0: to all
  float scale;
  float softcap;                 // logits become softcap * tanh(logit / softcap); 0: they stay
  const float* sinks;            // [kv_heads * group]; a further logit, with a value of zero; or null

  int32_t queries(int sequence) const { return starts[sequence + 1] - starts[sequence]; }
  int64_t list(int sequence, int head) const {
    return per_head ? int64_t(sequence) * kv_heads + head : sequence;
  }
};

// out = x * weights^T + bias, of a few tokens.
struct LinearLayer {
  DType dtype;
  const void* x;        // [tokens, inputs]
  const void* weights;  // [outputs, inputs]
  const void* bias;     // [outputs], or null
  void* out;            // [tokens, outputs]
  int64_t tokens, inputs, outputs;
};

// out = x * weights^T + bias, of weights with 8 or 4 bits. A weight is
// scales[output] * (groups[scale] * its number + groups[offset]).
struct QuantisedLayer {
  static constexpr int kPanel = 16;  // outputs that lie side by side; the last ones are padded
  static constexpr int kBlock = 32;  // inputs that a token has a scale for; the last ones are padded

  DType dtype;
  const void* x;          // [tokens, inputs]
  const int8_t* weights;  // 8 bits, with a sign: [panels, inputs / 4, kPanel, 4]; 4 bits, without:
                          // [panels, inputs / 8, kPanel, 4], inputs i and i + 4 in a byte
  const float* scales;    // [panels * kPanel]
  const void* groups;     // float16 [panels, num_groups(), 2, kPanel], scales and offsets; or null
  const void* bias;       // [outputs], or null
  void* out;              // [tokens, outputs]
  int64_t tokens, inputs, outputs;
  int32_t bits, group;    // inputs of a group, a multiple of kBlock

  int64_t num_groups() const { return (inputs + group - 1) / group; }
};

struct UnitCoding;  // codec.h

// An index with kernels, as its line in KVR_INDEXES and its struct have it.
struct IndexNames {
  const char* name;
  const char* parameters;        // in the order of Index::parameters, with spaces between them
};

// The functions that one instruction set provides.
struct KernelTable {
  const char* isa;
  void (*update_index)(const IndexUpdate&);
  void (*plan_decode)(const DecodePlan&);
  void (*index_pages)(const PageIndexing&);
  void (*read_keys)(const KeyReading&);
  void (*attend)(const Attention&);
  void (*attend_prompt)(const PromptAttention&);
  void (*select_context)(const ContextSelection&);
  void (*multiply)(const LinearLayer&);
  void (*multiply_quantised)(const QuantisedLayer&);
  // These run on the calling thread alone.
  void (*encode_units)(const UnitCoding&);
  void (*decode_units)(const UnitCoding&);
  const IndexNames* indexes;     // by their kinds; the last one has no name
};

// The fastest table that this machine runs.
const KernelTable& kernels();
// A table by name ("avx512_amx", "avx512_bf16", "avx512", "avx2", "portable"); null if it is not
// compiled in, or cannot run here.
const KernelTable* kernels_for(const char* isa);
// The names of all tables that are compiled in, fastest first, whether or not they run here.
std::vector<const char*> compiled_isas();

}  // namespace kvr
