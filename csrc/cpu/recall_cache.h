// Slots in fast memory for one layer whose KV cache lives in a file: which unit is where, which may
// be evicted, and the reading of what misses.
//
// A unit is one (page, KV head) slice of the KV cache, `page * kv_heads + head`; home and slots hold
// it in the same bytes. The specification is RecallCache in vllm_kvretrieval/kernels/reference.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "encoded_home.h"
#include "kernels.h"

namespace kvr {

struct RecallCacheConfig {
  int32_t units, slots, kv_heads, page_size, requests;
  int64_t unit_bytes;
  char* slot_memory;        // [slots, unit_bytes]
  const char* home;         // the layer's part of the home file, mapped: [units, unit_bytes]; or
                            // where open pages of an encoded home lie
  int fd;                   // the home file
  off_t offset;             // of the layer's part in it
  int64_t* counts;          // [requests, kRecallCounts]
  EncodedHome* encoded;     // what the file holds, or null: units as they are in slots
};

// Per request, summed over the layers.
enum RecallCount { kAttended = 0, kMissed = 1, kRecalled = 2, kRecallCounts = 3 };

class RecallCache {
 public:
  // Starts the reader threads; throws std::system_error where the process can have none.
  explicit RecallCache(const RecallCacheConfig& config);
  ~RecallCache() { join(); }
  RecallCache(const RecallCache&) = delete;
  RecallCache& operator=(const RecallCache&) = delete;

  // Home was written at these tokens: page * page_size + offset, negative for padding.
  void write(const int64_t* slot_mapping, int64_t tokens);
  // Replaces the units in the rows' page lists by slots that hold them, and pins sink and window.
  void resolve(const DecodeRows& rows);
  // Starts fetching what the rows selected for their next step, as far as there is room.
  void prefetch(const DecodeRows& rows, const Chooser& chooser);
  // Forgets the pages: their home has changed by other means than write().
  void drop_pages(const int64_t* pages, int64_t count);
  // Unpins what a request pinned; it has finished, or was aborted or preempted.
  void release(int request);
  // Pages found unreadable since the last call. Their slots are given up. Does not wait for what is
  // being read ahead: a failure there is known before anyone attends to the page.
  std::vector<int64_t> take_failed_pages();
  // Number of the latest error by which one could not be read or written since the last call; or 0.
  int take_error() { return error_.exchange(0); }
  // Over an encoded home. Its pages are opened by write(), and closed by this, when they are full:
  // their slots then hold what the file gives back.
  void close(const int64_t* pages, int64_t count);
  // Whether the file has all of these pages.
  bool closed(const int64_t* pages, int64_t count);
  // The file has these pages from an earlier run, and nothing else is known of them.
  void adopt(const int64_t* pages, int64_t count);
  // Open pages, of those named, that nobody will read.
  void abandon(const int64_t* pages, int64_t count);
  // Lays out pages as blocks of `parts` pages in vLLM's layout; a negative page becomes zeros.
  void stage(const int64_t* pages, int64_t count, char* target, int parts);
  // Read a unit in pieces from now on, as a home would have to be in which it does not lie in one:
  // the cost of another layout, for benchmarks. Not to be called during a step.
  void read_in_pieces(int64_t bytes) { piece_bytes_ = bytes; }
  // What is wrong with the bookkeeping, or with a slot's contents; empty if nothing.
  std::string check();

  int used() const { return config_.slots - static_cast<int>(free_.size()); }
  int pinned() const;
  std::vector<int32_t> resident() const;  // units, least recently used first, pinned ones last
  // Nanoseconds that reader threads read ahead, and that steps waited for reads of any kind.
  int64_t read_ahead_ns() const { return read_ahead_ns_; }
  int64_t waited_ns() const { return waited_ns_; }

 private:
  struct Read {
    int32_t unit, slot;
  };
  struct Miss {
    int32_t* entry;  // of a page list
    int32_t request;
  };
  static constexpr int32_t kNone = -1;

  char* slot_at(int32_t slot) { return config_.slot_memory + slot * config_.unit_bytes; }
  void touch(int32_t slot);
  int32_t acquire(int32_t unit);  // kNone where every slot is pinned or of this step
  void drop(int32_t unit);
  bool give_up(int32_t unit);  // whether a slot held it
  EncodedHome& encoded(const int64_t* pages, int64_t count);  // that these are of
  void note_lost(int64_t page);
  void pin(int32_t slot);
  void unpin(int32_t slot);
  void link_newest(int32_t slot);
  void unlink(int32_t slot);
  bool read_unit(int32_t unit, char* to) const;
  void read(const std::vector<Read>& reads, size_t begin, size_t end);
  void join();

  RecallCacheConfig config_;
  int64_t piece_bytes_;           // of one read call
  std::vector<int32_t> slot_of_;  // per unit
  std::vector<int32_t> unit_of_;  // per slot; kNone: free
  std::vector<int32_t> pins_;     // per slot
  std::vector<int64_t> stamp_;    // per slot: the step that last used it
  // Slots that hold a unit and are not pinned, oldest first: a ring through the entry `slots`.
  std::vector<int32_t> older_, newer_;
  std::vector<int32_t> free_;
  std::vector<std::vector<int32_t>> pinned_by_;  // per request: slots
  std::vector<Miss> missing_;
  std::vector<Read> misses_, ahead_;
  int64_t step_ = 0;
  int64_t waited_ns_ = 0;

  // Shared with reader threads.
  std::mutex mutex_;
  std::condition_variable done_;
  int pending_ = 0;                  // parts of `ahead_` still to be read
  std::vector<int32_t> failed_;      // units
  std::vector<int64_t> lost_;        // pages, whether in slots or not
  std::atomic<int> error_{0};
  int64_t read_ahead_ns_ = 0;
};

}  // namespace kvr
