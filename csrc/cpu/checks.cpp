#include "checks.h"

#include "dropping.h"

#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

namespace kvr {

namespace {

[[noreturn]] void refuse(int row, std::initializer_list<std::string> words) {
  std::string message = "row " + std::to_string(row) + ":";
  for (const std::string& word : words) message += " " + word;
  throw std::invalid_argument(message);
}

// "this is what, amount more than limit"
[[noreturn]] void refuse_more(int row, const std::string& what, int64_t amount, int64_t limit,
                              const std::string& of) {
  refuse(row, {what, std::to_string(amount) + ",", std::to_string(amount - limit), "more than the",
               std::to_string(limit), of});
}

}  // namespace

void check_rows(const DecodeRows& rows, int32_t seats, int32_t kv_heads, int32_t page_size) {
  if (int64_t(rows.rows) * kv_heads > rows.lists_rows)
    throw std::invalid_argument("lists has " + std::to_string(rows.lists_rows) +
                                " rows, " + std::to_string(rows.rows) + " requests of " +
                                std::to_string(kv_heads) + " KV heads need " +
                                std::to_string(int64_t(rows.rows) * kv_heads));
  if (int64_t(rows.rows) * kv_heads > rows.lengths_size)
    throw std::invalid_argument(std::to_string(rows.lengths_size) + " lengths for " +
                                std::to_string(rows.rows) + " requests of " +
                                std::to_string(kv_heads) + " KV heads");
  const std::string units = rows.per_token ? "tokens" : "pages";
  for (int r = 0; r < rows.rows; ++r) {
    const int64_t sink = rows.sink[r], window = rows.window[r];
    const int64_t seat = rows.seats[r], len = rows.seq_lens[r], drafts = rows.drafts(r);
    const bool selects = rows.mode[r] == Mode::kSelect;
    if (rows.mode[r] > Mode::kWhole)
      refuse(r, {"mode", std::to_string(static_cast<int>(rows.mode[r])), "is none"});
    if (seat < 0 || seat >= seats)
      refuse(r, {"seat", std::to_string(seat), "is outside the state's", std::to_string(seats)});
    if (selects && seat >= rows.corrected_seats)
      refuse(r, {"seat", std::to_string(seat), "is outside the", std::to_string(rows.corrected_seats),
                 "of corrected"});
    if (!(rows.mass[r] > 0 && rows.mass[r] <= 1))
      refuse(r, {"a mass of", std::to_string(rows.mass[r]), "is no share"});
    if (rows.mass[r] < 1 && seat >= rows.spared_seats)
      refuse(r, {"seat", std::to_string(seat), "is outside the", std::to_string(rows.spared_seats),
                 "of spared"});
    if (selects && rows.select[r] < 0) refuse(r, {std::to_string(rows.select[r]), units, "to select"});
    if (len > 0 && (drafts < 0 || drafts >= len))
      refuse(r, {std::to_string(drafts), "draft tokens in a context of", std::to_string(len)});
    if (drafts > 0 && selects && window < (rows.per_token ? drafts : (len + page_size - 1) / page_size - (len - drafts) / page_size))
      refuse(r, {"its window of", std::to_string(window), units, "lacks draft tokens"});
    if (sink < 0 || window < 0 || len < 1)
      refuse(r, {"a context of", std::to_string(len), "tokens,", std::to_string(sink),
                 units, "of sink and", std::to_string(window), "of window cannot be"});
    const int64_t pages = (len + page_size - 1) / page_size;
    if (pages > rows.block_table_width)
      refuse_more(r, "the context's pages are", pages, rows.block_table_width, "of block_table");
    const int64_t all = rows.per_token ? len : pages;
    const bool whole = rows.mode[r] == Mode::kWhole;
    if (whole && sink + window > 0)
      refuse(r, {"attends to the whole context, which has no sink or window"});
    const int64_t attended = whole ? all : sink + window + (selects ? rows.select[r] : 0);
    if (attended > all)
      refuse_more(r, "sink, window and selection are", attended, all, units + " of the context");
    if (attended > rows.lists_width)
      refuse_more(r, "the " + units + " to attend to are", attended, rows.lists_width, "of lists");
  }
}

void check_lengths(const DecodeRows& rows, int32_t kv_heads, int32_t page_size) {
  const int32_t unit = rows.unit(page_size);
  for (int r = 0; r < rows.rows; ++r)
    for (int h = 0; h < kv_heads; ++h) {
      const int64_t length = rows.lengths[int64_t(r) * kv_heads + h];
      const int64_t count = length < 0 ? -1 : (length + unit - 1) / unit;
      const int64_t least = int64_t(rows.sink[r]) + rows.window[r];
      if (count < least || count > rows.lists_width)
        refuse(r, {"a list of", std::to_string(length), "tokens, of which there is room for",
                   std::to_string(rows.lists_width), rows.per_token ? "and" : "pages, and",
                   "sink and window are", std::to_string(least)});
    }
}

// Whether a head with a given selection attends to the whole context, wherever its units are.
static bool given_all(const DecodeRows& rows, const Chooser& chooser, int row, int head) {
  return rows.mode[row] == Mode::kGiven &&
         chooser.select(rows, row, head) == rows.between(row, chooser.index.page_size);
}

// What is given is in the context.
static void check_given(const DecodeRows& rows, const Chooser& chooser) {
  const Index& index = chooser.index;
  for (int r = 0; r < rows.rows; ++r) {
    if (rows.mode[r] != Mode::kGiven) continue;
    const int32_t units = rows.units(r, index.page_size);
    for (int h = 0; h < index.kv_heads; ++h) {
      if (given_all(rows, chooser, r, h)) continue;
      const int64_t unit = int64_t(rows.seats[r]) * index.kv_heads + h;
      const int32_t* chosen = chooser.selected + unit * chooser.max_selected;
      for (int i = 0; i < chooser.select(rows, r, h); ++i)
        if (chosen[i] < 0 || chosen[i] >= units)
          refuse(r, {"the selection holds", std::to_string(chosen[i]) + ", outside a context of",
                     std::to_string(units)});
    }
  }
}

void check_selection(const DecodeRows& rows, const Chooser& chooser) {
  for (int r = 0; r < rows.rows; ++r) {
    const bool given = rows.mode[r] == Mode::kGiven;
    if (rows.mode[r] == Mode::kWhole) continue;
    if (given && chooser.counts == nullptr) refuse(r, {"a selection is given without counts"});
    if (!given && (chooser.counts == nullptr || rows.select[r] == 0)) {
      if (rows.select[r] > chooser.max_selected)
        refuse_more(r, "select is", rows.select[r], chooser.max_selected, "that the selection holds");
      continue;
    }
    for (int h = 0; h < chooser.index.kv_heads; ++h) {
      const int64_t count = chooser.counts[rows.seats[r] * chooser.count_stride + h];
      if (count < 0) refuse(r, {"a count of", std::to_string(count), "to select"});
      const int64_t chosen = chooser.select(rows, r, h);
      if (chosen > chooser.max_selected && !given_all(rows, chooser, r, h))
        refuse_more(r, "the count to select is", chosen, chooser.max_selected,
                    "that the selection holds");
      const int64_t attended = int64_t(rows.sink[r]) + chosen + rows.window[r];
      if (attended > rows.lists_width)
        refuse_more(r, "the " + std::string(rows.per_token ? "tokens" : "pages") + " to attend to are",
                    attended, rows.lists_width, "of lists");
    }
  }
  check_given(rows, chooser);
  for (int r = 0; r < rows.rows; ++r)
    if (rows.mass[r] < 1 && (rows.threshold[r] < 1 || chooser.rerank > 0 ||
                             chooser.outliers > 0 || chooser.pooling != Pooling::kMeanSoftmax))
      refuse(r, {"a mass of", std::to_string(rows.mass[r]), "is reached by each step's own shares"});
  if (rows.per_token && chooser.rerank > 0)
    throw std::invalid_argument("candidates that are tokens are not scored again");
}

void check_scoring(const DecodeRows& rows, const Index& index) {
  bool scores = false;
  for (int r = 0; r < rows.rows; ++r) {
    if (!rows.scores(r)) continue;
    scores = true;
    const std::string units = std::to_string(rows.select[r]) +
                              (rows.per_token ? " tokens" : " pages") + " are to be selected";
    if (index.kind == kNoIndex) refuse(r, {units, "by no index"});
    if (!rows.per_token && rows.window[r] < 1)
      refuse(r, {units, "beside a window that lacks the tail page"});
    if (!rows.per_token && rows.window[r] < index.spans())
      refuse(r, {units, "beside a window that lacks pages of an unfinished entry"});
    if (rows.per_token && rows.window[r] < index.entry_tokens)
      refuse(r, {units, "beside a window of less than the", std::to_string(index.entry_tokens),
                 "of an entry"});
  }
  if (!rows.per_token) return;
  const int64_t tokens = index.pages() * index.kv_heads * index.page_size;
  if (tokens > std::numeric_limits<int32_t>::max() || (index.page_size & (index.page_size - 1)))
    throw std::invalid_argument(std::to_string(tokens) + " tokens in pages of " +
                                std::to_string(index.page_size) + " cannot be numbered");
  if (scores && !index.per_token)
    throw std::invalid_argument("the index scores entries, not tokens");
}

void check_context(const DecodeRows& rows, const ContextSelector& selector, int32_t kv_heads) {
  const Index& index = selector.index;
  if (!rows.per_token) throw std::invalid_argument("filters select tokens, and the rows count pages");
  if (index.pages() * kv_heads * index.page_size > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument("more tokens than 31 bits number");
  check_rows(rows, selector.seats, kv_heads, index.page_size);
  for (int r = 0; r < rows.rows; ++r) {
    if (rows.mode[r] != Mode::kSelect) refuse(r, {"does not select, and filters select"});
    if (rows.select[r] > selector.max_selected)
      refuse_more(r, "select is", rows.select[r], selector.max_selected, "that the selection holds");
  }
}

void check_queries(const ContextSelection& s) {
  for (int r = 0; r < s.rows.rows; ++r)
    if (!(s.weights[r * s.queries + s.queries - 1] > 0))
      refuse(r, {"the latest query has no weight"});
  if (s.ratings == nullptr) return;
  for (int r = 0; r < s.rows.rows; ++r)
    if (s.rows.seq_lens[r] > s.rating_stride)
      refuse_more(r, "seq_lens is", s.rows.seq_lens[r], s.rating_stride, "that ratings hold");
}

void check_pages(const PageIndexing& p) {
  const int64_t pages = p.index.pages();
  for (int64_t i = 0; i < p.num_pages; ++i)
    if (p.pages[i] < 0 || p.pages[i] >= pages || p.lengths[i] < 1 ||
        p.lengths[i] > p.index.page_size)
      throw std::invalid_argument(
          "pages[" + std::to_string(i) + "] is " + std::to_string(p.pages[i]) + " with " +
          std::to_string(p.lengths[i]) + " tokens, the cache has " + std::to_string(pages) +
          " pages of " + std::to_string(p.index.page_size));
}

void check_lists(const Attention& a) {
  const int64_t entries = a.cache_tokens / a.run / (a.per_head ? 1 : a.kv_heads);
  if (a.starts != nullptr && a.starts[0] != 0)
    throw std::invalid_argument("the first query is " + std::to_string(a.starts[0]) + ", not 0");
  for (int row = 0; row < a.rows; ++row)
    if (a.queries(row) < 1 || (a.queries(row) > 1 && a.weights != nullptr))
      refuse(row, {std::to_string(a.queries(row)), "queries; weights are of single ones"});
  // Of a softmax of several parts some may be empty, for some queries.
  const bool parts = a.lse != nullptr || a.rest_lse != nullptr;
  for (int64_t unit = 0; unit < int64_t(a.rows) * a.kv_heads; ++unit) {
    const int64_t least = parts ? 0 : a.queries(unit / a.kv_heads);
    const int64_t length = a.lengths[unit], count = (length + a.run - 1) / a.run;
    if (length < least || count > a.entries_width)
      throw std::invalid_argument("lengths[" + std::to_string(unit) + "] is " +
                                  std::to_string(length) + ", a list holds from " +
                                  std::to_string(least) + " to " +
                                  std::to_string(a.entries_width * a.run) + " tokens");
    if (a.weights != nullptr && length > a.weight_stride)
      throw std::invalid_argument("lengths[" + std::to_string(unit) + "] is " +
                                  std::to_string(length) + ", weights hold " +
                                  std::to_string(a.weight_stride));
    if (!a.per_head && unit % a.kv_heads > 0 && length <= a.lengths[unit - 1]) continue;
    const int32_t* list = a.entries + (a.per_head ? unit : unit / a.kv_heads) * a.entries_stride;
    for (int64_t i = 0; i < count; ++i)
      if (list[i] < 0 || list[i] >= entries)
        throw std::invalid_argument("entries[" + std::to_string(unit) + "][" + std::to_string(i) +
                                    "] is " + std::to_string(list[i]) + ", the cache has " +
                                    std::to_string(entries));
  }
}

void check_prompt(const PromptAttention& a) {
  if (a.starts[0] < 0 || a.starts[a.sequences] > a.tokens)
    throw std::invalid_argument("sequences from token " + std::to_string(a.starts[0]) + " to " +
                                std::to_string(a.starts[a.sequences]) + " of " +
                                std::to_string(a.tokens));
  const int64_t entries = a.per_head ? a.units : a.units / a.kv_heads;
  const int lists = a.per_head ? a.kv_heads : 1;
  for (int s = 0; s < a.sequences; ++s) {
    for (int l = 0; l < lists; ++l) {
      const int64_t seen = a.seen[a.list(s, l)], all = seen + a.queries(s) - 1;
      const int64_t pages = (all + a.page_size - 1) / a.page_size;
      if (a.queries(s) < 1 || seen < 1 || pages > a.width)
        refuse(s, {std::to_string(a.queries(s)), "queries, the first of which sees",
                   std::to_string(seen), "tokens; a list holds", std::to_string(a.width), "pages of",
                   std::to_string(a.page_size)});
      const int32_t* list = a.entries + a.list(s, l) * a.stride;
      for (int64_t i = 0; i < pages; ++i)
        if (list[i] < 0 || list[i] >= entries)
          refuse(s, {"entry", std::to_string(i), "is", std::to_string(list[i]) + ", the cache has",
                     std::to_string(entries)});
    }
  }
}

void check_staging(const PageStaging& s) {
  if (s.num_pages % s.pages_per_block || s.num_pages / s.pages_per_block > s.blocks)
    throw std::invalid_argument(std::to_string(s.num_pages) + " pages do not fill blocks of " +
                                std::to_string(s.pages_per_block) + ", of which there are " +
                                std::to_string(s.blocks));
  for (int64_t i = 0; i < s.num_pages; ++i)
    if (s.pages[i] < 0 || s.pages[i] >= s.source_pages)
      throw std::invalid_argument("pages[" + std::to_string(i) + "] is " +
                                  std::to_string(s.pages[i]) + ", the cache has " +
                                  std::to_string(s.source_pages));
}

void check_staging(const TokenStaging& s) {
  Attention lists{};
  lists.rows = s.rows, lists.kv_heads = s.kv_heads, lists.run = 1;
  lists.cache_tokens = s.cache_tokens;
  lists.entries = s.entries, lists.entries_width = s.width, lists.entries_stride = s.stride;
  lists.per_head = true;
  lists.lengths = s.lengths;
  check_lists(lists);
  int64_t blocks = 0;
  for (int r = 0; r < s.rows; ++r) {
    const int32_t* lengths = s.lengths + int64_t(r) * s.kv_heads;
    for (int h = 1; h < s.kv_heads; ++h)
      if (lengths[h] != lengths[0])
        refuse(r, {"its lists have", std::to_string(lengths[0]), "and", std::to_string(lengths[h]),
                   "tokens, and would be one sequence"});
    blocks += s.blocks_of(r);
  }
  if (blocks > s.blocks)
    throw std::invalid_argument("the lists fill " + std::to_string(blocks) + " blocks, there are " +
                                std::to_string(s.blocks));
}

void check_dropping(const TokenDropping& d) {
  if (d.page < 1 || d.sink < 0 || d.recent < 0 || (d.sets != 1 && d.sets != d.kv_heads))
    throw std::invalid_argument("pages of " + std::to_string(d.page) + " tokens, or " +
                                std::to_string(d.sets) + " sets of weights for " +
                                std::to_string(d.kv_heads) + " KV heads");
  for (int r = 0; r < d.rows; ++r) {
    const int64_t seat = d.seats[r];
    if (seat < 0 || seat >= d.all_seats)
      refuse(r, {"seat", std::to_string(seat), "is outside the", std::to_string(d.all_seats)});
    for (int h = 0; h < d.kv_heads; ++h) {
      const int64_t count = d.counts[seat * d.count_stride + h];
      const int64_t budget = d.budgets[seat * d.budget_stride + h];
      if (count < 0 || count >= d.seq_lens[r] || count >= d.weight_stride || budget > d.most)
        refuse(r, {std::to_string(count), "tokens kept of", std::to_string(d.seq_lens[r]),
                   "with weights of", std::to_string(d.weight_stride), "and a budget of",
                   std::to_string(budget) + "; there is room for", std::to_string(d.most)});
      if (count > d.most)
        refuse_more(r, "the tokens kept are", count, d.most, "that there is room for");
    }
  }
}

void check_slots(const int64_t* slot_mapping, int64_t count, int64_t tokens) {
  for (int64_t t = 0; t < count; ++t)
    if (slot_mapping[t] >= tokens) refuse_token(t, slot_mapping[t], tokens);
}

void check_entries(const KeyReading& r) {
  for (int64_t i = 0; i < r.num_entries; ++i)
    if (r.entries[i] < 0 || r.entries[i] >= r.index.entries)
      throw std::invalid_argument("entries[" + std::to_string(i) + "] is " +
                                  std::to_string(r.entries[i]) + ", the index has " +
                                  std::to_string(r.index.entries));
}

void check_coding(const UnitCoding& c) {
  const auto fits = [](int32_t size) { return size > 0 && size <= kMostRows && size % 16 == 0; };
  if (c.codec < Codec::kRaw || c.codec >= Codec::kCount || c.count < 0 || !fits(c.page_size) ||
      !fits(c.head_size))
    throw std::invalid_argument(
        "codec " + std::to_string(static_cast<int>(c.codec)) + " cannot take " +
        std::to_string(c.count) + " units of " + std::to_string(c.page_size) + " tokens of " +
        std::to_string(c.head_size) + " channels: both are multiples of 16 up to " +
        std::to_string(kMostRows));
  if (is_sparse(c.codec) && int64_t(c.page_size) * c.head_size > kMostPositions)
    throw std::invalid_argument("outliers have no position in units of " +
                                std::to_string(c.page_size) + " tokens of " +
                                std::to_string(c.head_size) + " channels");
}

void refuse_token(int64_t token, int64_t slot, int64_t tokens) {
  throw std::invalid_argument("slot_mapping[" + std::to_string(token) + "] is " +
                              std::to_string(slot) + ", the cache has " + std::to_string(tokens) +
                              " tokens");
}

}  // namespace kvr
