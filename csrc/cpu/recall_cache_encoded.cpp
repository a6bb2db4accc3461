// What a recall cache does with the pages of an encoded home.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "recall_cache.h"
#include "staging.h"

namespace kvr {

EncodedHome& RecallCache::encoded(const int64_t* pages, int64_t count) {
  if (config_.encoded == nullptr) throw std::invalid_argument("the home is not encoded");
  for (int64_t i = 0; i < count; ++i)
    if (pages[i] < 0 || pages[i] >= config_.encoded->pages())
      throw std::invalid_argument("pages[" + std::to_string(i) + "] is " + std::to_string(pages[i]) +
                                  ", the home has " + std::to_string(config_.encoded->pages()));
  return *config_.encoded;
}

void RecallCache::note_lost(int64_t page) {
  error_ = errno;
  const std::lock_guard<std::mutex> lock(mutex_);
  lost_.push_back(page);
}

void RecallCache::close(const int64_t* pages, int64_t count) {
  EncodedHome& home = encoded(pages, count);
  for (int64_t i = 0; i < count; ++i)
    if (!home.is_open(pages[i]))
      throw std::logic_error("page " + std::to_string(pages[i]) + " is to be closed, but not open");
#pragma omp parallel for schedule(static) if (count > 1)
  for (int64_t i = 0; i < count; ++i) {
    thread_local std::vector<char*> slots;
    slots.resize(config_.kv_heads);
    for (int head = 0; head < config_.kv_heads; ++head) {
      const int32_t slot = slot_of_[pages[i] * config_.kv_heads + head];
      slots[head] = slot == kNone ? nullptr : slot_at(slot);
    }
    if (!home.close(pages[i], slots.data())) note_lost(pages[i]);
  }
  for (int64_t i = 0; i < count; ++i) home.let_go(pages[i]);
}

bool RecallCache::closed(const int64_t* pages, int64_t count) {
  const EncodedHome& home = encoded(pages, count);
  return std::all_of(pages, pages + count, [&](int64_t page) { return home.is_closed(page); });
}

void RecallCache::adopt(const int64_t* pages, int64_t count) {
  EncodedHome& home = encoded(pages, count);
  for (int64_t i = 0; i < count; ++i)
    if (home.is_open(pages[i]))
      throw std::logic_error("page " + std::to_string(pages[i]) + " is open, and is to be adopted");
  drop_pages(pages, count);
  for (int64_t i = 0; i < count; ++i) home.adopt(pages[i]);
}

void RecallCache::abandon(const int64_t* pages, int64_t count) {
  EncodedHome& home = encoded(pages, count);
  join();
  for (int64_t i = 0; i < count; ++i) {
    if (!home.is_open(pages[i])) continue;
    for (int head = 0; head < config_.kv_heads; ++head)
      drop(static_cast<int32_t>(pages[i] * config_.kv_heads + head));
    home.abandon(pages[i]);
    home.let_go(pages[i]);
  }
}

void RecallCache::stage(const int64_t* pages, int64_t count, char* target, int parts) {
  const int heads = config_.kv_heads;
  for (int64_t i = 0; i < count; ++i)
    if (pages[i] != kNone) encoded(pages + i, 1);
  EncodedHome& home = encoded(pages, 0);
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t i = 0; i < count; ++i) {
    for (int head = 0; head < heads; ++head) {
      thread_local std::vector<char> copy;
      copy.resize(config_.unit_bytes);
      const char* from = copy.data();
      const int64_t unit = pages[i] * heads + head;
      if (pages[i] == kNone) {
        std::memset(copy.data(), 0, copy.size());
      } else if (home.is_open(pages[i])) {
        from = home.raw(unit);
      } else if (!home.read(unit, copy.data())) {
        note_lost(pages[i]);
        std::memset(copy.data(), 0, copy.size());
      }
      lay_out_unit(from, target + (i / parts * heads + head) * parts * config_.unit_bytes, i % parts,
                   parts, home.page_size(), home.head_size(), static_cast<int>(home.element_size()));
    }
  }
}

}  // namespace kvr
