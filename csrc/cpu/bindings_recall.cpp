// Python's view of slow homes: their codecs, and the memory that pages or tokens are recalled to.
#include <utility>

#include "bindings.h"
#include "checks.h"
#include "mapping_guard.h"
#include "recall_cache.h"
#include "token_recall.h"

namespace kvr {
namespace bindings {

void bind_recall(nb::module_& m) {
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

  // What waits for reads, or is long, lets other threads run Python meanwhile; lists are converted before.
  nb::class_<kvr::UnitLists>(m, "UnitLists")
      .def("__init__",
           [](kvr::UnitLists* self, uintptr_t lists, int64_t size, int64_t width, int64_t stride,
              uintptr_t lengths) {
             new (self) kvr::UnitLists{at<int32_t>(lists), stride, at<int32_t>(lengths), size, width};
           },
           nb::kw_only(), nb::arg("lists"), nb::arg("size"), nb::arg("width"), nb::arg("stride"),
           nb::arg("lengths"));
  using Cache = kvr::RecallCache;
  const auto release_gil = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Cache>(m, "RecallCache")
      .def("__init__",
           [](Cache* self, int units, int slots, int kv_heads, int page_size, int requests,
              int64_t unit_bytes, uintptr_t slot_memory, uintptr_t home, int fd, int64_t offset,
              uintptr_t counts, kvr::EncodedHome* encoded, nb::handle) {
             new (self) Cache({units, slots, kv_heads, page_size, requests, unit_bytes,
                               at<char>(slot_memory), at<const char>(home), fd, offset,
                               at<int64_t>(counts), encoded});
           },
           nb::kw_only(), nb::arg("units"), nb::arg("slots"), nb::arg("kv_heads"),
           nb::arg("page_size"), nb::arg("requests"), nb::arg("unit_bytes"), nb::arg("slot_memory"),
           nb::arg("home"), nb::arg("fd"), nb::arg("offset"), nb::arg("counts"),
           nb::arg("encoded").none(), nb::arg("memory"), nb::keep_alive<1, 13>(),
           nb::keep_alive<1, 14>())
      .def("write",
           [](Cache& self, uintptr_t slot_mapping, int64_t tokens) {
             self.write(at<int64_t>(slot_mapping), tokens);
           },
           release_gil)
      .def("resolve", &Cache::resolve, release_gil)
      .def("stream", &Cache::stream, release_gil)
      .def("wait", &Cache::wait, release_gil)
      .def("prefetch",
           [](Cache& self, const kvr::DecodeRows& rows, const Chooser& chooser) {
             self.prefetch(rows, chooser);
           },
           release_gil)
      .def("drop_pages",
           [](Cache& self, const std::vector<int64_t>& pages) {
             const nb::gil_scoped_release release;
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
             const nb::gil_scoped_release release;
             self.adopt(pages.data(), static_cast<int64_t>(pages.size()));
           })
      .def("abandon",
           [](Cache& self, const std::vector<int64_t>& pages) {
             const nb::gil_scoped_release release;
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
      .def("check", &Cache::check, release_gil)
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
              const std::vector<uintptr_t>& memory, const std::vector<uintptr_t>& homes,
              nb::handle) {
             std::vector<kvr::TokenRecallConfig::Layer> layers;
             for (size_t i = 0; i < memory.size(); ++i)
               layers.push_back({at<char>(memory[i]), at<const char>(homes.at(i))});
             new (self) Tokens({requests, kv_heads, page_size, capacity, lists, pages, token_bytes,
                                at<int64_t>(counts), std::move(layers)});
           },
           nb::kw_only(), nb::arg("requests"), nb::arg("kv_heads"), nb::arg("page_size"),
           nb::arg("capacity"), nb::arg("lists"), nb::arg("pages"), nb::arg("token_bytes"),
           nb::arg("counts"), nb::arg("memory"), nb::arg("homes"), nb::arg("tensors"),
           nb::keep_alive<1, 12>())
      .def("recall", &Tokens::recall, release_gil)
      .def("wait", &Tokens::wait, release_gil)
      .def("release", &Tokens::release, release_gil)
      .def("check", &Tokens::check, release_gil)
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

}  // namespace bindings
}  // namespace kvr
