// Reads and writes parts of a file, all or nothing. On failure errno says why.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstddef>

namespace kvr {

inline bool read_fully(int fd, void* to, size_t bytes, off_t offset) {
  for (auto* at = static_cast<char*>(to); bytes > 0;) {
    const ssize_t got = pread(fd, at, bytes, offset);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) errno = EIO;  // the file ends too early
    if (got <= 0) return false;
    at += got;
    bytes -= got;
    offset += got;
  }
  return true;
}

inline bool write_fully(int fd, const void* from, size_t bytes, off_t offset) {
  for (auto* at = static_cast<const char*>(from); bytes > 0;) {
    const ssize_t put = pwrite(fd, at, bytes, offset);
    if (put < 0 && errno == EINTR) continue;
    if (put == 0) errno = EIO;
    if (put <= 0) return false;
    at += put;
    bytes -= put;
    offset += put;
  }
  return true;
}

}  // namespace kvr
