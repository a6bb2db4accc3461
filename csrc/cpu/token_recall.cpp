#include "token_recall.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "checks.h"
#include "clock.h"
#include "readers.h"
#include "recall_cache.h"

namespace kvr {

namespace {

// Less work than this is not worth waking threads for.
constexpr int kSerialTokens = 4096;
constexpr int kSerialReads = 64;
constexpr int kReadsPerPart = 32;
constexpr int kMostParts = 64;

std::string at_row(int row, const std::string& what) {
  return "row " + std::to_string(row) + ": " + what;
}

}  // namespace

TokenRecall::TokenRecall(TokenRecallConfig config)
    : config_(std::move(config)), held_(int64_t(config_.requests) * config_.lists),
      seen_(config_.requests, 0), progress_(new Progress[config_.layers.size()]) {
  const int64_t places = int64_t(config_.requests) * config_.kv_heads * config_.capacity;
  const int64_t tokens = int64_t(config_.pages) * config_.kv_heads * config_.page_size;
  if (std::max(places, tokens) > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument(std::to_string(tokens) + " tokens in home and places for " +
                                std::to_string(places) + ": more than 31 bits number");
  if (config_.lists != 1 && config_.lists != config_.kv_heads)
    throw std::invalid_argument("lists are of a KV head each, or one is of all");
  if (config_.layers.size() > 1) start_readers();
}

// ---------------------------------------------------------------------------------------------
// Which token is where
// ---------------------------------------------------------------------------------------------

// Of a list: the positions in the context of the tokens that it names, which have to rise. Returns
// what is wrong with it, or nothing.
std::string TokenRecall::locate(const DecodeRows& rows, int row, int list, int64_t room,
                                Work& work) const {
  const int heads = config_.kv_heads, size = config_.page_size, length = rows.seq_lens[row];
  const int unit = rows.unit(size);
  const int entries = (rows.lengths[row * heads + list] + unit - 1) / unit;
  const int32_t* block = rows.block_table + row * rows.block_table_stride;
  const int32_t* list_of = rows.lists + (int64_t(row) * heads + list) * rows.lists_stride;
  work.positions.clear();
  work.tokens.clear();
  int start = 0, next = 0;  // of the page in the context, and the first position that may come
  for (int i = 0; i < entries; ++i) {
    const int64_t first = int64_t(list_of[i]) * unit, page = first / size / heads;
    while (start < length && *block != page) start += size, ++block;
    const int position = start + static_cast<int>(first % size);
    if (first < 0 || page >= config_.pages || first / size % heads != list || position >= length ||
        position < next)
      return at_row(row, "entry " + std::to_string(i) + " of KV head " + std::to_string(list) +
                             " is " + std::to_string(list_of[i]) +
                             ", nothing in its context, or out of order");
    next = std::min(position + unit, length);
    for (int t = position; t < next; ++t) {
      work.positions.push_back(t);
      work.tokens.push_back(static_cast<int32_t>(first + t - position));
    }
  }
  const int64_t count = work.positions.size();
  if (count > room)
    return at_row(row, "attends to " + std::to_string(count) + " tokens, there is room for " +
                           std::to_string(room));
  return "";
}

// Gives every token of a list its place: those that are there keep theirs, others take free ones or
// those of tokens that have not been attended to for longest.
void TokenRecall::place(const DecodeRows& rows, int row, int list, uint32_t now,
                        const UnitLists& found, Work& work) {
  // The step writes these tokens, some of them perhaps in place of drafts that have been rejected.
  const int32_t request = rows.seats[row], newest = rows.selected_by(row) - 1;
  std::vector<Held>& held = held_[int64_t(request) * config_.lists + list];
  const int count = static_cast<int>(work.positions.size());
  if (rows.fresh[row]) held.clear();
  work.places.assign(count, -1);
  work.misses = work.older = 0;
  auto at = held.begin();
  for (int i = 0; i < count; ++i) {
    while (at != held.end() && at->position < work.positions[i]) ++at;
    if (at != held.end() && at->position == work.positions[i]) {
      at->token = work.tokens[i];
      at->step = now;
      work.places[i] = at->place;
    } else {
      ++work.misses;
      work.older += work.positions[i] < newest;
    }
  }
  // Places are taken from the first one on, and given back only to be taken at once.
  int32_t unused = static_cast<int32_t>(held.size());
  const int64_t victims = work.misses - (config_.capacity - unused);
  std::vector<Held>& merged = work.merged;
  std::vector<int32_t> freed;
  if (victims > 0) {
    std::vector<uint32_t> ages;
    for (const Held& h : held) ages.push_back(now - h.step);
    std::nth_element(ages.begin(), ages.begin() + victims - 1, ages.end(), std::greater<>());
    const uint32_t limit = ages[victims - 1];
    int64_t of_limit = victims - std::count_if(ages.begin(), ages.end(),
                                               [&](uint32_t age) { return age > limit; });
    const auto gives_way = [&](const Held& h) {
      const uint32_t age = now - h.step;
      if (age < limit || (age == limit && of_limit-- <= 0)) return false;
      freed.push_back(h.place);
      return true;
    };
    held.erase(std::remove_if(held.begin(), held.end(), gives_way), held.end());
  }
  merged.clear();
  work.reads.clear();
  work.newest.clear();
  at = held.begin();
  auto next_freed = freed.begin();
  const auto read_into = [&](int i, std::vector<Read>& reads) {
    if (!reads.empty() && reads.back().token + reads.back().count == work.tokens[i] &&
        reads.back().place + reads.back().count == work.places[i])
      ++reads.back().count;
    else
      reads.push_back({request, list, work.tokens[i], work.places[i], 1});
  };
  for (int i = 0; i < count; ++i) {
    const int32_t position = work.positions[i];
    while (at != held.end() && at->position < position) merged.push_back(*at++);
    if (work.places[i] >= 0) {
      if (position >= newest) read_into(i, work.newest);
      continue;
    }
    const int32_t place = next_freed != freed.end() ? *next_freed++ : unused++;
    work.places[i] = place;
    merged.push_back({position, work.tokens[i], place, now});
    read_into(i, position >= newest ? work.newest : work.reads);
  }
  merged.insert(merged.end(), at, held.end());
  held.assign(merged.begin(), merged.end());
  const int together = heads_per_list();
  for (int head = list; head < list + together; ++head) {
    const int64_t number = int64_t(row) * config_.kv_heads + head;
    int32_t* entry = found.lists + number * found.lists_stride;
    found.lengths[number] = rows.lengths[number];
    const int32_t first = (request * config_.kv_heads + head) * config_.capacity;
    for (int i = 0; i < count; ++i) entry[i] = first + work.places[i];
  }
}

// ---------------------------------------------------------------------------------------------
// The life of a step
// ---------------------------------------------------------------------------------------------

void TokenRecall::recall(const DecodeRows& rows, const UnitLists& found) {
  check_rows(rows, config_.requests, config_.kv_heads, config_.page_size);
  check_lengths(rows, config_.kv_heads, config_.page_size);
  join();
  std::fill(seen_.begin(), seen_.end(), 0);
  for (int r = 0; r < rows.rows; ++r) {
    if (rows.mode[r] == Mode::kWhole)
      throw std::invalid_argument(at_row(r, "attends to the whole context, which is not recalled"));
    if (seen_[rows.seats[r]]++)
      throw std::invalid_argument(at_row(r, "another one has its seat"));
  }
  if (found.size < int64_t(rows.rows) * config_.kv_heads)
    throw std::invalid_argument("there is no room for the lists of places");
  const int64_t room = std::min<int64_t>(config_.capacity, found.width);
  const int lists = config_.lists, tasks = rows.rows * lists;
  thread_local std::vector<Work> scratch;  // one for all layers
  if (static_cast<int>(scratch.size()) < tasks) scratch.resize(tasks);
  Work* const work = scratch.data();
  const uint32_t now = step_ + 1;
  int64_t tokens = 0;
  for (int i = 0; i < tasks; ++i)
    tokens += rows.lengths[i / lists * config_.kv_heads + i % lists];
  // Nothing changes before all that is named has been found.
  bool good = true;
#pragma omp parallel if (tasks > 1 && tokens > kSerialTokens)
  {
#pragma omp for schedule(dynamic, 1) reduction(&& : good)
    for (int i = 0; i < tasks; ++i) {
      work[i].error = locate(rows, i / lists, i % lists, room, work[i]);
      good = good && work[i].error.empty();
    }
    if (good) {
#pragma omp for schedule(dynamic, 1)
      for (int i = 0; i < tasks; ++i) place(rows, i / lists, i % lists, now, found, work[i]);
    }
  }
  for (int i = 0; i < tasks; ++i)
    if (!work[i].error.empty()) throw std::invalid_argument(work[i].error);
  step_ = now;
  reads_.clear();
  newest_.clear();
  const int64_t copies = int64_t(heads_per_list()) * config_.layers.size();
  for (int i = 0; i < tasks; ++i) {
    const auto& [positions, tokens, places, merged, reads, newest, missed, older, error] = work[i];
    reads_.insert(reads_.end(), reads.begin(), reads.end());
    newest_.insert(newest_.end(), newest.begin(), newest.end());
    int64_t* counts = config_.counts + int64_t(rows.seats[i / lists]) * kRecallCounts;
    counts[kAttended] += copies * static_cast<int64_t>(positions.size());
    counts[kMissed] += copies * older;
    counts[kRecalled] += copies * older;
  }
  const int reads = static_cast<int>(reads_.size());
  parts_ = reads == 0 ? 0 : std::clamp(reads / kReadsPerPart, 1, kMostParts);
  for (size_t layer = 0; layer < config_.layers.size(); ++layer) {
    progress_[layer].next = 0;
    progress_[layer].left = parts_;
  }
  if (config_.layers.size() > 1 && parts_ > 0) start_reading();
}

void TokenRecall::start_reading() {
  const int jobs = std::min<int>(reader_threads(), parts_ * static_cast<int>(config_.layers.size()));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    readers_ = jobs;
  }
  for (int job = 0; job < jobs; ++job) {
    const auto work = [this] {
      const int64_t start = now_ns();
      for (size_t layer = 0; layer < config_.layers.size(); ++layer)
        read_parts(static_cast<int>(layer));
      read_ahead_ns_ += now_ns() - start;
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--readers_ == 0) done_.notify_all();
    };
    try {
      submit(work);
    } catch (const std::exception&) {
      work();  // a forked child may have no readers
    }
  }
}

