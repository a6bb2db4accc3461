// Whether rows fit the tensors they come with: an op that takes them would otherwise read or write
// outside of these. Once per call and O(rows); what does not fit is a std::invalid_argument, which
// Python sees as ValueError.
#pragma once

#include <cstdint>

#include "codec.h"
#include "kernels.h"

namespace kvr {

// The rows themselves, with per-request state of `seats` and a page table for `kv_heads`.
void check_rows(const DecodeRows& rows, int32_t seats, int32_t kv_heads, int32_t page_size);
// That the lists, of so many KV heads, have room for their lengths, and these for sink and window; in
// pages or tokens, as the rows count.
void check_lengths(const DecodeRows& rows, int32_t kv_heads, int32_t page_size);
// That the chooser keeps as many selected units as the rows, or its counts, ask for; after check_rows.
void check_selection(const DecodeRows& rows, const Chooser& chooser);
// That what is to be selected can be scored: the window has the tail page, which may hold no complete
// entry, or as many tokens as an entry, and there is an index, of tokens where these are selected.
void check_scoring(const DecodeRows& rows, const Index& index);
// That rows count tokens, and a filter has room for their selection, which follows for so many KV
// heads.
void check_context(const DecodeRows& rows, const ContextSelector& selector, int32_t kv_heads);
// That each row has its latest query.
void check_queries(const ContextSelection& selection);
// That the pages are the index's, and the lengths those of pages.
void check_pages(const PageIndexing& indexing);
// That the lists name tokens of the cache.
void check_lists(const Attention& attention);
// That there are tokens for all queries, and that the lists name pages of the cache and are long
// enough for what their queries see.
void check_prompt(const PromptAttention& attention);
// Likewise, that a row's heads have equally many, and that there are blocks for all of them.
void check_staging(const TokenStaging& staging);
// That the entries are the index's.
void check_entries(const KeyReading& reading);
// That there is such a codec, and that units are of sizes that it takes.
void check_coding(const UnitCoding& coding);
// That every slot is in a cache of so many tokens, or negative.
void check_slots(const int64_t* slot_mapping, int64_t count, int64_t tokens);
// Says that slot_mapping[token] is `slot`, in a cache of `tokens`.
[[noreturn]] void refuse_token(int64_t token, int64_t slot, int64_t tokens);

}  // namespace kvr
