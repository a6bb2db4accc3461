#include "recall_cache.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "checks.h"
#include "clock.h"
#include "file.h"
#include "readers.h"
#include "staging.h"

namespace kvr {

namespace {

constexpr size_t kSerialReads = 4;  // fewer reads than this are not worth waking threads for
constexpr size_t kReadsPerJob = 8;  // at least, when reading ahead

}  // namespace

RecallCache::RecallCache(const RecallCacheConfig& config)
    : config_(config), piece_bytes_(config.unit_bytes), slot_of_(config.units, kNone),
      unit_of_(config.slots, kNone), pins_(config.slots, 0), stamp_(config.slots, 0),
      older_(config.slots + 1), newer_(config.slots + 1), pinned_by_(config.requests) {
  const EncodedHome* encoded = config.encoded;
  if (encoded != nullptr && (encoded->pages() * encoded->kv_heads() != config.units ||
                             encoded->kv_heads() != config.kv_heads ||
                             encoded->page_size() != config.page_size ||
                             encoded->raw_bytes() != config.unit_bytes))
    throw std::invalid_argument("the encoded home is not of the recall cache's units");
  older_[config.slots] = newer_[config.slots] = config.slots;
  free_.reserve(config.slots);
  for (int32_t slot = config.slots - 1; slot >= 0; --slot) free_.push_back(slot);
  start_readers();
}

// ---------------------------------------------------------------------------------------------
// Which slot holds what
// ---------------------------------------------------------------------------------------------

void RecallCache::link_newest(int32_t slot) {
  const int32_t ring = config_.slots, last = older_[ring];
  older_[slot] = last;
  newer_[slot] = ring;
  newer_[last] = older_[ring] = slot;
}

void RecallCache::unlink(int32_t slot) {
  newer_[older_[slot]] = newer_[slot];
  older_[newer_[slot]] = older_[slot];
}

void RecallCache::touch(int32_t slot) {
  stamp_[slot] = step_;
  if (pins_[slot] > 0) return;
  unlink(slot);
  link_newest(slot);
}

int32_t RecallCache::acquire(int32_t unit) {
  int32_t slot;
  if (!free_.empty()) {
    slot = free_.back();
    free_.pop_back();
  } else {
    slot = newer_[config_.slots];
    while (slot != config_.slots && stamp_[slot] == step_) slot = newer_[slot];
    if (slot == config_.slots) return kNone;
    slot_of_[unit_of_[slot]] = kNone;
    unlink(slot);
  }
  slot_of_[unit] = slot;
  unit_of_[slot] = unit;
  stamp_[slot] = step_;
  link_newest(slot);
  return slot;
}

void RecallCache::drop(int32_t unit) {
  const int32_t slot = slot_of_[unit];
  if (slot == kNone) return;
  if (pins_[slot] > 0)
    throw std::logic_error("page " + std::to_string(unit / config_.kv_heads) +
                           " is given up while a running request has it pinned");
  unlink(slot);
  slot_of_[unit] = unit_of_[slot] = kNone;
  free_.push_back(slot);
}

void RecallCache::pin(int32_t slot) {
  if (pins_[slot]++ == 0) unlink(slot);
}

void RecallCache::unpin(int32_t slot) {
  if (--pins_[slot] == 0) link_newest(slot);
}

// ---------------------------------------------------------------------------------------------
// The life of a step
// ---------------------------------------------------------------------------------------------

void RecallCache::write(const int64_t* slot_mapping, int64_t tokens) {
  join();
  for (int64_t t = 0; t < tokens;) {
    if (slot_mapping[t] < 0) {
      ++t;
      continue;
    }
    const int64_t page = slot_mapping[t] / config_.page_size;
    if (page >= config_.units / config_.kv_heads)
      refuse_token(t, slot_mapping[t], int64_t(config_.units / config_.kv_heads) * config_.page_size);
    bool starts = false;  // the page holds another text from now on
    for (; t < tokens && slot_mapping[t] >= 0 && slot_mapping[t] / config_.page_size == page; ++t)
      starts |= slot_mapping[t] % config_.page_size == 0;
    if (config_.encoded != nullptr) {
      if (starts)
        config_.encoded->open(page);
      else if (!config_.encoded->is_open(page))
        throw std::logic_error("page " + std::to_string(page) + " is written to, but not open");
    }
    for (int head = 0; head < config_.kv_heads; ++head) {
      const int32_t unit = static_cast<int32_t>(page * config_.kv_heads + head);
      const int32_t slot = slot_of_[unit];
      if (slot == kNone) continue;
      if (starts)
        drop(unit);
      else
        std::memcpy(slot_at(slot), config_.home + unit * config_.unit_bytes, config_.unit_bytes);
    }
  }
}

int RecallCache::entries_of(const DecodeRows& rows, int row, int head) const {
  const int32_t tokens = rows.lengths[int64_t(row) * config_.kv_heads + head];
  return (tokens + config_.page_size - 1) / config_.page_size;
}

// Whether there is room for lists of the rows.
bool RecallCache::takes(const UnitLists& lists, const DecodeRows& rows) const {
  return lists.size >= int64_t(rows.rows) * config_.kv_heads && lists.width >= rows.lists_width;
}

// Finds a slot for each unit, notes those that are to be read in `misses_`, and pins sink and window.
void RecallCache::begin(const DecodeRows& rows, const UnitLists& found) {
  check_rows(rows, config_.requests, config_.kv_heads, config_.page_size);
  if (rows.per_token) throw std::invalid_argument("a recall cache holds pages, not tokens");
  check_lengths(rows, config_.kv_heads, config_.page_size);
  if (!takes(found, rows)) throw std::invalid_argument("there is no room for the lists of slots");
  join();
  ++step_;
  for (int r = 0; r < rows.rows; ++r) release(rows.seats[r]);
  // Hits first: what a row is about to use is then safe from another row's misses.
  missing_.clear();
  for (int r = 0; r < rows.rows; ++r) {
    const size_t before = missing_.size();
    int64_t attended = 0;
    for (int head = 0; head < config_.kv_heads; ++head) {
      const int64_t list = int64_t(r) * config_.kv_heads + head;
      const int32_t* units = rows.lists + list * rows.lists_stride;
      int32_t* slots = found.lists + list * found.lists_stride;
      const int entries = entries_of(rows, r, head);
      attended += entries;
      found.lengths[list] = rows.lengths[list];
      for (int i = 0; i < entries; ++i) {
        const int32_t slot = slots[i] = slot_of_[units[i]];
        if (slot == kNone)
          missing_.push_back({units[i], &slots[i], rows.seats[r]});
        else
          touch(slot);
      }
    }
    int64_t* counts = config_.counts + int64_t(rows.seats[r]) * kRecallCounts;
    counts[kAttended] += attended;
    counts[kMissed] += missing_.size() - before;
  }
  misses_.clear();
  for (const auto& [unit, entry, request] : missing_) {
    int32_t slot = slot_of_[unit];
    if (slot == kNone) {  // else another row has missed it, too
      slot = acquire(unit);
      if (slot == kNone) {
        for (const Read& miss : misses_) drop(miss.unit);  // nobody will read them
        throw std::logic_error("the recall cache has fewer slots than one step attends to");
      }
      misses_.push_back({unit, slot});
      ++config_.counts[int64_t(request) * kRecallCounts + kRecalled];
    }
    *entry = slot;
  }
  for (int r = 0; r < rows.rows; ++r) {
    if (rows.mode[r] == Mode::kWhole) continue;
    std::vector<int32_t>& pinned = pinned_by_[rows.seats[r]];
    for (int head = 0; head < config_.kv_heads; ++head) {
      const int32_t* first =
          found.lists + (int64_t(r) * config_.kv_heads + head) * found.lists_stride;
      const int32_t* end = first + entries_of(rows, r, head);
      pinned.insert(pinned.end(), first, first + rows.sink[r]);
      pinned.insert(pinned.end(), end - rows.window[r], end);
    }
    for (int32_t slot : pinned) pin(slot);
  }
}

void RecallCache::resolve(const DecodeRows& rows, const UnitLists& found) {
  begin(rows, found);
  if (misses_.empty()) return;
  const int64_t start = now_ns();
  const int64_t count = static_cast<int64_t>(misses_.size());
#pragma omp parallel for schedule(static) if (misses_.size() >= kSerialReads)
  for (int64_t i = 0; i < count; ++i) read(misses_, i, i + 1);
  waited_ns_ += now_ns() - start;
}

bool RecallCache::stream(const DecodeRows& rows, const UnitLists& found, const UnitLists& late) {
  if (!takes(late, rows))
    throw std::invalid_argument("there is no room for the lists of what is late");
  begin(rows, found);
  late_.reads.clear();
  for (const Read& miss : misses_) copy_or_add(miss, late_);
  if (late_.reads.empty()) return false;
  start(late_, 1);
  late_slots_.clear();
  for (const Read& read : late_.reads) late_slots_.push_back(read.slot);
  std::sort(late_slots_.begin(), late_slots_.end());
  split(int64_t(rows.rows) * config_.kv_heads, found, late);
  return true;
}

// Moves the slots that are being read from the lists of those that are found to others.
void RecallCache::split(int64_t lists, const UnitLists& found, const UnitLists& late) const {
  const int32_t page_size = config_.page_size;
  for (int64_t list = 0; list < lists; ++list) {
    int32_t* here = found.lists + list * found.lists_stride;
    int32_t* there = late.lists + list * late.lists_stride;
    int32_t& length = found.lengths[list];
    int32_t rest = length, moved = 0, kept = 0;  // in tokens: the last page may be partly filled
    for (const int32_t* entry = here; rest > 0; ++entry) {
      const int32_t tokens = std::min(rest, page_size);
      rest -= tokens;
      if (std::binary_search(late_slots_.begin(), late_slots_.end(), *entry)) {
        there[moved / page_size] = *entry;
        moved += tokens;
      } else {
        here[kept / page_size] = *entry;
        kept += tokens;
      }
    }
    length = kept;
    late.lengths[list] = moved;
  }
}

void RecallCache::prefetch(const DecodeRows& rows, const Chooser& chooser) {
  if (chooser.index.kv_heads != config_.kv_heads)
    throw std::invalid_argument("the layer has " + std::to_string(chooser.index.kv_heads) +
                                " KV heads, its recall cache " + std::to_string(config_.kv_heads));
  check_rows(rows, std::min(config_.requests, chooser.seats), config_.kv_heads,
             config_.page_size);
  check_selection(rows, chooser);
  wait_for(ahead_);
  ahead_.reads.clear();
  bool room = true;
  for (int r = 0; r < rows.rows; ++r) {
    if (rows.mode[r] != Mode::kSelect) continue;  // nothing has been selected for a next step
    const int32_t* block = rows.block_table + r * rows.block_table_stride;
    int64_t recalled = 0;
    for (int head = 0; head < config_.kv_heads; ++head) {
      const int32_t* kept =
          chooser.selected +
          (int64_t(rows.seats[r]) * config_.kv_heads + head) * chooser.max_selected;
      const int count = chooser.select(rows, r, head);
      for (int i = 0; i < count; ++i) {
        const int32_t unit = block[kept[i]] * config_.kv_heads + head;
        int32_t slot = slot_of_[unit];
        if (slot != kNone) {
          touch(slot);
        } else if (room) {
          slot = acquire(unit);
          room = slot != kNone;
          if (!room) continue;
          ++recalled;
          copy_or_add({unit, slot}, ahead_);
        }
      }
    }
    config_.counts[int64_t(rows.seats[r]) * kRecallCounts + kRecalled] += recalled;
  }
  start(ahead_, kReadsPerJob);
}

// Copies a unit of an open page at once, for the page may be closed any time; adds others to `reads`.
void RecallCache::copy_or_add(const Read& read, Reads& reads) {
  if (config_.encoded != nullptr && config_.encoded->is_open(read.unit / config_.kv_heads))
    config_.encoded->read(read.unit, slot_at(read.slot));
  else
    reads.reads.push_back(read);
}

// Lets reader threads read, each at least `per_job` units if there are so many.
void RecallCache::start(Reads& reads, size_t per_job) {
  const size_t count = reads.reads.size();
  if (count == 0) return;
  const size_t jobs = std::clamp<size_t>(count / per_job, 1, reader_threads());
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reads.pending = static_cast<int>(jobs);
  }
  for (size_t job = 0; job < jobs; ++job) {
    const size_t begin = count * job / jobs, end = count * (job + 1) / jobs;
    const auto work = [this, &reads, begin, end] {
      const int64_t start = now_ns();
      read(reads.reads, begin, end);
      const std::lock_guard<std::mutex> lock(mutex_);
      read_ahead_ns_ += now_ns() - start;
      if (--reads.pending == 0) done_.notify_all();
    };
    try {
      submit(work);
    } catch (const std::exception&) {
      work();  // a forked child may have no readers
    }
  }
}

