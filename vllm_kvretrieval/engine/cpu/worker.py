"""The CPU worker with retrieval."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import ReduceOp
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvretrieval.attention.cpu.blocks import block_choosers
from vllm_kvretrieval.attention.cpu.chunks import ChunkPlanner
from vllm_kvretrieval.attention.cpu.impl import RetrievalAttentionImpl
from vllm_kvretrieval.attention.cpu.keeping import Keeper
from vllm_kvretrieval.attention.cpu.metadata import RetrievalMetadataBuilder
from vllm_kvretrieval.attention.cpu.observation import LatestQueries
from vllm_kvretrieval.attention.cpu.staging import BLOCK_SIZE, ISAS, ISAS_OF_ROWS, PrefillStaging
from vllm_kvretrieval.attention.cpu.support import ATTENDED
from vllm_kvretrieval.attention.support import has_foreign_connector
from vllm_kvretrieval.engine.connector import RetrievalConnector
from vllm_kvretrieval.engine.cpu.allocation import allocate_kv_cache
from vllm_kvretrieval.engine.cpu.linear import widen_linear_layers
from vllm_kvretrieval.engine.cpu.memory import PlanningWorker
from vllm_kvretrieval.engine.cpu.report import log_start
from vllm_kvretrieval.engine.loads import FIELD, LoadedPages
from vllm_kvretrieval.engine.prompts import AddUp, Heads
from vllm_kvretrieval.engine.requests import RequestTable
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import (
    Chooser,
    ContextSelector,
    IndexStore,
    Merge,
    Selection,
    cpu,
)
from vllm_kvretrieval.limits import SCARCE, explained
from vllm_kvretrieval.retrieval.codec import Codec
from vllm_kvretrieval.retrieval.index.check import check_outside
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.roles import OBSERVATIONS, Filters, Follows
from vllm_kvretrieval.storage import LayerPlace, LayerStorage, Memory, Storage
from vllm_kvretrieval.storage.places import FileFacts, file_storage
from vllm_kvretrieval.tiers.encoded import EncodedHome
from vllm_kvretrieval.tiers.home import DiskHome
from vllm_kvretrieval.tiers.huge_pages import use_huge_pages
from vllm_kvretrieval.tiers.place import directory_for

logger = init_logger("vllm.kvretrieval.worker")


class RetrievalCPUWorker(PlanningWorker):
    """vLLM's CPU worker; owns what retrieval keeps beside the KV cache.

    After vLLM has allocated the KV cache, every retrieval layer gets its page indexes and
    per-request state, and every metadata builder the table of running requests. With a slow
    home, the KV cache of these layers lies there, and each has a recall cache in fast memory.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.requests: RequestTable | None = None
        self.retrieval_layers: dict[str, RetrievalAttentionImpl] = {}
        self.home: DiskHome | EncodedHome | None = None
        self.in_home: list[str] = []  # names of the layers in home, in its order
        self.storage: Storage = Memory()
        self.block_selections: dict[Any, Selection] = {}  # of prompts, by the layers' shape

    def load_model(self, **options: Any) -> None:
        """See ``CPUWorker.load_model``; with ``attention=vllm`` all is computed as vLLM does."""
        super().load_model(**options)
        if self.attention.own and (count := widen_linear_layers(self.model_runner.get_model())):
            logger.info("%d linear layers multiply prompts in float32.", count)

    def _allocate_kv_cache(
        self, kv_cache_config: Any, kernel_block_sizes: list[int], **_: Any
    ) -> dict[str, torch.Tensor]:
        """What the model runner calls in place of its own method where there is a slow home."""
        assert self.tiers is not None
        layers = kv_cache_config.kv_cache_tensors[0].layers
        self.in_home = layers if self.tiers.streams_dense else self.retrieving(layers)
        kv_caches, self.home = allocate_kv_cache(
            self.model_runner,
            kv_cache_config,
            kernel_block_sizes,
            self.in_home,
            directory_for(self.retrieval_config.home_path),
            None if self.encoding is None else self.tiers.home // len(self.in_home),
        )
        return kv_caches

    @property
    def encoding(self) -> Codec | None:
        """What home holds pages by, where there is one that is encoded."""
        return None if self.tiers is None else self.retrieval_config.encoding

    def _zero_blocks(self, block_ids: list[int]) -> None:
        """What the model runner calls in place of its own method, which takes pages for blocks."""
        layers = self.vllm_config.compilation_config.static_forward_context
        for group in self.model_runner.kv_cache_config.kv_cache_groups:
            if isinstance(group.kv_cache_spec, FullAttentionSpec):
                for name in group.layer_names:
                    pages = layers[name].kv_cache
                    pages.unflatten(0, (self.cache_config.num_gpu_blocks, -1))[block_ids] = 0

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        what = "kv_retrieval: the system refuses what the KV cache and what is beside it need"
        with explained(what, SCARCE):
            self._initialize(kv_cache_config)

    def _initialize(self, kv_cache_config: Any) -> None:
        if self.tiers is not None:
            self.tiers = self.tiers.of(kv_cache_config.num_blocks)
            self.model_runner.initialize_kv_cache_tensors = self._allocate_kv_cache
        self.model_runner._zero_block_ids = self._zero_blocks
        super().initialize_from_config(kv_cache_config)
        self._use_huge_pages()
        config = self.retrieval_config
        layers = self.vllm_config.compilation_config.static_forward_context
        stagings: dict[Any, PrefillStaging | None] = {}
        groups = []
        for group in itertools.chain.from_iterable(self.model_runner.attn_groups):
            builder = group.get_metadata_builder()
            # What is built around our backend (chunked attention, added sinks) is left as it is.
            plain = type(group.kv_cache_spec) is FullAttentionSpec
            if type(builder) is not RetrievalMetadataBuilder or not plain:
                continue
            shape = (builder.num_kv_heads, builder.head_dim, builder.dtype)
            if shape not in stagings:
                stagings[shape] = self._staging(builder)
            groups.append((builder, stagings[shape], self.retrieving(group.layer_names)))
            for name in group.layer_names:
                layers[name].impl.kernels = cpu
        sinks = self._check_logits(groups, layers)
        foreign = has_foreign_connector(self.vllm_config)
        self._check_reading({builder.isa for builder, *_ in groups}, foreign)
        heads = sum(layers[name].impl.num_kv_heads for *_, names in groups for name in names)
        full = sum(type(s) is FullAttentionSpec for s in self.get_kv_cache_spec().values())
        dense_share = 1 - sum(len(names) for *_, names in groups) / full if full else 0.0
        if config.memory_fraction is not None:
            config.budget_of_share(0, dense_share, config.method)  # refuses what cannot be
        retrieving = {name for *_, names in groups for name in names}
        keeping = any(method.keeping is not None for method in config.methods.values())
        uneven = self.room.allotments or self.whole_contexts
        if (uneven or keeping) and retrieving != {*self.retrieval_heads}:
            shares = self.room.allotments and not keeping
            what = "kv_retrieval.budget_shares:" if shares else f"{config.method} cannot serve"
            raise RetrievalConfigError(
                f"{what} {self.model_config.model}, not all of whose layers with full attention "
                "take pages of their own choice; use a method of pages, without shares."
            )
        kept = Heads([*self.retrieval_heads.values()], self._over_workers(ReduceOp.SUM))
        self.requests = RequestTable(
            config,
            self.seats,
            heads,
            self.room,
            self.model_runner,
            dense_share,
            kept,
            self.whole_contexts,
        )
        if foreign:
            self.requests.loaded = LoadedPages(self.cache_config.num_gpu_blocks)
        self.storage = self._make_storage(self.requests)
        filters = self._attach_filters(layers)
        for builder, staging, names in groups:
            for name in names:
                layout = cpu.ROWS if config.rows else builder.isa
                self._attach(name, layers[name], layout, staging)
                role = self.roles.get(self.layer_numbers[name])
                if isinstance(role, Follows):
                    layers[name].impl.follow(filters[role.filter])
            builder.attach(
                self.requests,
                config.page_size,
                staging,
                self.storage if names else Memory(),
                config.rows or sinks or builder.isa in ATTENDED,
                self.attention.own,
            )
        for name in self.in_home:
            if name not in self.retrieval_layers:
                layers[name].impl.storage = self.storage.dense_layer(name)
        self._share_storage(layers)
        if has_kv_transfer_group() and isinstance(get_kv_transfer_group(), RetrievalConnector):
            get_kv_transfer_group().report(self.seats, self.storage.take_lost, self._take_stats)
        log_start(self, len(layers))

    def _use_huge_pages(self) -> None:
        """For the KV cache in memory, of which a step reads scattered pages or tokens."""
        layers = self.vllm_config.compilation_config.static_forward_context
        specs = self.get_kv_cache_spec().items()
        full = [name for name, spec in specs if isinstance(spec, FullAttentionSpec)]
        done = use_huge_pages(layers[n].kv_cache for n in full if n not in self.in_home)
        logger.info("%s GiB of the KV cache are in huge pages.", format_gib(done))

    def _check_logits(self, groups: Sequence[Any], layers: dict[str, Any]) -> bool:
        """Refuse what goes by other logits than those of the model, with soft-capping or sinks.

        Args:
            groups: Metadata builders, staging, and names of retrieval layers.
            layers: All layers by name.

        Returns:
            Whether any of the layers has sinks, which vLLM's kernel cannot give to a KV head alone.
        """
        config = self.retrieval_config
        impls = [layers[name].impl for *_, names in groups for name in names]
        capped = any(impl.logits_soft_cap for impl in impls)
        sinks = any(impl.sinks is not None for impl in impls)
        model = self.model_config.model
        rating = [m.name for m in config.methods.values() if m.keeping is not None or m.shares]
        if (capped or sinks) and rating:
            what = "soft-capping of logits" if capped else "learned attention sinks"
            raise RetrievalConfigError(
                f"{', '.join(rating)} rates tokens by attention without the {what} of {model}. Use "
                "methods that select pages, such as kvretrieval."
            )
        others = {builder.isa for builder, *_ in groups} - cpu.LAYOUTS.keys()
        if sinks and others:
            raise RetrievalConfigError(
                f"{config.method} does not support the learned attention sinks of {model}, whose "
                f"keys vLLM lays out in a way that is not known ({', '.join(others)}). Serve it "
                "without --attention-backend."
            )
        return sinks

    def _check_reading(self, isas: set[str], foreign: bool) -> None:
        """Refuse what reads keys in the cache where that cannot be done.

        Args:
            isas: Variants of vLLM's attention that lay out the keys.
            foreign: Whether a KV connector may load pages.
        """
        config, why = self.retrieval_config, ""
        if foreign and self._pages_per_block != 1:
            why = f"whose blocks of {self.cache_config.block_size} tokens are not pages of "
            why += str(config.page_size)
        others = ", ".join(isas - cpu.LAYOUTS.keys())
        if others:
            why = f"whose keys vLLM lays out in a way that is not known ({others})"
        if foreign and why:
            raise RetrievalConfigError(
                f"{config.method} cannot be combined with a KV connector for "
                f"{self.model_config.model}, {why}. Leave --kv-transfer-config and "
                "--kv-offloading-size out."
            )
        if others and (uneven := self.room.allotments | self.whole_contexts):
            raise RetrievalConfigError(
                f"{', '.join(uneven)} cannot be served with {self.model_config.model}, {why}: "
                "vLLM's own attention reads lists of one length. Use methods without budget_shares "
                "by which all KV heads attend alike."
            )
        if others and config.prefill_queries is not None:
            raise RetrievalConfigError(
                f"kv_retrieval.prefill_budget={config.prefill_budget} cannot be had with "
                f"{self.model_config.model}, {why}. Leave it out."
            )
        if others and config.rows:
            raise RetrievalConfigError(
                f"{config.method} cannot serve {self.model_config.model} token by token, {why}. "
                "Use methods that select pages."
            )
        reading = [
            m.name
            for m in config.methods.values()
            if m.reads_keys or (m.index is not None and not m.index.grows)
        ]
        if others and reading:
            raise RetrievalConfigError(
                f"{', '.join(reading)} cannot select pages of {self.model_config.model}, {why}. "
                "Use a method with index=min_max, which reads keys as they are written."
            )

    def _make_storage(self, requests: RequestTable) -> Storage:
        """Where the KV of retrieval layers is."""
        config = self.retrieval_config
        if self.home is None:
            return Memory(config.rows)
        assert self.tiers is not None
        facts = FileFacts(
            home=self.home,
            directory=directory_for(config.home_path),
            names=self.in_home,
            dense=frozenset(self.in_home).difference(self.retrieving(self.in_home)),
            slots=dict(zip(self.retrieval_heads, self.tiers.slots, strict=True)),
            seats=requests.capacity,
            counts=requests.recalls,
            blocks=self.cache_config.num_gpu_blocks,
            block_size=self.cache_config.block_size,
            page_size=config.page_size,
        )
        return file_storage(facts, config)

    @property
    def _pages_per_block(self) -> int:
        return self.cache_config.block_size // self.retrieval_config.page_size

    def _attach(self, name: str, layer: Any, layout: str, staging: PrefillStaging | None) -> None:
        """Make the layer a retrieval layer."""
        impl, kv_cache = layer.impl, layer.kv_cache
        tokens = kv_cache.numel() // kv_cache.shape[-1]
        if layout == cpu.ROWS and tokens > torch.iinfo(torch.int32).max:
            raise RetrievalConfigError(
                f"{self.retrieval_config.method} selects single tokens, of which a layer's KV "
                f"cache has {tokens} (times KV heads), more than 31 bits number. Lower "
                "--kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE)."
            )
        choosers = self._choosers(name, impl, kv_cache, layout)
        storage = self.storage.layer(LayerPlace(name, kv_cache, layout, cpu))
        impl.attach(cpu, choosers, kv_cache, staging, storage)
        if (selection := self._block_selection(impl, kv_cache)) is not None:
            impl.block_choosers = block_choosers(self.retrieval_config, choosers, selection)
        impl.keeper = self._keeper(name, impl, choosers)
        self.retrieval_layers[name] = impl

    def _keeper(
        self, name: str, impl: RetrievalAttentionImpl, choosers: list[Chooser]
    ) -> Keeper | None:
        """What keeps tokens in a layer; None where no method drops any."""
        assert self.requests is not None
        if self.requests.kept is None:
            return None
        selection, number = choosers[0].selection, [*self.retrieval_heads].index(name)
        drops = any(m.schedule.drops for m in self.retrieval_config.methods.values())
        most = selection.chosen.shape[2] if drops else 0
        kept = self.requests.kept
        return Keeper(cpu, kept, number, selection, impl.scale, most, impl.storage)

    def _share_storage(self, layers: dict[str, Any]) -> None:
        """Let each filter announce what it selects to all layers that follow it, at once."""
        impls = {number: layers[name].impl for name, number in self.layer_numbers.items()}
        following: dict[int, list[LayerStorage]] = {}
        for number, role in self.roles.items():
            if isinstance(role, Follows):
                following.setdefault(role.filter, []).append(impls[number].storage)
        for number, storages in following.items():
            impls[number].storage = self.storage.share(impls[number].storage, storages)

    def _attach_filters(self, layers: dict[str, Any]) -> dict[int, RetrievalAttentionImpl]:
        """Make the filter layers such; by their numbers."""
        config, seats = self.retrieval_config, self.seats
        window = len(OBSERVATIONS[config.observation or "last"]) if self.roles else 0
        filters, highest = {}, self._over_workers(ReduceOp.MAX)
        for group in itertools.chain.from_iterable(self.model_runner.attn_groups):
            for name in group.layer_names:
                number = self.layer_numbers.get(name, -1)
                if not isinstance(self.roles.get(number), Filters):
                    continue
                impl, kv_cache = layers[name].impl, layers[name].kv_cache
                store = IndexStore.empty(
                    Exact(),
                    pages=kv_cache.shape[0],
                    kv_heads=impl.num_kv_heads,
                    head_size=impl.head_size,
                    page_size=config.page_size,
                    dtype=kv_cache.dtype,
                    cache=kv_cache,
                    layout=group.get_metadata_builder().isa,
                )
                chosen = torch.zeros(seats, max(self.room.filtered, 1), dtype=torch.int32)
                selector = ContextSelector(store, chosen, impl.num_queries_per_kv, impl.scale)
                latest = None
                if window > 1:
                    heads = impl.num_kv_heads * impl.num_queries_per_kv
                    latest = LatestQueries(seats, window, heads, impl.head_size, kv_cache.dtype)
                chunk_selector = self._chunk_selector(selector)
                impl.filter(cpu, selector, latest, chunk_selector, highest)
                filters[number] = impl
        return filters

    @staticmethod
    def _over_workers(by: ReduceOp.RedOpType) -> Merge | AddUp | None:
        """How the heads of other workers are taken into account; None where there are none.

        Args:
            by: What becomes of each number of theirs.
        """
        workers = get_tp_group()
        if workers.world_size == 1:
            return None
        return lambda numbers: torch.distributed.all_reduce(numbers, by, workers.cpu_group)

    def _chunk_selector(self, selector: ContextSelector) -> ContextSelector | None:
        """What a filter selects with for chunks of prompts; None where prefill is exact."""
        if self.retrieval_config.prefill_budget is None:
            return None
        by = ChunkPlanner(self.retrieval_config)
        chosen = torch.zeros(self.most_pieces, by.select, dtype=torch.int32)
        return replace(selector, chosen=chosen, handle=None)

    def _block_selection(self, impl: Any, kv_cache: torch.Tensor) -> Selection | None:
        """Room for the blocks of a step, the same for all layers of a shape; None: no blocks."""
        config = self.retrieval_config
        if config.prefill_queries is None:
            return None
        assert config.prefill_budget is not None
        shape = impl.num_kv_heads, impl.num_queries_per_kv, impl.head_size
        if shape not in self.block_selections:
            kv_heads, group, head_size = shape
            self.block_selections[shape] = Selection.empty(
                seats=self.most_pieces,
                kv_heads=kv_heads,
                group=group * config.prefill_queries,
                head_size=head_size,
                most_selected=config.prefill_budget // config.page_size,
                dtype=kv_cache.dtype,
            )
        return self.block_selections[shape]

    def _choosers(self, name: str, impl: Any, kv_cache: torch.Tensor, layout: str) -> list[Chooser]:
        """How a layer selects, by the number of the method."""
        assert self.requests is not None
        config, requests, heads = self.retrieval_config, self.requests, self.retrieval_heads[name]
        shape = {"kv_heads": impl.num_kv_heads, "head_size": impl.head_size}
        check_outside(config.stores, impl.head_size, kv_cache.dtype)
        selection = Selection.empty(
            seats=self.seats,
            group=impl.num_queries_per_kv,
            most_selected=self.room.most_chosen(heads),
            dtype=kv_cache.dtype,
            counts=None if requests.selected is None else requests.selected[:, heads],
            **shape,
        )
        stores = {
            (index, tokens): IndexStore.empty(
                index,
                pages=kv_cache.shape[0],
                page_size=config.page_size,
                entry_tokens=tokens,
                dtype=kv_cache.dtype,
                cache=kv_cache if layout in cpu.LAYOUTS else None,
                layout=layout,
                **shape,
            )
            for index, tokens in [
                *config.stores,
                *((None, m.entry_tokens) for m in config.methods.values() if m.index is None),
            ]
        }
        return [
            Chooser(stores[m.index, m.entry_tokens], selection, m.pooling, impl.scale, m.rerank)
            for m in config.methods.values()
        ]

    def _staging(self, builder: RetrievalMetadataBuilder) -> PrefillStaging | None:
        """The group's staging buffer; None where the pages serve vLLM's prefill kernel as well."""
        page_size, rows = self.retrieval_config.page_size, self.retrieval_config.rows
        if not self.stages or (self.tiers is not None and not self.tiers.staging):
            return None
        encoded = self.encoding is not None
        if builder.isa not in (ISAS_OF_ROWS if rows else ISAS):
            if encoded:
                raise RetrievalConfigError(
                    f"kv_retrieval.codec={self.retrieval_config.codec} cannot encode pages of "
                    f"{self.model_config.model}, whose keys vLLM lays out for {builder.isa}; use "
                    "codec=raw."
                )
            return None
        if BLOCK_SIZE % page_size or (page_size == BLOCK_SIZE and not (rows or encoded)):
            return None
        return PrefillStaging(
            page_size,
            builder.num_kv_heads,
            builder.head_dim,
            builder.dtype,
            self.model_config.max_model_len,
            builder.isa,
            rows,
            encoded,
        )

    def execute_model(self, scheduler_output: Any) -> Any:
        assert self.requests is not None
        finished, preempted = scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids
        if finished or preempted:
            seats = self.requests.release(finished, preempted or ())
            self.storage.leave(seats, [*finished, *(preempted or ())])
        arrived = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        arrived |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
        self.requests.begin_step(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.total_num_scheduled_tokens,
            arrived,
        )
        self.storage.begin_step(scheduler_output)
        self._copy_index(scheduler_output.kv_cache_block_copies)
        if self.requests.loaded is not None:
            self.requests.loaded.begin_step(getattr(scheduler_output, FIELD))
        output = super().execute_model(scheduler_output)
        if self.requests.kept is not None:
            self.requests.kept.end_step()
        self.storage.end_step(scheduler_output.total_num_scheduled_tokens)
        return output

    def _take_stats(self) -> dict[str, int]:
        """What the connector reports."""
        assert self.requests is not None
        usage = self.storage.usage
        counts = self.requests.take_counts()
        return {
            "units_attended": counts.attended,
            "units_looked_up": counts.looked_up,
            "units_missed": counts.missed,
            "bytes_recalled": counts.recalled * usage.bytes_per_read,
            "heads_corrected": counts.corrected,
            f"slots_used/{self.rank}": usage.used,
            f"slots/{self.rank}": usage.slots,
        }

    def _copy_index(self, copies: Any) -> None:
        """Copy index entries with the blocks that vLLM copies on write."""
        if not copies:
            return
        source, target = torch.tensor(copies).unbind(1)
        for impl in self.retrieval_layers.values():
            for store in impl.stores:
                blocks = store.records.view(self.cache_config.num_gpu_blocks, -1)
                blocks[target] = blocks[source]
