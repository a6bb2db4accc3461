// Python's view of the kernels. Tensors arrive as addresses: the extension does not depend on any
// PyTorch version, and a call costs about a microsecond. vllm_kvretrieval/kernels/cpu is the only
// caller; it guarantees lifetimes and, where it binds rows and layers, shapes and dtypes. What
// differs from call to call is checked here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "checks.h"
#include "dropping.h"
#include "kernels.h"
#include "mapping_guard.h"
#include "recall_cache.h"
#include "token_recall.h"

namespace nb = nanobind;

namespace {

const kvr::KernelTable* active = &kvr::kernels();

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void use_isa(const std::string& isa) {
  const kvr::KernelTable* table = kvr::kernels_for(isa.c_str());
  if (table == nullptr)
    throw std::invalid_argument("instruction set '" + isa + "' is not available on this machine");
  active = table;
}

// The numbers of an enum, by the names that Python has for them.
template <class E>
nb::dict numbers(std::initializer_list<std::pair<const char*, E>> named) {
  nb::dict found;
  for (const auto& [name, value] : named) found[name] = static_cast<int>(value);
  return found;
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

void check_plan(const Vectors& query, const kvr::DecodeRows& rows, const Chooser& chooser) {
  const kvr::Index& index = chooser.index;
  query.check("query", rows.rows, index.kv_heads * chooser.group, index.head_size,
              chooser.torch_dtype);
  kvr::check_rows(rows, chooser.seats, index.kv_heads, index.page_size);
  kvr::check_selection(rows, chooser);
  kvr::check_scoring(rows, index);
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.doc() = "Fused CPU kernels of vllm-kvretrieval.";
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {  // what the system refuses, an OSError as elsewhere
      const nb::tuple number_and_text = nb::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, number_and_text.ptr());
    }
  });
  m.attr("MOST_SCORES") = kvr::kMostScores;
  using kvr::Codec, kvr::IndexKind, kvr::KeyLayout, kvr::Mode;
  m.attr("MODES") = numbers<Mode>(
      {{"select", Mode::kSelect}, {"given", Mode::kGiven}, {"whole", Mode::kWhole}});
  m.attr("INDEX_KINDS") = numbers<IndexKind>({{"min_max", IndexKind::kMinMax},
                                              {"mean", IndexKind::kMean},
                                              {"mean_std", IndexKind::kMeanStd},
                                              {"bounding", IndexKind::kBounding},
                                              {"representative", IndexKind::kRepresentative},
                                              {"one_bit", IndexKind::kOneBit},
                                              {"low_rank", IndexKind::kLowRank},
                                              {"exact", IndexKind::kExact}});
  m.attr("OUTSIDE") = static_cast<int>(IndexKind::kOutside);
  m.attr("NO_INDEX") = static_cast<int>(IndexKind::kNone);
  m.attr("LAYOUTS") = numbers<KeyLayout>({{"vec", KeyLayout::kTransposed},
                                          {"vec16", KeyLayout::kTransposed},
                                          {"amx", KeyLayout::kAmx},
                                          {"rows", KeyLayout::kRows}});
  m.attr("CODECS") = numbers<Codec>({{"raw", Codec::kRaw},
                                     {"k8v4", Codec::kK8V4},
                                     {"k4v4", Codec::kK4V4},
                                     {"k2v2", Codec::kK2V2}});
  m.def("isa", [] { return active->isa; }, "Name of the instruction set in use.");
  m.def("isas", &kvr::compiled_isas, "Names of all that are compiled in, fastest first.");
  m.def("use_isa", &use_isa, nb::arg("isa"),
        "Choose another instruction set (kernels.h names them), for tests and benchmarks.");

  nb::class_<kvr::DecodeRows>(m, "DecodeRows")
      .def("__init__",
           [](kvr::DecodeRows* self, int rows, uintptr_t block_table, int64_t block_table_width,
              int64_t block_table_stride, uintptr_t seq_lens, uintptr_t seats,
              uintptr_t sink, uintptr_t window, uintptr_t mode, uintptr_t select, uintptr_t threshold,
              uintptr_t fresh, uintptr_t mass, uintptr_t corrected, int64_t corrected_seats,
              uintptr_t spared, int64_t spared_seats, uintptr_t lists, int64_t lists_rows,
              int64_t lists_width, int64_t lists_stride, uintptr_t lengths, int64_t lengths_size,
              bool per_token) {
             new (self) kvr::DecodeRows{
                 rows, at<int32_t>(block_table), block_table_width, block_table_stride,
                 at<int32_t>(seq_lens), at<int32_t>(seats), at<int32_t>(sink), at<int32_t>(window),
                 at<kvr::Mode>(mode), at<int32_t>(select), at<float>(threshold), at<uint8_t>(fresh),
                 at<float>(mass), at<int64_t>(corrected), corrected_seats, at<int64_t>(spared),
                 spared_seats, at<int32_t>(lists), lists_rows, lists_width, lists_stride, at<int32_t>(lengths), lengths_size, per_token};
           },
           nb::kw_only(),
           nb::arg("rows"), nb::arg("block_table"), nb::arg("block_table_width"),
           nb::arg("block_table_stride"), nb::arg("seq_lens"), nb::arg("seats"), nb::arg("sink"),
           nb::arg("window"), nb::arg("mode"), nb::arg("select"), nb::arg("threshold"),
           nb::arg("fresh"), nb::arg("mass"), nb::arg("corrected"), nb::arg("corrected_seats"),
           nb::arg("spared"), nb::arg("spared_seats"), nb::arg("lists"), nb::arg("lists_rows"),
           nb::arg("lists_width"), nb::arg("lists_stride"), nb::arg("lengths"),
           nb::arg("lengths_size"), nb::arg("per_token"));

  nb::class_<Index>(m, "Index")
      .def("__init__",
           [](Index* self, int kind, int dtype, nb::object torch_dtype, int kv_heads, int head_size,
              int page_size, int entry_tokens, int rank, float spread, uintptr_t records,
              int64_t entries, int64_t record_bytes, uintptr_t cache, int layout, bool means) {
             new (self) Index{{static_cast<kvr::IndexKind>(kind), static_cast<kvr::DType>(dtype),
                               kv_heads, head_size, page_size, entry_tokens, rank, spread,
                               at<uint8_t>(records), entries, record_bytes, at<void>(cache),
                               static_cast<kvr::KeyLayout>(layout), means},
                              std::move(torch_dtype)};
           },
           nb::kw_only(),
           nb::arg("kind"), nb::arg("dtype"), nb::arg("torch_dtype"), nb::arg("kv_heads"),
           nb::arg("head_size"), nb::arg("page_size"), nb::arg("entry_tokens"), nb::arg("rank"),
           nb::arg("spread"), nb::arg("records"), nb::arg("entries"), nb::arg("record_bytes"),
           nb::arg("cache"), nb::arg("layout"), nb::arg("means"));

  nb::class_<Chooser>(m, "Chooser")
      .def("__init__",
           [](Chooser* self, const Index& index, int pooling, int group, float scale, int rerank,
              uintptr_t prev_query, uintptr_t selected, int seats, int max_selected,
              uintptr_t counts, int64_t count_stride, float remainder) {
             new (self) Chooser{{index, static_cast<kvr::Pooling>(pooling), group, scale, rerank,
                                 at<void>(prev_query), at<int32_t>(selected), seats, max_selected,
                                 at<int32_t>(counts), count_stride, remainder},
                                index.torch_dtype};
           },
           nb::kw_only(),
           nb::arg("index"), nb::arg("pooling"), nb::arg("group"), nb::arg("scale"),
           nb::arg("rerank"), nb::arg("prev_query"), nb::arg("selected"), nb::arg("seats"),
           nb::arg("max_selected"), nb::arg("counts"), nb::arg("count_stride"),
           nb::arg("remainder"));

  nb::class_<ContextSelector>(m, "ContextSelector")
      .def("__init__",
           [](ContextSelector* self, const Index& index, int group, float scale, uintptr_t selected,
              int seats, int max_selected) {
             new (self) ContextSelector{
                 {index, group, scale, at<int32_t>(selected), seats, max_selected}, index.torch_dtype};
           },
           nb::kw_only(),
           nb::arg("index"), nb::arg("group"), nb::arg("scale"), nb::arg("selected"),
           nb::arg("seats"), nb::arg("max_selected"));

  m.def("update_index",
        [](uintptr_t keys, nb::tuple shape, nb::tuple strides, nb::handle torch_dtype,
           uintptr_t slot_mapping, int64_t num_tokens, const Index& index) {
          const Vectors key{keys, shape, strides, torch_dtype};
          key.check("key", num_tokens, index.kv_heads, index.head_size, index.torch_dtype);
          const kvr::IndexUpdate update{index, at<void>(keys), key.stride(),
                                        at<int64_t>(slot_mapping), num_tokens};
          const nb::gil_scoped_release release;
          active->update_index(update);
        });

  m.def(
      "index_pages",
      [](uintptr_t pages, uintptr_t lengths, int64_t num_pages, const Index& index) {
        const kvr::PageIndexing indexing{index, at<int32_t>(pages), at<int32_t>(lengths), num_pages};
        kvr::check_pages(indexing);
        active->index_pages(indexing);
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "read_keys",
      [](uintptr_t entries, int64_t num_entries, const Index& index, uintptr_t keys) {
        const kvr::KeyReading reading{index, at<int64_t>(entries), num_entries, at<float>(keys)};
        kvr::check_entries(reading);
        active->read_keys(reading);
      },
      nb::call_guard<nb::gil_scoped_release>());

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
      "stage_pages",
      [](uintptr_t source, uintptr_t pages, int64_t num_pages, uintptr_t target,
         int32_t pages_per_block, int32_t kv_heads, int32_t page_size, int32_t head_size,
         int32_t element_size, int from,
         int to) {
        kvr::stage_pages({at<void>(source), at<int32_t>(pages), num_pages, at<void>(target),
                          pages_per_block, kv_heads, page_size, head_size, element_size,
                          static_cast<kvr::KeyLayout>(from), static_cast<kvr::KeyLayout>(to)});
      },
      nb::kw_only(), nb::arg("source"), nb::arg("pages"), nb::arg("num_pages"), nb::arg("target"),
      nb::arg("pages_per_block"), nb::arg("kv_heads"), nb::arg("page_size"), nb::arg("head_size"),
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

  m.def("write_rows",
        [](uintptr_t keys, nb::tuple key_shape, nb::tuple key_strides, nb::handle key_dtype,
           uintptr_t values, nb::tuple value_shape, nb::tuple value_strides, nb::handle value_dtype,
           uintptr_t slot_mapping, int64_t num_tokens, uintptr_t cache, int64_t pages, int kv_heads,
           int page_size, int head_size, int element_size, nb::handle torch_dtype) {
          const Vectors key{keys, key_shape, key_strides, key_dtype};
          const Vectors value{values, value_shape, value_strides, value_dtype};
          key.check("key", num_tokens, kv_heads, head_size, torch_dtype);
          value.check("value", num_tokens, kv_heads, head_size, torch_dtype);
          const kvr::RowWrite write{at<void>(keys),
                                    at<void>(values),
                                    key.stride(),
                                    value.stride(),
                                    at<int64_t>(slot_mapping),
                                    num_tokens,
                                    at<void>(cache),
                                    kv_heads,
                                    page_size,
                                    head_size,
                                    element_size};
          const nb::gil_scoped_release release;
          kvr::check_slots(write.slot_mapping, num_tokens, pages * page_size);
          kvr::write_rows(write);
        },
        nb::arg("key"), nb::arg("key_shape"), nb::arg("key_strides"), nb::arg("key_dtype"),
        nb::arg("value"), nb::arg("value_shape"), nb::arg("value_strides"), nb::arg("value_dtype"),
        nb::arg("slot_mapping"), nb::arg("num_tokens"), nb::kw_only(), nb::arg("cache"),
        nb::arg("pages"), nb::arg("kv_heads"), nb::arg("page_size"), nb::arg("head_size"),
        nb::arg("element_size"), nb::arg("torch_dtype"));

  m.def("attend",
        [](uintptr_t queries, nb::tuple shape, nb::tuple strides, nb::handle query_dtype,
           uintptr_t out, nb::tuple out_shape, nb::tuple out_strides, nb::handle out_dtype,
           uintptr_t lse, uintptr_t weights, int64_t weight_stride, uintptr_t entries, int64_t width,
           int64_t stride, bool per_head, uintptr_t lengths, int rows, int run, uintptr_t cache, int64_t cache_tokens, int layout, int kv_heads,
           int group, int head_size, int page_size, int dtype, nb::handle torch_dtype, float scale,
           float softcap, uintptr_t sinks, uintptr_t rest_values, uintptr_t rest_lse) {
          const Vectors query{queries, shape, strides, query_dtype};
          const Vectors output{out, out_shape, out_strides, out_dtype};
          query.check("query", rows, kv_heads * group, head_size, torch_dtype);
          output.check("output", rows, kv_heads * group, head_size, torch_dtype);
          const kvr::Attention attention{static_cast<kvr::DType>(dtype),
                                         static_cast<kvr::KeyLayout>(layout),
                                         rows,
                                         kv_heads,
                                         group,
                                         head_size,
                                         page_size,
                                         at<void>(cache),
                                         cache_tokens,
                                         at<void>(queries),
                                         query.stride(),
                                         at<void>(out),
                                         output.stride(),
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
        nb::arg("output_dtype"), nb::kw_only(), nb::arg("lse"), nb::arg("weights"),
        nb::arg("weight_stride"), nb::arg("entries"), nb::arg("entries_width"),
        nb::arg("entries_stride"), nb::arg("per_head"), nb::arg("lengths"), nb::arg("rows"),
        nb::arg("run"), nb::arg("cache"), nb::arg("cache_tokens"), nb::arg("layout"),
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

  m.def("check_plan",
        [](uintptr_t queries, nb::tuple shape, nb::tuple strides, nb::handle torch_dtype,
           const kvr::DecodeRows& rows, const Chooser& chooser) {
          check_plan({queries, shape, strides, torch_dtype}, rows, chooser);
        },
        "Raises what plan_decode would.");

  m.def("plan_decode",
        [](uintptr_t queries, nb::tuple shape, nb::tuple strides, nb::handle torch_dtype,
           const kvr::DecodeRows& rows, const Chooser& chooser, uintptr_t scores,
           int64_t score_stride, uintptr_t rest_values, uintptr_t rest_lse) {
          const Vectors query{queries, shape, strides, torch_dtype};
          check_plan(query, rows, chooser);
          const kvr::DecodePlan plan{rows,         chooser,          at<void>(queries),
                                     query.stride(), at<float>(scores), score_stride,
                                     at<float>(rest_values), at<float>(rest_lse)};
          const nb::gil_scoped_release release;
          active->plan_decode(plan);
        },
        nb::arg("query"), nb::arg("shape"), nb::arg("strides"), nb::arg("torch_dtype"),
        nb::arg("rows"), nb::arg("chooser"), nb::arg("scores"), nb::arg("score_stride"),
        nb::arg("rest_values"), nb::arg("rest_lse"));

  m.def("select_context",
        [](uintptr_t queries, nb::tuple shape, nb::tuple strides, nb::handle torch_dtype,
           uintptr_t weights, int queries_per_row, const kvr::DecodeRows& rows,
           const ContextSelector& selector, uintptr_t ratings, int64_t rating_stride, bool rated) {
          const Vectors query{queries, shape, strides, torch_dtype};
          const kvr::Index& index = selector.index;
          query.check("query", int64_t(rows.rows) * queries_per_row, index.kv_heads * selector.group,
                      index.head_size, selector.torch_dtype);
          const kvr::ContextSelection selection{rows,           selector,        at<void>(queries),
                                                query.stride(), queries_per_row, at<float>(weights),
                                                at<float>(ratings), rating_stride, rated};
          kvr::check_context(rows, selector, index.kv_heads);
          kvr::check_queries(selection);
          const nb::gil_scoped_release release;
          active->select_context(selection);
        });

  m.def(
      "list_context",
      [](const kvr::DecodeRows& rows, const ContextSelector& selector, int kv_heads) {
        kvr::check_context(rows, selector, kv_heads);
        kvr::list_context({rows, selector, kv_heads});
      },
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "drop_tokens",
      [](const kvr::DecodeRows& rows, int kv_heads, uintptr_t weights, int sets, int heads_per_set,
         int64_t weight_stride, uintptr_t chosen, uintptr_t ratings, int seats, int most,
         uintptr_t counts, int64_t count_stride, uintptr_t budgets, int64_t budget_stride, int sink,
         int recent, double recent_share, int page, int rating, float stamped) {
        const kvr::TokenDropping dropping{rows.rows, kv_heads, rows.seq_lens, rows.seats, sets,
                                          heads_per_set, at<float>(weights), weight_stride,
                                          at<int32_t>(chosen), at<float>(ratings), seats, most,
                                          at<int32_t>(counts), count_stride, at<int32_t>(budgets),
                                          budget_stride, sink, recent, recent_share, page,
                                          static_cast<kvr::Rating>(rating), stamped};
        kvr::check_dropping(dropping);
        kvr::drop_tokens(dropping);
      },
      nb::kw_only(),
      nb::arg("rows"), nb::arg("kv_heads"), nb::arg("weights"), nb::arg("sets"),
      nb::arg("heads_per_set"), nb::arg("weight_stride"), nb::arg("chosen"),
      nb::arg("ratings"), nb::arg("seats"), nb::arg("most"), nb::arg("counts"),
      nb::arg("count_stride"), nb::arg("budgets"), nb::arg("budget_stride"), nb::arg("sink"),
      nb::arg("recent"), nb::arg("recent_share"), nb::arg("page"), nb::arg("rating"),
      nb::arg("stamped"),
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "code_units",
      [](int codec, int dtype, int page_size, int head_size, uintptr_t units, uintptr_t encoded,
         int64_t count, bool encodes) {
        const kvr::UnitCoding coding{static_cast<kvr::Codec>(codec), static_cast<kvr::DType>(dtype),
                                     page_size, head_size, at<void>(units), at<uint8_t>(encoded),
                                     count};
        kvr::check_coding(coding);
        (encodes ? active->encode_units : active->decode_units)(coding);
      },
      nb::call_guard<nb::gil_scoped_release>());

  nb::class_<kvr::EncodedHome>(m, "EncodedHome")
      .def("__init__",
           [](kvr::EncodedHome* self, int codec, int dtype, int pages, int kv_heads, int page_size,
              int head_size, uintptr_t raw, int fd, int64_t offset) {
             new (self) kvr::EncodedHome({static_cast<kvr::Codec>(codec),
                                          static_cast<kvr::DType>(dtype), pages, kv_heads, page_size,
                                          head_size, at<char>(raw), fd, offset, active});
           },
           nb::kw_only(), nb::arg("codec"), nb::arg("dtype"), nb::arg("pages"), nb::arg("kv_heads"),
           nb::arg("page_size"), nb::arg("head_size"), nb::arg("raw"), nb::arg("fd"),
           nb::arg("offset"));

  using Cache = kvr::RecallCache;
  const auto release_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Cache>(m, "RecallCache")
      .def("__init__",
           [](Cache* self, int units, int slots, int kv_heads, int page_size, int requests,
              int64_t unit_bytes, uintptr_t slot_memory, uintptr_t home, int fd, int64_t offset,
              uintptr_t counts, kvr::EncodedHome* encoded) {
             new (self) Cache({units, slots, kv_heads, page_size, requests, unit_bytes,
                               at<char>(slot_memory), at<const char>(home), fd, offset,
                               at<int64_t>(counts), encoded});
           },
           nb::kw_only(), nb::arg("units"), nb::arg("slots"), nb::arg("kv_heads"),
           nb::arg("page_size"), nb::arg("requests"), nb::arg("unit_bytes"), nb::arg("slot_memory"),
           nb::arg("home"), nb::arg("fd"), nb::arg("offset"), nb::arg("counts"),
           nb::arg("encoded").none())
      .def("write",
           [](Cache& self, uintptr_t slot_mapping, int64_t tokens) {
             self.write(at<int64_t>(slot_mapping), tokens);
           },
           release_gil)
      .def("resolve", &Cache::resolve, release_gil)
      .def("prefetch",
           [](Cache& self, const kvr::DecodeRows& rows, const Chooser& chooser) {
             self.prefetch(rows, chooser);
           },
           release_gil)
      .def("drop_pages",
           [](Cache& self, const std::vector<int64_t>& pages) {
             self.drop_pages(pages.data(), static_cast<int64_t>(pages.size()));
           })
      .def("close",
           [](Cache& self, uintptr_t pages, int64_t count) { self.close(at<int64_t>(pages), count); },
           release_gil)
      .def("closed",
           [](Cache& self, const std::vector<int64_t>& pages) {
             return self.closed(pages.data(), static_cast<int64_t>(pages.size()));
           })
      .def("adopt",
           [](Cache& self, const std::vector<int64_t>& pages) {
             self.adopt(pages.data(), static_cast<int64_t>(pages.size()));
           })
      .def("abandon",
           [](Cache& self, const std::vector<int64_t>& pages) {
             self.abandon(pages.data(), static_cast<int64_t>(pages.size()));
           })
      .def("stage",
           [](Cache& self, uintptr_t pages, int64_t count, uintptr_t target, int parts) {
             self.stage(at<int64_t>(pages), count, at<char>(target), parts);
           },
           release_gil)
      .def("release", &Cache::release)
      .def("take_failed_pages", &Cache::take_failed_pages)
      .def("take_error", &Cache::take_error)
      .def("read_in_pieces", &Cache::read_in_pieces)
      .def("check", &Cache::check)
      .def("resident", &Cache::resident)
      .def_prop_ro("used", &Cache::used)
      .def_prop_ro("pinned", &Cache::pinned)
      .def_prop_ro("read_ahead_ns", &Cache::read_ahead_ns)
      .def_prop_ro("waited_ns", &Cache::waited_ns);

  using Tokens = kvr::TokenRecall;
  nb::class_<Tokens>(m, "TokenRecall")
      .def("__init__",
           [](Tokens* self, int requests, int kv_heads, int page_size, int capacity, int lists,
              int pages, int64_t token_bytes, uintptr_t counts,
              const std::vector<uintptr_t>& memory, const std::vector<uintptr_t>& homes) {
             std::vector<kvr::TokenRecallConfig::Layer> layers;
             for (size_t i = 0; i < memory.size(); ++i)
               layers.push_back({at<char>(memory[i]), at<const char>(homes.at(i))});
             new (self) Tokens({requests, kv_heads, page_size, capacity, lists, pages, token_bytes,
                                at<int64_t>(counts), std::move(layers)});
           },
           nb::kw_only(), nb::arg("requests"), nb::arg("kv_heads"), nb::arg("page_size"),
           nb::arg("capacity"), nb::arg("lists"), nb::arg("pages"), nb::arg("token_bytes"),
           nb::arg("counts"), nb::arg("memory"), nb::arg("homes"))
      .def("recall", &Tokens::recall, release_gil)
      .def("wait", &Tokens::wait, release_gil)
      .def("release", &Tokens::release)
      .def("check", &Tokens::check)
      .def_prop_ro("used", &Tokens::used)
      .def_prop_ro("read_ahead_ns", &Tokens::read_ahead_ns)
      .def_prop_ro("waited_ns", &Tokens::waited_ns);

  nb::class_<kvr::MappingGuard>(m, "MappingGuard")
      .def("__init__",
           [](kvr::MappingGuard* self, uintptr_t memory, int64_t bytes, int fd, bool scattered) {
             new (self) kvr::MappingGuard(at<char>(memory), bytes, fd, scattered);
           })
      .def("take", &kvr::MappingGuard::take);
}
