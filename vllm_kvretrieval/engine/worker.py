"""The CPU worker with retrieval."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.mem_utils import format_gib
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvretrieval.attention.impl import RetrievalAttentionImpl
from vllm_kvretrieval.attention.metadata import RetrievalMetadataBuilder
from vllm_kvretrieval.attention.staging import BLOCK_SIZE, ISAS, PrefillStaging
from vllm_kvretrieval.config import RetrievalConfig
from vllm_kvretrieval.engine.allocation import allocate_kv_cache
from vllm_kvretrieval.engine.connector import RetrievalConnector
from vllm_kvretrieval.engine.requests import RequestTable
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import LayerState
from vllm_kvretrieval.retrieval.budget import PageBudget
from vllm_kvretrieval.tiers.home import DiskHome
from vllm_kvretrieval.tiers.layer import SlowLayer
from vllm_kvretrieval.tiers.sizes import Cache, Tiers

logger = init_logger("vllm.kvretrieval.worker")


class RetrievalCPUWorker(CPUWorker):
    """vLLM's CPU worker; owns what retrieval keeps beside the KV cache.

    After vLLM has allocated the KV cache, every retrieval layer gets its page index and per-request
    state, and every metadata builder the table of running requests. With a slow home, the retrieval
    layers' KV cache lies there, and each has a recall cache in fast memory.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = RetrievalConfig.from_vllm(self.vllm_config)
        assert config is not None, "this worker is chosen for retrieval backends only"
        self.retrieval_config = config
        self.requests: RequestTable | None = None
        self.retrieval_layers: dict[str, RetrievalAttentionImpl] = {}
        self.tiers: Tiers | None = None
        self.home: DiskHome | None = None
        self.slow_layers: list[SlowLayer] = []
        # What the current step copied on write (source, target), and what the last one lost.
        self._copied: list[tuple[int, int]] = []
        self._lost: set[int] = set()

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache, less what the page index and staging take of them.

        A KV cache size that the user fixed is left as it is; the others then come on top. With a
        slow home these are the bytes of all blocks that it holds, wherever their layers are kept.
        """
        available = super().determine_available_memory()
        fast = available - self._staging_bytes()
        self.tiers = self._plan_tiers(fast)
        if self.tiers is not None:
            return self.tiers.home + self.tiers.dense
        if self.cache_config.kv_cache_memory_bytes is None:
            # A minimum and a maximum beside the keys and values of summary_size tokens.
            per_summary = self.retrieval_config.tokens_per_summary
            available = fast * per_summary // (per_summary + 1)
        return available

    def _plan_tiers(self, fast: int) -> Tiers | None:
        """Sizes with a slow home, given so many bytes of fast memory; None without one."""
        config = self.retrieval_config
        if config.home == "device":
            return None
        specs = self.get_kv_cache_spec()
        in_home = self._retrieving(specs)
        spec = next(iter(specs.values()))
        if not in_home or type(spec) is not FullAttentionSpec or len(set(specs.values())) > 1:
            if config.home == "auto":
                return None
            raise RetrievalConfigError(
                f"kv_retrieval.home={config.home} serves models whose layers all have the same "
                f"full attention, some of them behind dense_layers={config.dense_layers}; "
                f"{self.model_config.model} is none. Use home=device."
            )
        cache = Cache(
            retrieval_layers=len(in_home),
            dense_layers=len(specs) - len(in_home),
            kv_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            block_bytes=spec.page_size_bytes,
            max_num_seqs=self.scheduler_config.max_num_seqs,
            max_model_len=self.model_config.max_model_len,
        )
        if config.home == "auto" and cache.fits_in(fast, config.tokens_per_summary):
            return None
        return Tiers.plan(config, cache, fast, self.cache_config.num_gpu_blocks_override)

    def _retrieving(self, names: Iterable[str]) -> list[str]:
        return [n for n in names if extract_layer_index(n) >= self.retrieval_config.dense_layers]

    def _allocate_kv_cache(
        self, kv_cache_config: Any, kernel_block_sizes: list[int], **_: Any
    ) -> dict[str, torch.Tensor]:
        """What the model runner calls in place of its own method where there is a slow home."""
        kv_caches, self.home = allocate_kv_cache(
            self.model_runner,
            kv_cache_config,
            kernel_block_sizes,
            self._retrieving(kv_cache_config.kv_cache_tensors[0].layers),
            self.retrieval_config.home_path,
        )
        return kv_caches

    def _staging_bytes(self) -> int:
        """One layer's keys and values of the longest context; see PrefillStaging."""
        model = self.model_config
        width = 2 * model.get_head_size() * model.dtype.itemsize
        return model.max_model_len * model.get_num_kv_heads(self.parallel_config) * width

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        if self.tiers is not None:
            self.model_runner.initialize_kv_cache_tensors = self._allocate_kv_cache
        super().initialize_from_config(kv_cache_config)
        config = self.retrieval_config
        budget = config.page_budget()
        layers = self.vllm_config.compilation_config.static_forward_context
        stagings: dict[Any, PrefillStaging | None] = {}
        groups = []
        for group in itertools.chain.from_iterable(self.model_runner.attn_groups):
            builder = group.get_metadata_builder()
            if not isinstance(builder, RetrievalMetadataBuilder):
                continue
            shape = (builder.num_kv_heads, builder.head_dim, builder.dtype)
            if shape not in stagings:
                stagings[shape] = self._staging(builder)
            staging = stagings[shape]
            groups.append((builder, staging, self._retrieving(group.layer_names)))
        heads = sum(layers[name].impl.num_kv_heads for *_, names in groups for name in names)
        capacity = self.scheduler_config.max_num_seqs
        in_slots = self.home is not None
        self.requests = RequestTable(config, capacity, heads, self.model_runner, in_slots)
        for builder, staging, names in groups:
            for name in names:
                self._attach(name, layers[name], budget, staging)
            builder.attach(self.requests, config.page_size, staging, self._home_bytes_per_page())
        if has_kv_transfer_group() and isinstance(get_kv_transfer_group(), RetrievalConnector):
            get_kv_transfer_group().report(self._take_failed_blocks, self._take_stats)
        self._log_start(budget, len(layers))

    def _home_bytes_per_page(self) -> int:
        """Of one layer; 0 without a slow home."""
        if self.home is None:
            return 0
        pages = self.cache_config.num_gpu_blocks * self._pages_per_block
        return self.home.layer_bytes // pages

    @property
    def _pages_per_block(self) -> int:
        return self.cache_config.block_size // self.retrieval_config.page_size

    def _attach(
        self, name: str, layer: Any, budget: PageBudget, staging: PrefillStaging | None
    ) -> None:
        """Make the layer a retrieval layer."""
        from vllm_kvretrieval.kernels import cpu

        impl, kv_cache = layer.impl, layer.kv_cache
        page_size = self.retrieval_config.page_size
        longest = -(-self.model_config.max_model_len // page_size)
        state = LayerState.empty(
            pages=kv_cache.shape[0],
            slots=self.scheduler_config.max_num_seqs,
            kv_heads=impl.num_kv_heads,
            group=impl.num_queries_per_kv,
            head_size=impl.head_size,
            max_selected=min(max(budget.select, 1), longest),
            page_size=page_size,
            summary_size=self.retrieval_config.tokens_per_summary,
            scale=impl.scale,
            dtype=kv_cache.dtype,
        )
        impl.attach(cpu, state, kv_cache, staging, self._slow_layer(impl, kv_cache))
        self.retrieval_layers[name] = impl

    def _slow_layer(self, impl: RetrievalAttentionImpl, kv_cache: torch.Tensor) -> SlowLayer | None:
        """The slow side of the next retrieval layer; None without a slow home."""
        if self.home is None:
            return None
        from vllm_kvretrieval.kernels import cpu

        assert self.tiers is not None
        assert self.requests is not None
        number = len(self.slow_layers)
        units = kv_cache.view(-1, 1, 2 * self.retrieval_config.page_size, impl.head_size)
        file = self.home.fd, number * self.home.layer_bytes
        cache = cpu.RecallCache(
            units, self.tiers.slots, impl.num_kv_heads, self.requests.recalls, file
        )
        self.slow_layers.append(SlowLayer(self.home, number, cache))
        return self.slow_layers[-1]

    def _staging(self, builder: RetrievalMetadataBuilder) -> PrefillStaging | None:
        """The group's staging buffer; None where the pages serve vLLM's prefill kernel as well."""
        page_size = self.retrieval_config.page_size
        if builder.isa not in ISAS or page_size >= BLOCK_SIZE or BLOCK_SIZE % page_size:
            return None
        return PrefillStaging(
            page_size,
            builder.num_kv_heads,
            builder.head_dim,
            builder.dtype,
            self.model_config.max_model_len,
        )

    def execute_model(self, scheduler_output: Any) -> Any:
        assert self.requests is not None
        gone = scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set())
        for slot in self.requests.release(gone) if gone else ():
            for layer in self.slow_layers:
                layer.cache.release(slot)
        self.requests.begin_step(
            scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens
        )
        self._copied = list(scheduler_output.kv_cache_block_copies or ())
        self._copy_index(self._copied)
        output = super().execute_model(scheduler_output)
        if self.home is not None:
            tokens = scheduler_output.total_num_scheduled_tokens
            capacity = self.cache_config.num_gpu_blocks * self.cache_config.block_size
            self.home.note_written(tokens * self.home.memory.numel() // capacity)
        return output

    def _take_failed_blocks(self) -> set[int]:
        """vLLM's blocks of which a page could not be read in this step or the one before.

        Twice, since vLLM fails requests for blocks that were computed before the step, and a block
        may be lost in the step that first writes to it.
        """
        if self.home is None:
            return set()
        pages = set[int]().union(*(layer.cache.take_failed_pages() for layer in self.slow_layers))
        pages |= self.home.take_lost(self._home_bytes_per_page())
        lost = {page // self._pages_per_block for page in pages}
        lost.update(target for source, target in self._copied if source in lost)
        if lost:
            logger.error(
                "The KV cache's home (%s) cannot be read; the requests with these blocks fail: %s",
                self.retrieval_config.home_path or "a temporary file",
                sorted(lost),
            )
        failed, self._lost = lost | self._lost, lost
        return failed

    def _take_stats(self) -> dict[str, int]:
        """What the connector reports."""
        assert self.requests is not None
        caches = [layer.cache for layer in self.slow_layers]
        unit_bytes = caches[0].slots[0].nbytes if caches else 0
        corrected, attended, missed, recalled = self.requests.take_counts()
        return {
            "units_attended": attended,
            "units_missed": missed,
            "bytes_recalled": recalled * unit_bytes,
            "heads_corrected": corrected,
            "slots_used": sum(cache.used for cache in caches),
            "slots": sum(len(cache.slots) for cache in caches),
        }

    def _copy_index(self, copies: Any) -> None:
        """Copy index entries with the blocks that vLLM copies on write."""
        if not copies:
            return
        source, target = torch.tensor(copies).unbind(1)
        for impl in self.retrieval_layers.values():
            assert impl.state is not None
            index = impl.state.index
            blocks = index.view(self.cache_config.num_gpu_blocks, -1)
            blocks[target] = blocks[source]
        pages = range(self._pages_per_block)
        for layer in self.slow_layers:
            layer.cache.drop_pages(
                [block * len(pages) + page for block in target.tolist() for page in pages]
            )

    def _log_start(self, budget: PageBudget, num_layers: int) -> None:
        from vllm_kvretrieval.kernels import cpu

        config = self.retrieval_config
        states = [impl.state for impl in self.retrieval_layers.values() if impl.state is not None]
        size = sum(s.index.numel() * s.index.element_size() for s in states)
        logger.info(
            "%s: decode attends to at most %d tokens per KV head (sink %d, window %d, selected %d, "
            "in pages of %d) in %d of %d layers; page index %s GiB; %s kernels.",
            config.method,
            budget.total * config.page_size,
            budget.sink * config.page_size,
            budget.window * config.page_size,
            budget.select * config.page_size,
            config.page_size,
            len(states),
            num_layers,
            format_gib(size),
            cpu.isa(),
        )
        if self.tiers is not None:
            tiers = self.tiers
            logger.info(
                "home=disk in %s: %s GiB for %d tokens, %s GiB of fast memory for dense layers and "
                "%s GiB for page index and books; the recall cache's %s GiB hold %d slots per "
                "layer for what %d requests attend to.",
                config.home_path or "the directory for temporary files",
                format_gib(tiers.home),
                (tiers.blocks - 1) * self.cache_config.block_size,
                format_gib(tiers.dense),
                format_gib(tiers.index),
                format_gib(tiers.recall_cache),
                tiers.slots,
                self.scheduler_config.max_num_seqs,
            )
