// The home of one layer whose pages are encoded in a file.
//
// A page is open from its first token on: vLLM writes it to memory, raw. When it is closed, it is
// encoded into the file, and its memory is given back. Raw pages have addresses as if the whole
// cache were in memory, but only open pages take memory.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "codec.h"

namespace kvr {

struct EncodedHomeConfig {
  Codec codec;
  DType dtype;
  int32_t pages, kv_heads, page_size, head_size;
  char* raw;                 // [pages, kv_heads, raw bytes of a unit]
  int fd;                    // the file
  off_t offset;              // where the layer's part begins: [pages, kv_heads, encoded bytes]
  const KernelTable* kernels;
};

class EncodedHome {
 public:
  explicit EncodedHome(const EncodedHomeConfig& config);

  int64_t pages() const { return config_.pages; }
  int kv_heads() const { return config_.kv_heads; }
  int page_size() const { return config_.page_size; }
  int head_size() const { return config_.head_size; }
  int64_t element_size() const { return element_bytes(config_.dtype); }
  int64_t raw_bytes() const { return raw_bytes_; }  // of a unit

  // Opens a page whose first token is written. Earlier contents are void.
  void open(int64_t page) { state_[page] = State::kOpen; }
  bool is_open(int64_t page) const { return state_[page] == State::kOpen; }
  bool is_closed(int64_t page) const { return state_[page] == State::kClosed; }
  // Takes over a page that the file has, encoded, from an earlier run.
  void adopt(int64_t page) { state_[page] = State::kClosed; }
  // Returns the address of a unit of an open page.
  const char* raw(int64_t unit) const { return config_.raw + unit * raw_bytes_; }
  // Copies a unit to `to`, raw. Returns false if it cannot be read or does not exist; errno says
  // why. May run beside calls for other pages.
  bool read(int64_t unit, char* to) const;
  // Encodes an open page into the file. `decoded` has an address per KV head, which gets what a read
  // would give from now on, or null. Returns false if the page could not be written: it is lost then,
  // and errno says why. May run beside calls for other pages.
  bool close(int64_t page, char* const* decoded);
  // Forgets an open page that no request will read.
  void abandon(int64_t page) { state_[page] = State::kNothing; }
  // Gives back the memory of a page that is no longer open.
  void let_go(int64_t page) const;

 private:
  enum class State : uint8_t { kNothing, kOpen, kClosed };

  void decode(const uint8_t* encoded, char* to) const;
  off_t place(int64_t unit) const { return config_.offset + unit * encoded_bytes_; }

  EncodedHomeConfig config_;
  int64_t raw_bytes_, encoded_bytes_;
  std::vector<State> state_;
};

}  // namespace kvr
