// Python's view of attention, of the cache that it reads, and of linear layers.
#include "bindings.h"
#include "checks.h"

namespace kvr {
namespace bindings {

void bind_attention(nb::module_& m) {
  m.def(
      "multiply",
      [](uintptr_t x, uintptr_t weights, uintptr_t bias, uintptr_t out, int64_t tokens, int64_t inputs,
         int64_t outputs, int dtype) {
        active->multiply({static_cast<kvr::DType>(dtype), at<void>(x), at<void>(weights), at<void>(bias),
                          at<void>(out), tokens, inputs, outputs});
      },
      nb::kw_only(), nb::arg("x"), nb::arg("weights"), nb::arg("bias"), nb::arg("out"), nb::arg("tokens"),
      nb::arg("inputs"), nb::arg("outputs"), nb::arg("dtype"), nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "multiply_quantised",
      [](uintptr_t x, uintptr_t weights, uintptr_t scales, uintptr_t groups, uintptr_t bias,
         uintptr_t out, int64_t tokens, int64_t inputs, int64_t outputs, int bits, int group,
         int dtype) {
        active->multiply_quantised({static_cast<kvr::DType>(dtype), at<void>(x), at<int8_t>(weights),
                                    at<float>(scales), at<void>(groups), at<void>(bias), at<void>(out),
                                    tokens, inputs, outputs, bits, group});
      },
      nb::kw_only(), nb::arg("x"), nb::arg("weights"), nb::arg("scales"), nb::arg("groups"),
      nb::arg("bias"), nb::arg("out"), nb::arg("tokens"), nb::arg("inputs"), nb::arg("outputs"),
      nb::arg("bits"), nb::arg("group"), nb::arg("dtype"), nb::call_guard<nb::gil_scoped_release>());
  m.attr("PANEL") = kvr::QuantisedLayer::kPanel;
  m.attr("BLOCK") = kvr::QuantisedLayer::kBlock;

  m.def(
      "stage_pages",
      [](uintptr_t source, int64_t source_pages, uintptr_t pages, int64_t num_pages, uintptr_t target,
         int64_t blocks, int32_t pages_per_block, int32_t kv_heads, int32_t page_size,
         int32_t head_size, int32_t element_size, int from, int to) {
        const kvr::PageStaging staging{at<void>(source),
                                       source_pages,
                                       at<int32_t>(pages),
                                       num_pages,
                                       at<void>(target),
                                       blocks,
                                       pages_per_block,
                                       kv_heads,
                                       page_size,
                                       head_size,
                                       element_size,
                                       static_cast<kvr::KeyLayout>(from),
                                       static_cast<kvr::KeyLayout>(to)};
        kvr::check_staging(staging);
        kvr::stage_pages(staging);
      },
      nb::kw_only(), nb::arg("source"), nb::arg("source_pages"), nb::arg("pages"),
      nb::arg("num_pages"), nb::arg("target"), nb::arg("blocks"), nb::arg("pages_per_block"), nb::arg("kv_heads"), nb::arg("page_size"), nb::arg("head_size"),
      nb::arg("element_size"), nb::arg("source_layout"), nb::arg("target_layout"),
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "stage_tokens",
      [](uintptr_t source, int64_t cache_tokens, uintptr_t entries, int64_t width, int64_t stride,
         uintptr_t lengths, uintptr_t target, int64_t blocks, int rows, int block_tokens,
         int kv_heads, int head_size, int element_size, int to) {
        const kvr::TokenStaging staging{at<void>(source),
                                        cache_tokens,
                                        at<int32_t>(entries),
                                        width,
                                        stride,
                                        at<int32_t>(lengths),
                                        at<void>(target),
                                        blocks,
                                        rows,
                                        block_tokens,
                                        kv_heads,
                                        head_size,
                                        element_size,
                                        static_cast<kvr::KeyLayout>(to)};
        kvr::check_staging(staging);
        kvr::stage_tokens(staging);
      },
      nb::kw_only(), nb::arg("source"), nb::arg("cache_tokens"), nb::arg("entries"),
      nb::arg("entries_width"), nb::arg("entries_stride"), nb::arg("lengths"), nb::arg("target"),
      nb::arg("blocks"), nb::arg("rows"), nb::arg("block_tokens"), nb::arg("kv_heads"),
      nb::arg("head_size"), nb::arg("element_size"), nb::arg("target_layout"),
      nb::call_guard<nb::gil_scoped_release>());

  m.def("write_cache",
        [](uintptr_t keys, nb::tuple key_shape, nb::tuple key_strides, nb::handle key_dtype,
           uintptr_t values, nb::tuple value_shape, nb::tuple value_strides, nb::handle value_dtype,
           uintptr_t slot_mapping, int64_t num_tokens, uintptr_t cache, int64_t pages, int kv_heads,
           int page_size, int head_size, int element_size, int layout, nb::handle torch_dtype) {
          const Vectors key{keys, key_shape, key_strides, key_dtype};
          const Vectors value{values, value_shape, value_strides, value_dtype};
          key.check("key", num_tokens, kv_heads, head_size, torch_dtype);
          value.check("value", num_tokens, kv_heads, head_size, torch_dtype);
          const kvr::CacheWrite write{at<void>(keys),
                                    at<void>(values),
                                    key.stride(),
                                    value.stride(),
                                    at<int64_t>(slot_mapping),
                                    num_tokens,
                                    at<void>(cache),
                                    kv_heads,
                                    page_size,
                                    head_size,
                                    element_size,
                                    static_cast<kvr::KeyLayout>(layout)};
          const nb::gil_scoped_release release;
          kvr::check_slots(write.slot_mapping, num_tokens, pages * page_size);
          kvr::write_cache(write);
        },
        nb::arg("key"), nb::arg("key_shape"), nb::arg("key_strides"), nb::arg("key_dtype"),
        nb::arg("value"), nb::arg("value_shape"), nb::arg("value_strides"), nb::arg("value_dtype"),
        nb::arg("slot_mapping"), nb::arg("num_tokens"), nb::kw_only(), nb::arg("cache"),
        nb::arg("pages"), nb::arg("kv_heads"), nb::arg("page_size"), nb::arg("head_size"),
        nb::arg("element_size"), nb::arg("layout"), nb::arg("torch_dtype"));

  m.def("attend",
        [](uintptr_t query_data, nb::tuple shape, nb::tuple strides, nb::handle query_dtype,
           uintptr_t out, nb::tuple out_shape, nb::tuple out_strides, nb::handle out_dtype,
           bool out_floats, uintptr_t lse, uintptr_t weights, int64_t weight_stride, uintptr_t entries, int64_t width,
           int64_t stride, bool per_head, uintptr_t lengths, int rows, uintptr_t starts, int run, uintptr_t cache, int64_t cache_tokens, int layout, int kv_heads,
           int group, int head_size, int page_size, int dtype, nb::handle torch_dtype, float scale,
           float softcap, uintptr_t sinks, uintptr_t rest_values, uintptr_t rest_lse) {
          const Vectors query{query_data, shape, strides, query_dtype};
          const Vectors output{out, out_shape, out_strides, out_dtype};
          const int queries = starts == 0 ? rows : at<int32_t>(starts)[rows];
          query.check("query", queries, kv_heads * group, head_size, torch_dtype);
          output.check("output", queries, kv_heads * group, head_size,
                       out_floats ? out_dtype : torch_dtype);
          const kvr::Attention attention{static_cast<kvr::DType>(dtype),
                                         static_cast<kvr::KeyLayout>(layout),
                                         rows,
                                         kv_heads,
                                         group,
                                         head_size,
                                         page_size,
                                         at<void>(cache),
                                         cache_tokens,
                                         at<int32_t>(starts),
                                         at<void>(query_data),
                                         query.stride(),
                                         at<void>(out),
                                         output.stride(),
                                         out_floats,
                                         at<float>(lse),
                                         at<float>(weights),
                                         weight_stride,
                                         at<int32_t>(entries),
                                         width,
                                         stride,
                                         per_head,
                                         at<int32_t>(lengths),
                                         run,
                                         scale,
                                         softcap,
                                         at<float>(sinks),
                                         at<float>(rest_values),
                                         at<float>(rest_lse)};
          const nb::gil_scoped_release release;
          kvr::check_lists(attention);
          active->attend(attention);
        },
        nb::arg("query"), nb::arg("shape"), nb::arg("strides"), nb::arg("query_dtype"),
        nb::arg("output"), nb::arg("output_shape"), nb::arg("output_strides"),
        nb::arg("output_dtype"), nb::kw_only(), nb::arg("output_floats"), nb::arg("lse"), nb::arg("weights"),
        nb::arg("weight_stride"), nb::arg("entries"), nb::arg("entries_width"),
        nb::arg("entries_stride"), nb::arg("per_head"), nb::arg("lengths"), nb::arg("rows"),
        nb::arg("starts"), nb::arg("run"), nb::arg("cache"), nb::arg("cache_tokens"), nb::arg("layout"),
        nb::arg("kv_heads"), nb::arg("group"), nb::arg("head_size"), nb::arg("page_size"),
        nb::arg("dtype"), nb::arg("torch_dtype"), nb::arg("scale"), nb::arg("softcap"),
        nb::arg("sinks"), nb::arg("rest_values"), nb::arg("rest_lse"));

  m.def("attend_prompt",
        [](uintptr_t queries, nb::tuple shape, nb::tuple strides, nb::handle query_dtype,
           uintptr_t out, nb::tuple out_shape, nb::tuple out_strides, nb::handle out_dtype,
           uintptr_t lse, int64_t tokens, uintptr_t starts, uintptr_t seen, int sequences,
           uintptr_t entries, int64_t width, int64_t stride, bool per_head, uintptr_t cache,
           int64_t units, int layout, int kv_heads, int group, int head_size, int page_size, int dtype,
           nb::handle torch_dtype, int window, float scale, float softcap, uintptr_t sinks) {
          const Vectors query{queries, shape, strides, query_dtype};
          const Vectors output{out, out_shape, out_strides, out_dtype};
          query.check("query", tokens, kv_heads * group, head_size, torch_dtype);
          output.check("output", tokens, kv_heads * group, head_size, torch_dtype);
          const kvr::PromptAttention attention{static_cast<kvr::DType>(dtype),
                                               static_cast<kvr::KeyLayout>(layout),
                                               sequences,
                                               kv_heads,
                                               group,
                                               head_size,
                                               page_size,
                                               at<void>(cache),
                                               units,
                                               at<void>(queries),
                                               query.stride(),
                                               at<void>(out),
                                               output.stride(),
                                               tokens,
                                               at<float>(lse),
                                               at<int32_t>(starts),
                                               at<int32_t>(seen),
                                               at<int32_t>(entries),
                                               width,
                                               stride,
                                               per_head,
                                               window,
                                               scale,
                                               softcap,
                                               at<float>(sinks)};
          const nb::gil_scoped_release release;
          kvr::check_prompt(attention);
          active->attend_prompt(attention);
        },
        nb::arg("query"), nb::arg("shape"), nb::arg("strides"), nb::arg("query_dtype"),
        nb::arg("output"), nb::arg("output_shape"), nb::arg("output_strides"),
        nb::arg("output_dtype"), nb::kw_only(), nb::arg("lse"), nb::arg("tokens"),
        nb::arg("starts"), nb::arg("seen"), nb::arg("sequences"), nb::arg("entries"),
        nb::arg("entries_width"), nb::arg("entries_stride"), nb::arg("per_head"), nb::arg("cache"),
        nb::arg("units"), nb::arg("layout"), nb::arg("kv_heads"), nb::arg("group"),
        nb::arg("head_size"), nb::arg("page_size"), nb::arg("dtype"), nb::arg("torch_dtype"),
        nb::arg("window"), nb::arg("scale"), nb::arg("softcap"), nb::arg("sinks"));
}

}  // namespace bindings
}  // namespace kvr
