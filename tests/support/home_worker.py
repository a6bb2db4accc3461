"""A worker extension that looks into a slow home and its recall caches."""

import errno
import os
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import _custom_ops as ops

from tests.spec import ops as reference
from vllm_kvretrieval.kernels import DecodeRows, cpu
from vllm_kvretrieval.retrieval.codec import CODECS
from vllm_kvretrieval.retrieval.codec.raw import Raw

LOSSLESS = "lossless"


class Lossless(Raw):
    """The codec ``raw`` in an encoded home."""

    name = LOSSLESS
    meaning = "for tests"


CODECS[LOSSLESS] = Lossless()  # in the test's process and, as this is imported there, in workers
cpu.CODINGS[LOSSLESS] = cpu.CODINGS["raw"]


class HomeWorker:
    """Mixed into the worker by vLLM (``worker_extension_cls``)."""

    retrieval_layers: dict[str, Any]
    retrieval_config: Any
    requests: Any
    storage: Any
    vllm_config: Any
    _plans: defaultdict[str, list[list[int]]]
    _written: dict[str, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]
    _fd: int
    _loaded: list[Any]

    def record_plans(self):
        """Record from now on which units the layers' decode rows attend to."""
        self._plans = defaultdict(list)
        for name, impl in self.retrieval_layers.items():
            impl.kernels = SimpleNamespace(**vars(cpu))
            impl.kernels.plan_decode = self._recorded(name, cpu.plan_decode)
            impl.kernels.decode_layer = self._recorded(name, cpu.decode_layer)

    def _recorded(self, name, op):
        def recorded(*arguments):
            (rows,) = (given for given in arguments if isinstance(given, DecodeRows))
            rows.lists.fill_(-1)
            found = op(*arguments)
            self._plans[name].append(rows.lists.flatten().tolist())
            return found

        return recorded

    def plans(self):
        """The records, per layer and step."""
        return dict(self._plans)

    def record_loads(self):
        """Keep from now on which pages are indexed because something else has filled them."""
        self._loaded = []
        for impl in self.retrieval_layers.values():
            impl.kernels = SimpleNamespace(**vars(cpu))
            impl.kernels.index_pages = self._loading

    def _loading(self, pages, lengths, store):
        cpu.index_pages(pages, lengths, store)
        self._loaded.append((pages.clone(), lengths.clone(), store))

    def loaded_pages(self):
        """How many pages each retrieval layer has indexed so since this was asked last."""
        counts = [len(pages) for pages, _, store in self._loaded if store.index.name == "min_max"]
        self._loaded.clear()
        return sum(counts) / len(self.retrieval_layers)

    def compare_index(self):
        """Bytes of the index of loaded pages which are not their keys', and how many there are.

        Of bounds and bits, which are compared bit by bit, and of whole pages only; decoding has
        written to the others since.
        """
        differing = compared = 0
        for pages, lengths, store in self._loaded:
            if store.index.name not in ("min_max", "one_bit"):
                continue
            whole = lengths == store.page_size
            expected = replace(store, records=torch.zeros_like(store.records))
            reference.index_pages(pages[whole], lengths[whole], expected)
            entries = pages[whole].long()
            differing += int((store.records[entries] != expected.records[entries]).sum())
            compared += store.records[entries].numel()
        return differing, compared

    def record_writes(self):
        """Keep all keys and values from now on as the model produced them."""
        self._written = {}
        for name, impl in self.retrieval_layers.items():
            self._written[name] = []
            impl.do_kv_cache_update = self._writing(self._written[name], impl.do_kv_cache_update)

    def _writing(self, written, write):
        def do_kv_cache_update(layer, key, value, kv_cache, slot_mapping):
            count = len(slot_mapping)
            written.append((key[:count].clone(), value[:count].clone(), slot_mapping.clone()))
            write(layer, key, value, kv_cache, slot_mapping)

        return do_kv_cache_update

    def compare_home(self):
        """Tokens compared with the home's file; raises where they differ.

        What was recorded is laid out anew in memory, by vLLM's own kernel or in rows, and compared
        with what the file's pages hold at the tokens written.
        """
        compared = 0
        for name, impl in self.retrieval_layers.items():
            expected, mark, tokens = self._laid_out(name, impl)
            from_file, before = self._in_file(impl, expected), compared
            compared += tokens
            if (codec := self.retrieval_config.encoding) is not None:
                # Pages that are not full are not in the file.
                full = mark.flatten(1).all(1)
                expected, from_file = expected[full], from_file[full]
                within = [x.flatten(0, 1) for x in (expected, from_file)]
                wrote = reference.tokens_of(within[0], "vec")
                read = reference.tokens_of(within[1], "vec")
                for x, y, bound in zip(wrote, read, codec.error_bounds(*wrote), strict=True):
                    assert ((x - y).abs() <= bound).all(), f"{name}: home differs"
                compared = before + int(full.sum()) * mark.shape[2]
                continue
            assert torch.equal(from_file * mark, expected), f"{name}: home differs"
            assert mark.any()
        return compared

    def _laid_out(self, name, impl):
        """What was recorded of a layer, where the KV cache has it; a mark of its tokens, for there
        may be others of earlier requests; and how many there are."""
        layer = self.vllm_config.compilation_config.static_forward_context[name]
        expected, mark = torch.zeros_like(layer.kv_cache), torch.zeros_like(layer.kv_cache)
        tokens = 0
        for key, value, slots in self._written[name]:
            for cache, k, v in (
                (expected, key, value),
                (mark, torch.ones_like(key), torch.ones_like(value)),
            ):
                if impl.storage.token_major:
                    reference.write_cache(k, v, slots, cache, "token_major")
                    continue
                pages, heads, size, width = cache.shape
                keys, values = cache.view(pages, heads, 2 * size, width // 2).chunk(2, dim=2)
                ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, layer.isa)
            tokens += int((slots >= 0).sum())
        return expected, mark, tokens

    def compare_records(self):
        """Complete entries whose records are not those of the keys and values written, and how many
        there are."""
        differing = compared = 0
        for name, impl in self.retrieval_layers.items():
            cache, mark, _ = self._laid_out(name, impl)
            for store in impl.indexes:
                entries = mark.view(len(store.records), -1).all(1)
                pages = entries.repeat_interleave(store.spans).nonzero().flatten().int()
                records = torch.zeros_like(store.records)
                expected = replace(store, cache=cache, records=records, handle=None)
                cpu.index_pages(pages, torch.full_like(pages, store.page_size), expected)
                differing += int((store.records != records).any(-1)[entries].sum())
                compared += int(entries.sum()) * store.kv_heads
        return differing, compared

    def _in_file(self, impl, like):
        """The part of the file that belongs to a layer, in the shape of vLLM's cache."""
        home, codec = self.storage.home, self.retrieval_config.encoding
        data = bytearray(os.pread(home.fd, home.layer_bytes, home.begin(impl.storage.number)))
        if codec is None:
            return torch.frombuffer(data, dtype=like.dtype).view_as(like)
        units = torch.empty_like(like).view(-1, 2 * like.shape[2], like.shape[3] // 2)
        encoded = torch.frombuffer(data, dtype=torch.uint8).view(len(units), -1)
        reference.decode_units(encoded, codec, units)
        return units.view_as(like)

    @property
    def _caches(self):
        """The recall caches, if pages are recalled."""
        return getattr(self.storage, "pages", [])

    def stream(self, on: bool) -> int:
        """Attend to pages in slots while others are read, or no longer.

        Returns:
            How often layers have waited for the others since the last call.
        """
        before, self._waits = getattr(self, "_waits", 0), 0
        for impl in self.retrieval_layers.values():
            impl.storage.streams = on
            impl.storage.cache.wait = self._counted(impl.storage.cache._cache.wait)
        return before

    def _counted(self, wait):
        def waiting():
            self._waits += 1
            wait()

        return waiting

    def check_caches(self):
        """Complaints of the recall caches, and how many slots are pinned in all."""
        caches = self._caches
        return [c.check() for c in caches if c.check()], sum(c.pinned for c in caches)

    def cache_state(self):
        """Slots per layer, requests' counts, seconds."""
        return [len(c.slots) for c in self._caches], self.requests.recalls.tolist()

    def open_bytes(self):
        """Bytes of memory that the open pages of an encoded home take."""
        start, resident, inside = self.storage.home.memory.data_ptr(), 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if area := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
                inside = start <= int(area[1], 16) < start + self.storage.home.memory.nbytes
            elif inside and line.startswith("Rss:"):
                resident += 1024 * int(line.split()[1])
        return resident

    def break_reads(self):
        """Let every read of the home's file fail from now on."""
        self._fd = os.dup(self.storage.home.fd)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, self.storage.home.fd)
        os.close(nothing)

    def mend_reads(self):
        """And work again."""
        os.dup2(self._fd, self.storage.home.fd)
        os.close(self._fd)

    def fail_to_write(self):
        """Let the system say, once, that it could not write something to the disk."""
        home = self.storage.home
        ask = home.take_write_error

        def take_write_error():
            home.take_write_error = ask
            return errno.ENOSPC

        home.take_write_error = take_write_error

    def lose_home(self):
        """Let nothing of the home be there any more, neither to read nor to map."""
        os.ftruncate(self.storage.home.fd, 0)

    def renew_home(self):
        """And be there again, empty."""
        os.posix_fallocate(self.storage.home.fd, 0, self.storage.home.memory.numel())
