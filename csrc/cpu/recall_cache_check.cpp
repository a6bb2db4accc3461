// What tests ask of a recall cache.
#include <algorithm>
#include <cstring>

#include "recall_cache.h"

namespace kvr {

int RecallCache::pinned() const {
  return static_cast<int>(
      std::count_if(pins_.begin(), pins_.end(), [](int32_t pins) { return pins > 0; }));
}

std::vector<int32_t> RecallCache::resident() const {
  std::vector<int32_t> units;
  for (int32_t slot = newer_[config_.slots]; slot != config_.slots; slot = newer_[slot])
    units.push_back(unit_of_[slot]);
  for (int32_t slot = 0; slot < config_.slots; ++slot)
    if (pins_[slot] > 0) units.push_back(unit_of_[slot]);
  return units;
}

std::string RecallCache::check() {
  join();
  std::vector<int32_t> owners(config_.slots, 0), pins(config_.slots, 0);
  for (int32_t slot : free_) {
    if (unit_of_[slot] != kNone) return "slot " + std::to_string(slot) + " is free and in use";
    ++owners[slot];
  }
  for (int32_t slot = newer_[config_.slots]; slot != config_.slots; slot = newer_[slot]) {
    if (older_[newer_[slot]] != slot) return "the list of slots is broken at " + std::to_string(slot);
    if (++owners[slot] > 1) return "slot " + std::to_string(slot) + " is listed twice";
  }
  for (const auto& pinned : pinned_by_)
    for (int32_t slot : pinned) ++pins[slot];
  for (int32_t slot = 0; slot < config_.slots; ++slot) {
    const std::string name = "slot " + std::to_string(slot);
    if (pins[slot] != pins_[slot])
      return name + " has " + std::to_string(pins_[slot]) + " pins, requests hold " +
             std::to_string(pins[slot]);
    if (owners[slot] + (pins_[slot] > 0) != 1) return name + " is not owned exactly once";
    const int32_t unit = unit_of_[slot];
    if (unit == kNone) continue;
    if (slot_of_[unit] != slot) return name + " holds unit " + std::to_string(unit) + " unknown to it";
    const char* home = config_.home + unit * config_.unit_bytes;
    std::vector<char> copy;
    if (config_.encoded != nullptr) {
      copy.resize(config_.unit_bytes);
      if (!config_.encoded->read(unit, copy.data()))
        return name + " holds unit " + std::to_string(unit) + ", which home has not";
      home = copy.data();
    }
    if (std::memcmp(slot_at(slot), home, config_.unit_bytes))
      return name + " differs from unit " + std::to_string(unit) + " in home";
  }
  const auto resident = config_.units - std::count(slot_of_.begin(), slot_of_.end(), kNone);
  if (resident + static_cast<int64_t>(free_.size()) != config_.slots)
    return "free and used slots are not all slots";
  return "";
}

}  // namespace kvr
