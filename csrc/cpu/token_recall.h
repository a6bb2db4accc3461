// Single tokens in fast memory, for layers whose KV cache lies in a file. TokenRecall knows which
// tokens of each request are there, and reads those that are not.
//
// Every request has places for `capacity` tokens of each KV head, in every layer alike. Its lists say
// which token is where: a list per KV head, or one list for all heads of several layers that attend
// to the same tokens. Tokens are numbered as in Attention (kernels.h). The specification is TokenRecall in
// tests/spec/tokens.py.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels.h"
#include "recall_cache.h"

namespace kvr {

struct TokenRecallConfig {
  struct Layer {
    char* memory;           // [requests, kv_heads, capacity, token_bytes]
    const char* home;       // mapped: [pages, kv_heads, page_size, token_bytes]
  };
  int32_t requests, kv_heads, page_size, capacity;
  int32_t lists;            // per request: kv_heads, or 1
  int32_t pages;            // of home
  int64_t token_bytes;      // a key and a value
  int64_t* counts;          // [requests, kRecallCounts]
  std::vector<Layer> layers;
};

class TokenRecall {
 public:
  // Starts the reader threads if there are several layers; throws std::system_error if the process
  // cannot have any.
  explicit TokenRecall(TokenRecallConfig config);
  ~TokenRecall() { join(); }
  TokenRecall(const TokenRecall&) = delete;
  TokenRecall& operator=(const TokenRecall&) = delete;

  // Lists the places where the tokens will be that the rows' lists name, as tokens or pages. With
  // several layers it starts to read missing tokens, layer after layer.
  void recall(const DecodeRows& rows, const UnitLists& found);
  // Waits until one of the layers has all of these tokens, and helps to read them. By then home has
  // the rows' new tokens in this layer.
  void wait(int layer);
  // Forgets the tokens of a request that has finished, or was aborted or preempted.
  void release(int request);
  // Describes what is wrong with the books or with a place's contents; empty: nothing is.
  std::string check();

  int64_t used() const;  // places of all layers and heads that hold a token
  // Nanoseconds in which reader threads read, and in which steps waited for any reads.
  int64_t read_ahead_ns() const { return read_ahead_ns_; }
  int64_t waited_ns() const { return waited_ns_; }

 private:
  struct Held {
    int32_t position;       // in the context
    int32_t token;          // in home; the first KV head's if the list is for all heads
    int32_t place;
    uint32_t step;          // the last one that attended to it
  };
  struct Read {
    int32_t request, list, token, place, count;  // `count` tokens and places side by side
  };
  // The tokens that one list attends to in this step.
  struct Work {
    std::vector<int32_t> positions, tokens, places;
    std::vector<Held> merged;
    std::vector<Read> reads, newest;
    int64_t misses, older;  // tokens without a place; those that earlier steps have written
    std::string error;
  };
  struct Progress {
    std::atomic<int> next{0};  // part of the layer's reads that nobody has taken yet
    std::atomic<int> left{0};  // parts that are not done
  };

  int heads_per_list() const { return config_.kv_heads / config_.lists; }
  std::string locate(const DecodeRows& rows, int row, int list, int64_t room, Work& work) const;
  void place(const DecodeRows& rows, int row, int list, uint32_t now, const UnitLists& found,
             Work& work);
  void read(const Read& read, int layer) const;
  void read_parts(int layer);
  void start_reading();
  void join();

  TokenRecallConfig config_;
  std::vector<std::vector<Held>> held_;   // [requests, lists]; by position
  std::vector<uint8_t> seen_;             // per request
  std::vector<Read> reads_;
  std::vector<Read> newest_;              // tokens that home has only when their layer has run
  uint32_t step_ = 0;
  int parts_ = 0;                         // of reads_
  std::unique_ptr<Progress[]> progress_;  // per layer
  int64_t waited_ns_ = 0;

  std::mutex mutex_;
  std::condition_variable done_;
  int readers_ = 0;                       // jobs submitted that have not ended
  std::atomic<int64_t> read_ahead_ns_{0};
};

}  // namespace kvr