// Reads what nobody else has taken yet of what a layer needs.
void TokenRecall::read_parts(int layer) {
  Progress& progress = progress_[layer];
  const int64_t count = static_cast<int64_t>(reads_.size());
  for (int part; (part = progress.next++) < parts_;) {
    for (int64_t i = count * part / parts_; i < count * (part + 1) / parts_; ++i)
      read(reads_[i], layer);
    if (--progress.left == 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      done_.notify_all();
    }
  }
}

void TokenRecall::wait(int layer) {
  if (layer < 0 || layer >= static_cast<int>(config_.layers.size()))
    throw std::invalid_argument("layer " + std::to_string(layer) + " of " +
                                std::to_string(config_.layers.size()));
  const int64_t start = now_ns();
  const Progress& progress = progress_[layer];
  if (progress.next < parts_) {
#pragma omp parallel if (static_cast<int>(reads_.size()) >= kSerialReads)
    read_parts(layer);
  }
  if (progress.left > 0) {
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return progress.left == 0; });
  }
  for (const Read& token : newest_) read(token, layer);
  waited_ns_ += now_ns() - start;
}

void TokenRecall::read(const Read& read, int layer) const {
  const auto& [memory, home] = config_.layers[layer];
  for (int i = 0; i < heads_per_list(); ++i) {
    const int64_t token = int64_t(read.token) + i * config_.page_size;
    const int64_t head = int64_t(read.request) * config_.kv_heads + read.list + i;
    std::memcpy(memory + (head * config_.capacity + read.place) * config_.token_bytes,
                home + token * config_.token_bytes, read.count * config_.token_bytes);
  }
}

