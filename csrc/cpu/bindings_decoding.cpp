// A layer's part in a step that decodes, in one call: what it writes, selects, and attends to.
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "checks.h"
#include "clock.h"

namespace kvr {
namespace bindings {

namespace {

// A layer as its steps need it.
struct DecodeLayer {
  kvr::DType dtype;
  nb::object torch_dtype;
  kvr::KeyLayout layout;
  int element_size, group;
  int64_t pages;
  void* cache;                      // [pages, kv_heads, 2 * page_size * head_size]
  std::vector<kvr::Index> indexes;  // that take keys in as they are written
  float scale, softcap;
  const float* sinks;
};

struct Step {
  const DecodeLayer& layer;
  const Chooser& chooser;
  const kvr::DecodeRows& rows;
  kvr::CacheWrite write;
  const void* query;
  int64_t query_stride;
  void* out;
  int64_t out_stride;

  // Returns the nanoseconds in which pages were selected.
  int64_t run() const {
    const kvr::Index& index = chooser.index;
    kvr::check_slots(write.slot_mapping, write.num_tokens, layer.pages * index.page_size);
    kvr::write_cache(write);
    for (const kvr::Index& kept : layer.indexes)
      active->update_index({kept, write.keys, write.key_stride, write.slot_mapping, write.num_tokens});
    const int64_t began = now_ns();
    thread_local std::vector<float> values, lse;
    float *rest_values = nullptr, *rest_lse = nullptr;
    if (chooser.remainder > 0) {
      lse.resize(size_t(rows.rows) * index.kv_heads * chooser.group);
      values.resize(lse.size() * index.head_size);
      rest_values = values.data(), rest_lse = lse.data();
    }
    active->plan_decode({rows, chooser, query, query_stride, nullptr, 0, rest_values, rest_lse});
    const int64_t planned = now_ns();
    const kvr::Attention attention{layer.dtype,
                                   layer.layout,
                                   rows.rows,
                                   index.kv_heads,
                                   chooser.group,
                                   index.head_size,
                                   index.page_size,
                                   layer.cache,
                                   layer.pages * index.kv_heads * index.page_size,
                                   nullptr,
                                   query,
                                   query_stride,
                                   out,
                                   out_stride,
                                   false,
                                   nullptr,
                                   nullptr,
                                   0,
                                   rows.lists,
                                   rows.lists_width,
                                   rows.lists_stride,
                                   true,
                                   rows.lengths,
                                   rows.unit(index.page_size),
                                   layer.scale,
                                   layer.softcap,
                                   layer.sinks,
                                   rest_values,
                                   rest_lse};
    kvr::check_lists(attention);
    active->attend(attention);
    return planned - began;
  }
};

// The layer and the chooser have one cache, and steps of single queries.
void check_layer(const DecodeLayer& layer, const Chooser& chooser, const kvr::DecodeRows& rows) {
  const kvr::Index& index = chooser.index;
  if (layer.cache != index.cache || layer.layout != index.layout || layer.dtype != index.dtype ||
      layer.group != chooser.group || index.kind == kvr::kOutside)
    throw std::invalid_argument("the chooser selects in another cache, or by an index without kernels");
  if (rows.starts != nullptr || (rows.per_token && layer.layout != kvr::KeyLayout::kRows))
    throw std::invalid_argument("rows have drafts, or select tokens of pages");
}

}  // namespace

void bind_decoding(nb::module_& m) {
  nb::class_<DecodeLayer>(m, "DecodeLayer")
      .def("__init__",
           [](DecodeLayer* self, int dtype, nb::object torch_dtype, int layout, int element_size,
              int group, int64_t pages, uintptr_t cache,
              const std::vector<const Index*>& indexes, float scale, float softcap, uintptr_t sinks) {
             new (self) DecodeLayer{static_cast<kvr::DType>(dtype), std::move(torch_dtype),
                                    static_cast<kvr::KeyLayout>(layout), element_size, group,
                                    pages, at<void>(cache), {}, scale, softcap, at<float>(sinks)};
             for (const Index* index : indexes) self->indexes.push_back(*index);
           },
           nb::kw_only(), nb::arg("dtype"), nb::arg("torch_dtype"), nb::arg("layout"),
           nb::arg("element_size"), nb::arg("group"), nb::arg("pages"), nb::arg("cache"),
           nb::arg("indexes"), nb::arg("scale"), nb::arg("softcap"), nb::arg("sinks"));

  m.def("decode_layer",
        [](uintptr_t queries, nb::tuple query_shape, nb::tuple query_strides, nb::handle query_dtype,
           uintptr_t keys, nb::tuple key_shape, nb::tuple key_strides, nb::handle key_dtype,
           uintptr_t values, nb::tuple value_shape, nb::tuple value_strides, nb::handle value_dtype,
           uintptr_t out, nb::tuple out_shape, nb::tuple out_strides, nb::handle out_dtype,
           uintptr_t slot_mapping, int64_t num_tokens, const kvr::DecodeRows& rows,
           const Chooser& chooser, const DecodeLayer& layer) {
          const Vectors query{queries, query_shape, query_strides, query_dtype};
          const Vectors key{keys, key_shape, key_strides, key_dtype};
          const Vectors value{values, value_shape, value_strides, value_dtype};
          const Vectors output{out, out_shape, out_strides, out_dtype};
          const kvr::Index& index = chooser.index;
          check_layer(layer, chooser, rows);
          check_plan(query, rows, chooser);
          key.check("key", num_tokens, index.kv_heads, index.head_size, layer.torch_dtype);
          value.check("value", num_tokens, index.kv_heads, index.head_size, layer.torch_dtype);
          output.check("output", rows.rows, index.kv_heads * layer.group, index.head_size,
                       layer.torch_dtype);
          const Step step{layer,
                          chooser,
                          rows,
                          {at<void>(keys), at<void>(values), key.stride(), value.stride(),
                           at<int64_t>(slot_mapping), num_tokens, layer.cache, index.kv_heads,
                           index.page_size, index.head_size, layer.element_size, layer.layout},
                          at<void>(queries),
                          query.stride(),
                          at<void>(out),
                          output.stride()};
          const nb::gil_scoped_release release;
          return step.run();
        });
}

}  // namespace bindings
}  // namespace kvr
