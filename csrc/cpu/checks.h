// Checks that the arguments of an op fit each other. An op would otherwise read or write outside of
// its tensors. Each check runs once per call, in O(rows), and throws std::invalid_argument, which
// Python sees as ValueError.
#pragma once

#include <cstdint>

#include "codec.h"
#include "kernels.h"

namespace kvr {

// The rows fit state for `seats` requests, and a page table of `kv_heads` KV heads.
void check_rows(const DecodeRows& rows, int32_t seats, int32_t kv_heads, int32_t page_size);
// The lists of `kv_heads` KV heads have room for their lengths, and the lengths for sink and window.
// All are counted in pages or in tokens, as the rows are.
void check_lengths(const DecodeRows& rows, int32_t kv_heads, int32_t page_size);
// The chooser has room for as many units as the rows, or its counts, select. Call check_rows before.
void check_selection(const DecodeRows& rows, const Chooser& chooser);
// All units that may be selected have scores. So there has to be an index, for tokens if the rows
// select tokens, and the window has to cover the end of the context, where the last entry may be
// incomplete: the tail page, or as many tokens as an entry has.
void check_scoring(const DecodeRows& rows, const Index& index);
// The rows count tokens, and the filter has room for their selection, which `kv_heads` KV heads of
// the following layers attend to.
void check_context(const DecodeRows& rows, const ContextSelector& selector, int32_t kv_heads);
// Each row has its latest query.
void check_queries(const ContextSelection& selection);
// The pages are pages of the index, and no length exceeds a page.
void check_pages(const PageIndexing& indexing);
// The lists name tokens of the cache.
void check_lists(const Attention& attention);
// There are tokens for all queries. The lists name pages of the cache, and are long enough for the
// tokens that their queries see.
void check_prompt(const PromptAttention& attention);
// The pages are pages of the source, and fill whole blocks, which the target has.
void check_staging(const PageStaging& staging);
// The lists name tokens of the cache, the heads of a row have lists of one length, and there are
// blocks for all tokens.
void check_staging(const TokenStaging& staging);
// The entries are entries of the index.
void check_entries(const KeyReading& reading);
// The codec exists, and takes units of these sizes.
void check_coding(const UnitCoding& coding);
// Every slot is negative, or in a cache of `tokens` tokens.
void check_slots(const int64_t* slot_mapping, int64_t count, int64_t tokens);
// Throws: slot_mapping[token] is `slot`, which is not in a cache of `tokens` tokens.
[[noreturn]] void refuse_token(int64_t token, int64_t slot, int64_t tokens);

}  // namespace kvr