void TokenRecall::join() {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return readers_ == 0; });
}

void TokenRecall::release(int request) {
  join();
  for (int list = 0; list < config_.lists; ++list)
    held_[int64_t(request) * config_.lists + list].clear();
}

int64_t TokenRecall::used() const {
  int64_t places = 0;
  for (const auto& held : held_) places += static_cast<int64_t>(held.size());
  return places * heads_per_list() * static_cast<int64_t>(config_.layers.size());
}

// ---------------------------------------------------------------------------------------------
// For tests
// ---------------------------------------------------------------------------------------------

std::string TokenRecall::check() {
  join();
  for (size_t i = 0; i < held_.size(); ++i) {
    const std::vector<Held>& held = held_[i];
    const std::string name = "list " + std::to_string(i);
    std::vector<uint8_t> taken(held.size(), 0);
    for (size_t j = 0; j < held.size(); ++j) {
      const auto& [position, token, place, step] = held[j];
      if (j > 0 && position <= held[j - 1].position) return name + " is not in order";
      if (place < 0 || place >= static_cast<int32_t>(held.size()) || taken[place]++)
        return name + " has place " + std::to_string(place) + " twice, or others free";
      for (const auto& [memory, home] : config_.layers)
        for (int h = 0; h < heads_per_list(); ++h) {
          const int64_t head = i / config_.lists * config_.kv_heads + i % config_.lists + h;
          if (std::memcmp(memory + (head * config_.capacity + place) * config_.token_bytes,
                          home + (int64_t(token) + h * config_.page_size) * config_.token_bytes,
                          config_.token_bytes))
            return name + ": place " + std::to_string(place) + " differs from token " +
                   std::to_string(token) + " in home";
        }
    }
  }
  return "";
}

}  // namespace kvr
