// Decode steps of methods that drop tokens.
#pragma once

#include <cstdint>

namespace kvr {

// The rating of a token: all attention that it has received; the attention of the latest query; or
// the position of the latest query that gave it more attention than `stamped` in some head; or, of new
// tokens, their own position. A token that was rated infinity stays so by the last two.
enum class Rating : int32_t { kSum = 0, kLatest = 1, kStamp = 2, kPosition = 3 };

struct TokenDropping {
  int32_t rows, kv_heads;
  const int32_t* seq_lens;       // [rows]; the new token, the last, included
  const int32_t* seats;          // [rows]
  int32_t sets, heads_per_set;   // of query heads; sets: KV heads, or 1 for all of them together
  const float* weights;          // [rows, sets, heads_per_set, weight_stride]; attention to the kept
                                 // tokens, and behind them to the new one
  int64_t weight_stride;
  int32_t* chosen;               // [all_seats, kv_heads, most]; positions of kept tokens, rising
  float* ratings;                // the same; their ratings
  int32_t all_seats, most;
  const int32_t* counts;         // [all_seats, kv_heads]; tokens that were kept before the step
  int64_t count_stride;
  const int32_t* budgets;        // [all_seats, kv_heads]; tokens to attend to, a new one included
  int64_t budget_stride;
  int32_t sink, recent;          // tokens that are spared
  double recent_share;           // of the budget; spares this many if they are more
  int32_t page;                  // tokens that are kept or dropped together
  Rating rating;
  float stamped;

  int32_t recent_of(int32_t budget) const;
};

// Throws std::invalid_argument if a row does not fit.
void check_dropping(const TokenDropping& dropping);

// Keeps the new token of each row, and drops the token with the lowest rating if there is no room
// for the next one.
void drop_tokens(const TokenDropping& dropping);

}  // namespace kvr
