// Slots in fast memory for one layer whose KV cache lies in a file. The cache knows which slot holds
// which unit and which slots may be given to others, and reads units that no slot holds.
//
// A unit is one (page, KV head) slice of the KV cache, `page * kv_heads + head`; home and slots hold
// it in the same bytes. The specification is RecallCache in tests/spec/recall.py.
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
  const char* home;         // the layer's part of the home file, mapped: [units, unit_bytes]; the
                            // memory of open pages if the home is encoded
  int fd;                   // the home file
  off_t offset;             // where the layer's part begins in the file
  int64_t* counts;          // [requests, kRecallCounts]
  EncodedHome* encoded;     // null: the file holds units as slots do
};

// Lists of units of (row, KV head), as DecodeRows has them.
struct UnitLists {
  int32_t* lists;
  int64_t lists_stride;
  int32_t* lengths;  // tokens
  int64_t size, width;
};

// Per request, summed over the layers.
enum RecallCount { kAttended = 0, kMissed = 1, kRecalled = 2, kRecallCounts = 3 };

class RecallCache {
 public:
  // Starts the reader threads; throws std::system_error if the process cannot have any.
  explicit RecallCache(const RecallCacheConfig& config);
  ~RecallCache() { join(); }
  RecallCache(const RecallCache&) = delete;
  RecallCache& operator=(const RecallCache&) = delete;

  // Notes that home was written at these tokens: page * page_size + offset, negative for padding.
  void write(const int64_t* slot_mapping, int64_t tokens);
  // Replaces the units in the rows' page lists by slots that hold them, and pins sink and window.
  void resolve(const DecodeRows& rows);
  // Does the same without waiting: begins to read what no slot holds, and moves it from the rows'
  // lists, which may then be empty, to the others. Returns whether there is any. Call wait() before
  // what has been moved is read.
  bool stream(const DecodeRows& rows, const UnitLists& late);
  // Waits for the reads that stream() has begun.
  void wait() { wait_for(late_); }
  // Starts fetching what the rows selected for their next step, as far as there is room. Call it
  // once after resolve() or stream().
  void prefetch(const DecodeRows& rows, const Chooser& chooser);
  // Forgets the pages: their home has changed by other means than write().
  void drop_pages(const int64_t* pages, int64_t count);
  // Unpins what a request pinned that has finished, or was aborted or preempted.
  void release(int request);
  // Returns the pages that could not be read since the last call, and gives up their slots. It does
  // not wait for reads ahead: their failures are known before a step attends to the page.
  std::vector<int64_t> take_failed_pages();
  // Returns the number of the latest error of a read or write since the last call; 0: none.
  int take_error() { return error_.exchange(0); }
  // Closes full pages of an encoded home, which write() has opened. Their slots then hold what the
  // file gives back.
  void close(const int64_t* pages, int64_t count);
  // Returns whether the file has all of these pages.
  bool closed(const int64_t* pages, int64_t count);
  // Takes over pages that the file has from an earlier run.
  void adopt(const int64_t* pages, int64_t count);
  // Forgets those of these pages that are open: no request will read them.
  void abandon(const int64_t* pages, int64_t count);
  // Lays out pages as blocks of `parts` pages in vLLM's layout; a negative page becomes zeros.
  void stage(const int64_t* pages, int64_t count, char* target, int parts);
  // Reads each unit in pieces from now on, as in a home that does not keep units in one piece. For
  // benchmarks of layouts. Must not be called during a step.
  void read_in_pieces(int64_t bytes) { piece_bytes_ = bytes; }
  // Describes what is wrong with the books or with a slot's contents; empty: nothing is.
  std::string check();

  int used() const { return config_.slots - static_cast<int>(free_.size()); }
  int pinned() const;
  std::vector<int32_t> resident() const;  // units, least recently used first, pinned ones last
  // Nanoseconds in which reader threads read ahead, and in which steps waited for any reads.
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
  // Reads by reader threads.
  struct Reads {
    std::vector<Read> reads;
    int pending = 0;  // parts of `reads` still to be read; shared with reader threads
  };
  static constexpr int32_t kNone = -1;

  char* slot_at(int32_t slot) { return config_.slot_memory + slot * config_.unit_bytes; }
  void touch(int32_t slot);
  int32_t acquire(int32_t unit);  // kNone if every slot is pinned or used by this step
  void drop(int32_t unit);
  bool give_up(int32_t unit);  // returns whether a slot held it
  EncodedHome& encoded(const int64_t* pages, int64_t count);  // the home of these pages
  void note_lost(int64_t page);
  void pin(int32_t slot);
  void unpin(int32_t slot);
  void link_newest(int32_t slot);
  void unlink(int32_t slot);
  int entries_of(const DecodeRows& rows, int row, int head) const;
  void begin(const DecodeRows& rows);
  void split(const DecodeRows& rows, const UnitLists& late) const;
  bool read_unit(int32_t unit, char* to) const;
  void read(const std::vector<Read>& reads, size_t begin, size_t end);
  void copy_or_add(const Read& read, Reads& reads);
  void start(Reads& reads, size_t per_job);
  void wait_for(const Reads& reads);
  void join() {
    wait_for(ahead_);
    wait_for(late_);
  }

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
  std::vector<int32_t> late_slots_;  // of late_, in rising order
  std::vector<Miss> missing_;
  std::vector<Read> misses_;
  Reads late_, ahead_;
  int64_t step_ = 0;
  int64_t waited_ns_ = 0;

  // Shared with reader threads.
  std::mutex mutex_;
  std::condition_variable done_;
  std::vector<int32_t> failed_;      // units
  std::vector<int64_t> lost_;        // pages, whether in slots or not
  std::atomic<int> error_{0};
  int64_t read_ahead_ns_ = 0;
};

}  // namespace kvr
