"""The CPU worker with retrieval."""

import itertools
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.mem_utils import format_gib
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvretrieval.attention.impl import RetrievalAttentionImpl
from vllm_kvretrieval.attention.metadata import RetrievalMetadataBuilder
from vllm_kvretrieval.attention.staging import BLOCK_SIZE, PrefillStaging
from vllm_kvretrieval.config import RetrievalConfig
from vllm_kvretrieval.engine.requests import RequestTable
from vllm_kvretrieval.kernels import LayerState
from vllm_kvretrieval.retrieval.budget import PageBudget

logger = init_logger("vllm.kvretrieval.worker")


class RetrievalCPUWorker(CPUWorker):
    """vLLM's CPU worker; owns what retrieval keeps beside the KV cache.

    After vLLM has allocated the KV cache, every retrieval layer gets its page index and per-request
    state, and every metadata builder the table of running requests.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = RetrievalConfig.from_vllm(self.vllm_config)
        assert config is not None, "this worker is chosen for retrieval backends only"
        self.retrieval_config = config
        self.requests: RequestTable | None = None
        self.retrieval_layers: dict[str, RetrievalAttentionImpl] = {}

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache, less what the page index and staging take of them.

        A KV cache size that the user fixed is left as it is; the others then come on top.
        """
        available = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes is None:
            # Minimum and maximum of a page's keys beside its keys and values: one in page_size.
            page_size = self.retrieval_config.page_size
            available = (available - self._staging_bytes()) * page_size // (page_size + 1)
        return available

    def _staging_bytes(self) -> int:
        """One layer's keys and values of the longest context; see PrefillStaging."""
        model = self.model_config
        width = 2 * model.get_head_size() * model.dtype.itemsize
        return model.max_model_len * model.get_num_kv_heads(self.parallel_config) * width

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        config = self.retrieval_config
        budget = config.page_budget()
        layers = self.vllm_config.compilation_config.static_forward_context
        stagings: dict[Any, PrefillStaging | None] = {}
        builders = []
        for group in itertools.chain.from_iterable(self.model_runner.attn_groups):
            builder = group.get_metadata_builder()
            if not isinstance(builder, RetrievalMetadataBuilder):
                continue
            shape = (builder.num_kv_heads, builder.head_dim, builder.dtype)
            if shape not in stagings:
                stagings[shape] = self._staging(builder)
            staging = stagings[shape]
            builders.append((builder, staging))
            for name in group.layer_names:
                if extract_layer_index(name) >= config.dense_layers:
                    self._attach(name, layers[name], budget, staging)
        heads = sum(impl.num_kv_heads for impl in self.retrieval_layers.values())
        capacity = self.scheduler_config.max_num_seqs
        self.requests = RequestTable(config, capacity, heads, self.model_runner)
        for builder, staging in builders:
            builder.attach(self.requests, config.page_size, staging)
        self._log_start(budget, len(layers))

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
            scale=impl.scale,
            dtype=kv_cache.dtype,
        )
        impl.attach(cpu, state, kv_cache, staging)
        self.retrieval_layers[name] = impl

    def _staging(self, builder: RetrievalMetadataBuilder) -> PrefillStaging | None:
        """The group's staging buffer; None where the pages serve vLLM's prefill kernel as well."""
        page_size = self.retrieval_config.page_size
        if builder.isa != "vec" or page_size >= BLOCK_SIZE or BLOCK_SIZE % page_size:
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
        if gone:
            self.requests.release(gone)
        self.requests.begin_step(
            scheduler_output.num_scheduled_tokens, scheduler_output.total_num_scheduled_tokens
        )
        self._copy_index(scheduler_output.kv_cache_block_copies or ())
        return super().execute_model(scheduler_output)

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