void RecallCache::wait_for(const Reads& reads) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (reads.pending == 0) return;
  const int64_t start = now_ns();
  done_.wait(lock, [&reads] { return reads.pending == 0; });
  waited_ns_ += now_ns() - start;
}

bool RecallCache::read_unit(int32_t unit, char* to) const {
  if (config_.encoded != nullptr) return config_.encoded->read(unit, to);
  const off_t offset = config_.offset + unit * config_.unit_bytes;
  for (int64_t done = 0; done < config_.unit_bytes; done += piece_bytes_) {
    const int64_t bytes = std::min(piece_bytes_, config_.unit_bytes - done);
    if (!read_fully(config_.fd, to + done, bytes, offset + done)) return false;
  }
  return true;
}

void RecallCache::read(const std::vector<Read>& reads, size_t begin, size_t end) {
  for (size_t i = begin; i < end; ++i) {
    const auto [unit, slot] = reads[i];
    if (read_unit(unit, slot_at(slot))) continue;
    error_ = errno;
    std::memset(slot_at(slot), 0, config_.unit_bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    failed_.push_back(unit);
  }
}

void RecallCache::drop_pages(const int64_t* pages, int64_t count) {
  join();
  for (int64_t i = 0; i < count; ++i)
    for (int head = 0; head < config_.kv_heads; ++head)
      drop(static_cast<int32_t>(pages[i] * config_.kv_heads + head));
}

void RecallCache::release(int request) {
  for (int32_t slot : pinned_by_[request]) unpin(slot);
  pinned_by_[request].clear();
}

bool RecallCache::give_up(int32_t unit) {
  const int32_t slot = slot_of_[unit];
  if (slot == kNone) return false;
  for (size_t request = 0; request < pinned_by_.size(); ++request) {
    const std::vector<int32_t>& pinned = pinned_by_[request];
    if (std::find(pinned.begin(), pinned.end(), slot) != pinned.end())
      release(static_cast<int>(request));
  }
  drop(unit);
  return true;
}

std::vector<int64_t> RecallCache::take_failed_pages() {
  std::vector<int32_t> units;
  std::vector<int64_t> pages;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    units.swap(failed_);
    pages.swap(lost_);
  }
  for (int64_t page : pages)
    for (int head = 0; head < config_.kv_heads; ++head)
      give_up(static_cast<int32_t>(page * config_.kv_heads + head));
  for (int32_t unit : units)
    if (give_up(unit)) pages.push_back(unit / config_.kv_heads);  // else evicted since, unread
  return pages;
}

}  // namespace kvr
