// Steps that drop tokens of those that a layer has kept.
#pragma once

#include <cstdint>

namespace kvr {

// What a token is rated by: the attention that it has received in all; from the latest query alone;
// or the position of the latest query of which a head gave it more than `stamped`.
enum class Rating : int32_t { kSum = 0, kLatest = 1, kStamp = 2 };

struct TokenDropping {
  int32_t rows, kv_heads;
  const int32_t* seq_lens;       // [rows]; the new token, the last, included
  const int32_t* seats;          // [rows]
  int32_t sets, heads_per_set;   // of query heads; sets: KV heads, or 1 for all of them together
  const float* weights;          // [rows, sets, heads_per_set, weight_stride]; what kept tokens weigh,
                                 // and behind them the new one
  int64_t weight_stride;
  int32_t* chosen;               // [all_seats, kv_heads, most]; positions of what is kept, rising
  float* ratings;                // the same; their ratings
  int32_t all_seats, most;
  const int32_t* counts;         // [all_seats, kv_heads]; tokens that were kept before the step
  int64_t count_stride;
  const int32_t* budgets;        // [all_seats, kv_heads]; tokens to attend to, a new one included
  int64_t budget_stride;
  int32_t sink, recent;          // tokens that are spared
  double recent_share;           // of the budget, where that is more
  int32_t page;                  // tokens that go together
  Rating rating;
  float stamped;

  int32_t recent_of(int32_t budget) const;
};

// Raises std::invalid_argument where a row does not fit.
void check_dropping(const TokenDropping& dropping);

// Takes each row's new token in, and drops the least where there is no room for the next.
void drop_tokens(const TokenDropping& dropping);

}  // namespace kvr
