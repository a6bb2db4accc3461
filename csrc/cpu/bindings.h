// What the bindings of kernels share. Tensors arrive as addresses: the extension does not depend on any
// PyTorch version, and a call costs about a microsecond. vllm_kvretrieval/kernels/cpu is the only
// caller; it guarantees lifetimes (threads that read ahead keep their memory) and, where it binds rows
// and layers, shapes and dtypes. What differs from call to call is checked here.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "kernels.h"

namespace kvr {
namespace bindings {

namespace nb = nanobind;

extern const KernelTable* active;  // the instruction set in use

void bind_attention(nb::module_& m);  // bindings_attention.cpp
void bind_decoding(nb::module_& m);   // bindings_decoding.cpp
void bind_recall(nb::module_& m);     // bindings_recall.cpp

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// An index, and the torch.dtype of the layer's keys and queries.
struct Index : kvr::Index {
  nb::object torch_dtype;
};

struct Chooser : kvr::Chooser {
  nb::object torch_dtype;
};

struct ContextSelector : kvr::ContextSelector {
  nb::object torch_dtype;
};

// Queries or keys: [>= tokens, heads, head_size], heads of a token side by side.
struct Vectors {
  uintptr_t address;
  nb::tuple shape, strides;
  nb::handle torch_dtype;

  int64_t stride() const { return nb::cast<int64_t>(strides[0]); }
  void check(const char* name, int64_t tokens, int heads, int head_size, nb::handle dtype) const {
    const auto is = [](const nb::tuple& tuple, int i, int64_t value) {
      return nb::cast<int64_t>(tuple[i]) == value;
    };
    if (nb::len(shape) == 3 && nb::cast<int64_t>(shape[0]) >= tokens && is(shape, 1, heads) &&
        is(shape, 2, head_size) && is(strides, 2, 1) &&
        (heads == 1 || is(strides, 1, head_size)) && torch_dtype.is(dtype))
      return;
    throw nb::value_error(
        nb::str("{} must be [>= {}, {}, {}] in {} with heads side by side, got {} in {} with strides {}")
            .format(name, tokens, heads, head_size, dtype, nb::tuple(shape),
                    torch_dtype, strides)
            .c_str());
  }
};

// The rows, their queries and the chooser fit each other.
void check_plan(const Vectors& query, const kvr::DecodeRows& rows, const Chooser& chooser);

}  // namespace bindings
}  // namespace kvr
