// The extension's module: instruction sets, indexes, and what selects pages or tokens. See bindings.h.
#include "bindings.h"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "checks.h"
#include "dropping.h"

namespace kvr {
namespace bindings {

const KernelTable* active = &kernels();

namespace {

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

// By the names of the indexes, their kinds and the names of their parameters.
nb::dict indexes() {
  nb::dict found;
  int kind = 0;
  for (const kvr::IndexNames* index = active->indexes; index->name != nullptr; ++index)
    found[index->name] = nb::make_tuple(kind++, nb::str(index->parameters).attr("split")());
  return found;
}

}  // namespace

void check_plan(const Vectors& query, const kvr::DecodeRows& rows, const Chooser& chooser) {
  const kvr::Index& index = chooser.index;
  query.check("query", rows.rows, index.kv_heads * chooser.group, index.head_size,
              chooser.torch_dtype);
  kvr::check_rows(rows, chooser.seats, index.kv_heads, index.page_size);
  kvr::check_selection(rows, chooser);
  kvr::check_scoring(rows, index);
}

}  // namespace bindings
}  // namespace kvr

namespace nb = nanobind;
using namespace kvr::bindings;

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
  using kvr::Codec, kvr::KeyLayout, kvr::Mode, kvr::Pooling, kvr::Rating;
  m.attr("MODES") = numbers<Mode>(
      {{"select", Mode::kSelect}, {"given", Mode::kGiven}, {"whole", Mode::kWhole}});
  m.attr("INDEXES") = indexes();
  m.attr("OUTSIDE") = kvr::kOutside;
  m.attr("NO_INDEX") = kvr::kNoIndex;
  m.attr("POOLINGS") = numbers<Pooling>({{"mean_softmax", Pooling::kMeanSoftmax},
                                         {"relative", Pooling::kRelative},
                                         {"max", Pooling::kMax},
                                         {"sum", Pooling::kSum},
                                         {"max_softmax", Pooling::kMaxSoftmax}});
  m.attr("RATINGS") = numbers<Rating>({{"sum", Rating::kSum},
                                       {"latest", Rating::kLatest},
                                       {"stamp", Rating::kStamp},
                                       {"position", Rating::kPosition}});
  m.attr("LAYOUTS") = numbers<KeyLayout>({{"vec", KeyLayout::kTransposed},
                                          {"vec16", KeyLayout::kTransposed},
                                          {"amx", KeyLayout::kAmx},
                                          {"token_major", KeyLayout::kRows}});
  m.attr("CODECS") = numbers<Codec>({{"raw", Codec::kRaw},
                                     {"k8v4", Codec::kK8V4},
                                     {"k4v4", Codec::kK4V4},
                                     {"k2v2", Codec::kK2V2},
                                     {"k4v4_sparse", Codec::kK4V4Sparse},
                                     {"k2v2_sparse", Codec::kK2V2Sparse}});
  m.def("isa", [] { return active->isa; }, "Name of the instruction set in use.");
  m.def("isas", &kvr::compiled_isas, "Names of all that are compiled in, fastest first.");
  m.def("use_isa", &use_isa, nb::arg("isa"),
        "Choose another instruction set (kernels.h names them), for tests and benchmarks.");

  nb::class_<kvr::DecodeRows>(m, "DecodeRows")
      .def("__init__",
           [](kvr::DecodeRows* self, int rows, uintptr_t block_table, int64_t block_table_width,
              int64_t block_table_stride, uintptr_t seq_lens, uintptr_t starts, uintptr_t seats,
              uintptr_t sink, uintptr_t window, uintptr_t mode, uintptr_t select, uintptr_t threshold,
              uintptr_t fresh, uintptr_t mass, uintptr_t corrected, int64_t corrected_seats,
              uintptr_t spared, int64_t spared_seats, uintptr_t lists, int64_t lists_rows,
              int64_t lists_width, int64_t lists_stride, uintptr_t lengths, int64_t lengths_size,
              bool per_token) {
             new (self) kvr::DecodeRows{
                 rows, at<int32_t>(block_table), block_table_width, block_table_stride,
                 at<int32_t>(seq_lens), at<int32_t>(starts), at<int32_t>(seats), at<int32_t>(sink), at<int32_t>(window),
                 at<kvr::Mode>(mode), at<int32_t>(select), at<float>(threshold), at<uint8_t>(fresh),
                 at<float>(mass), at<int64_t>(corrected), corrected_seats, at<int64_t>(spared),
                 spared_seats, at<int32_t>(lists), lists_rows, lists_width, lists_stride, at<int32_t>(lengths), lengths_size, per_token};
           },
           nb::kw_only(),
           nb::arg("rows"), nb::arg("block_table"), nb::arg("block_table_width"),
           nb::arg("block_table_stride"), nb::arg("seq_lens"), nb::arg("starts"), nb::arg("seats"),
           nb::arg("sink"), nb::arg("window"), nb::arg("mode"), nb::arg("select"), nb::arg("threshold"),
           nb::arg("fresh"), nb::arg("mass"), nb::arg("corrected"), nb::arg("corrected_seats"),
           nb::arg("spared"), nb::arg("spared_seats"), nb::arg("lists"), nb::arg("lists_rows"),
           nb::arg("lists_width"), nb::arg("lists_stride"), nb::arg("lengths"),
           nb::arg("lengths_size"), nb::arg("per_token"));

  nb::class_<Index>(m, "Index")
      .def("__init__",
           [](Index* self, int kind, int dtype, nb::object torch_dtype, int kv_heads, int head_size,
              int page_size, int entry_tokens, const std::vector<float>& parameters, bool grows,
              bool per_token, uintptr_t records, int64_t entries, int64_t record_bytes,
              uintptr_t cache, int layout, bool means) {
             if (parameters.size() > kvr::kMostParameters)
               throw std::invalid_argument("an index has too many parameters");
             new (self) Index{{kind, static_cast<kvr::DType>(dtype), kv_heads, head_size, page_size,
                               entry_tokens, {}, grows, per_token, at<uint8_t>(records), entries,
                               record_bytes, at<void>(cache), static_cast<kvr::KeyLayout>(layout),
                               means},
                              std::move(torch_dtype)};
             std::copy(parameters.begin(), parameters.end(), self->parameters);
           },
           nb::kw_only(),
           nb::arg("kind"), nb::arg("dtype"), nb::arg("torch_dtype"), nb::arg("kv_heads"),
           nb::arg("head_size"), nb::arg("page_size"), nb::arg("entry_tokens"),
           nb::arg("parameters"), nb::arg("grows"), nb::arg("per_token"), nb::arg("records"),
           nb::arg("entries"), nb::arg("record_bytes"), nb::arg("cache"), nb::arg("layout"),
           nb::arg("means"));

  nb::class_<Chooser>(m, "Chooser")
      .def("__init__",
           [](Chooser* self, const Index& index, int pooling, int group, float scale, int rerank,
              uintptr_t prev_query, uintptr_t selected, int seats, int max_selected,
              uintptr_t counts, int64_t count_stride, float remainder, double outliers) {
             new (self) Chooser{{index, static_cast<kvr::Pooling>(pooling), group, scale, rerank,
                                 at<void>(prev_query), at<int32_t>(selected), seats, max_selected,
                                 at<int32_t>(counts), count_stride, remainder, outliers},
                                index.torch_dtype};
           },
           nb::kw_only(),
           nb::arg("index"), nb::arg("pooling"), nb::arg("group"), nb::arg("scale"),
           nb::arg("rerank"), nb::arg("prev_query"), nb::arg("selected"), nb::arg("seats"),
           nb::arg("max_selected"), nb::arg("counts"), nb::arg("count_stride"),
           nb::arg("remainder"), nb::arg("outliers"));

  nb::class_<ContextSelector>(m, "ContextSelector")
      .def("__init__",
           [](ContextSelector* self, const Index& index, int group, float scale, float softcap,
              uintptr_t sinks, uintptr_t selected, int seats, int max_selected) {
             new (self) ContextSelector{{index, group, scale, softcap, at<float>(sinks),
                                         at<int32_t>(selected), seats, max_selected},
                                        index.torch_dtype};
           },
           nb::kw_only(),
           nb::arg("index"), nb::arg("group"), nb::arg("scale"), nb::arg("softcap"),
           nb::arg("sinks"), nb::arg("selected"), nb::arg("seats"), nb::arg("max_selected"));

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
        });

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

  bind_attention(m);
  bind_decoding(m);
  bind_recall(m);
}
