#include "encoded_home.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "checks.h"
#include "file.h"

namespace kvr {

EncodedHome::EncodedHome(const EncodedHomeConfig& c)
    : config_(c), raw_bytes_(2 * int64_t(c.page_size) * c.head_size * element_bytes(c.dtype)),
      encoded_bytes_(encoded_bytes(c.codec, c.dtype, c.page_size, c.head_size)) {
  check_coding({c.codec, c.dtype, c.page_size, c.head_size, nullptr, nullptr, 0});
  if (c.pages < 1 || c.kv_heads < 1)
    throw std::invalid_argument("a home of " + std::to_string(c.pages) + " pages of " +
                                std::to_string(c.kv_heads) + " KV heads cannot be");
  state_.resize(c.pages, State::kNothing);
}

void EncodedHome::decode(const uint8_t* encoded, char* to) const {
  config_.kernels->decode_units({config_.codec, config_.dtype, config_.page_size, config_.head_size,
                                 to, const_cast<uint8_t*>(encoded), 1});
}

bool EncodedHome::read(int64_t unit, char* to) const {
  const State state = state_[unit / config_.kv_heads];
  if (state == State::kOpen) std::memcpy(to, raw(unit), raw_bytes_);
  if (state == State::kNothing) errno = ENODATA;
  if (state != State::kClosed) return state == State::kOpen;
  thread_local std::vector<uint8_t> encoded;
  encoded.resize(encoded_bytes_);
  if (!read_fully(config_.fd, encoded.data(), encoded_bytes_, place(unit))) return false;
  decode(encoded.data(), to);
  return true;
}

bool EncodedHome::close(int64_t page, char* const* decoded) {
  thread_local std::vector<uint8_t> encoded;
  const int heads = config_.kv_heads;
  encoded.resize(heads * encoded_bytes_);
  config_.kernels->encode_units({config_.codec, config_.dtype, config_.page_size, config_.head_size,
                                 const_cast<char*>(raw(page * heads)), encoded.data(), heads});
  const bool written = write_fully(config_.fd, encoded.data(), encoded.size(), place(page * heads));
  state_[page] = written ? State::kClosed : State::kNothing;
  for (int head = 0; written && head < heads; ++head)
    if (decoded[head] != nullptr) decode(encoded.data() + head * encoded_bytes_, decoded[head]);
  return written;
}

void EncodedHome::let_go(int64_t page) const {
  // The system's pages are whole: those at the ends may also hold pages beside this one.
  static const int64_t size = sysconf(_SC_PAGESIZE);
  const int64_t bytes = raw_bytes_ * config_.kv_heads;
  const auto base = reinterpret_cast<intptr_t>(config_.raw);
  const auto used = [&](intptr_t first, intptr_t last) {
    const int64_t end = std::min<int64_t>((last - base + bytes - 1) / bytes, config_.pages);
    if (first < base || last > base + config_.pages * bytes) return true;
    for (int64_t p = (first - base) / bytes; p < end; ++p)
      if (is_open(p)) return true;
    return false;
  };
  intptr_t begin = (base + page * bytes) / size * size;
  intptr_t end = (base + (page + 1) * bytes + size - 1) / size * size;
  if (used(begin, begin + size)) begin += size;
  if (begin < end && used(end - size, end)) end -= size;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace kvr
