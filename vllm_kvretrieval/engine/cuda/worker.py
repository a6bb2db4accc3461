"""The GPU worker with retrieval."""

import contextlib
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.utils.mem_utils import format_gib
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvretrieval.engine.connector import RetrievalConnector
from vllm_kvretrieval.engine.cuda.host import log_tiers, plan_tiers
from vllm_kvretrieval.engine.cuda.layers import RetrievalLayers, fixed_bytes
from vllm_kvretrieval.engine.cuda.runner import RetrievalModelRunner
from vllm_kvretrieval.engine.cuda.tiers import HostTiers
from vllm_kvretrieval.engine.cuda.traffic import TrafficReport
from vllm_kvretrieval.engine.memory import (
    bytes_per_block,
    check_retrieving,
    requests_at_once,
)
from vllm_kvretrieval.engine.reports import attach
from vllm_kvretrieval.engine.start_log import log_method
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels.device import RECORD_ALIGNMENT
from vllm_kvretrieval.options.engine import RetrievalConfig


class RetrievalGPUWorker(Worker):
    """vLLM's GPU worker, which leaves room for retrieval's state beside the KV cache.

    Attributes:
        tiers: Sizes, if the retrieval layers' cache is in host memory.
        unconnected: What is counted, where no connector of ours reports it.
    """

    tiers: HostTiers | None = None
    unconnected: TrafficReport | None = None

    def _make_model_runner(self) -> RetrievalModelRunner:
        return RetrievalModelRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache, without those for page indexes and the work of a step.

        If the user fixed the size of the KV cache, it stays, and the others come on top. If the
        home is host memory, the fixed size is what the device gives to everything together, and the
        result is the bytes of all blocks at home.

        Raises:
            RetrievalConfigError: Nothing would be retrieved, or something does not fit.
        """
        # Before vLLM applies the plan of an earlier start, which looks like a user's setting.
        given = self.cache_config.kv_cache_memory_bytes is not None
        if not given:
            self.expect_tiers(self.requested_memory - self.model_runner.model_memory_usage)
        available = super().determine_available_memory()
        config = self.model_runner.retrieval_config
        specs, ours = self.get_kv_cache_spec(), self.model_runner.retrieving
        check_retrieving(self.vllm_config, specs, config, ours)
        if not specs:
            return available
        room = available if given else available - self._fixed_bytes(config, available)
        self.tiers = plan_tiers(self.vllm_config, config, specs, ours, room)
        self.model_runner.tiers = self.tiers
        if self.tiers is not None:
            return self.tiers.blocks * sum(spec.page_size_bytes for spec in specs.values())
        if given:
            return available
        block, index = bytes_per_block(self.vllm_config, specs, config, ours, RECORD_ALIGNMENT)
        return room * block // (block + index)

    def expect_tiers(self, room: int) -> None:
        """Let graphs be measured as they would be captured if steps took no memory.

        Args:
            room: Bytes of the device for the KV cache, the state beside it and all else.
        """
        config, specs = self.model_runner.retrieval_config, self.get_kv_cache_spec()
        ours = self.model_runner.retrieving
        if specs:
            with contextlib.suppress(RetrievalConfigError):  # which comes again, with the true room
                tiers = plan_tiers(self.vllm_config, config, specs, ours, room)
                self.model_runner.tiers = tiers

    def _fixed_bytes(self, config: RetrievalConfig, available: int) -> int:
        """Bytes of the state that does not grow with the KV cache; less than what is available."""
        fixed = fixed_bytes(
            config,
            self.model_runner.roles,
            self.model_runner.heads,
            self.vllm_config.compilation_config.static_forward_context,
            self.scheduler_config.max_num_seqs,
            self.model_config.max_model_len,
            self.scheduler_config.max_num_batched_tokens,
            self.vllm_config.num_speculative_tokens,
        )
        if fixed >= available:
            raise RetrievalConfigError(
                f"{config.method} needs {format_gib(fixed)} GiB for scores and lists, with "
                f"--max-num-seqs {self.scheduler_config.max_num_seqs} and --max-model-len "
                f"{self.model_config.max_model_len}, and {format_gib(available)} GiB are left. "
                "Lower one of them, or raise --gpu-memory-utilization."
            )
        return fixed

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """See ``Worker.initialize_from_config``; logs what retrieval will do."""
        if self.tiers is not None:
            self.tiers = self.model_runner.tiers = self.tiers.of(kv_cache_config.num_blocks)
        super().initialize_from_config(kv_cache_config)
        kept = self.model_runner.retrieval_layers
        layers = len(self.get_kv_cache_spec())
        log_method(kept.config, len(kept.impls), layers, kept.indexes, "Triton")
        if self.tiers is not None:
            log_tiers(kept.config, self.tiers, self.cache_config.block_size)
        self._report_traffic(kept)

    def compile_or_warm_up_model(self) -> Any:
        """See ``Worker.compile_or_warm_up_model``; compiles the kernels before their capture."""
        self.model_runner.compile_retrieval()
        return super().compile_or_warm_up_model()

    def _report_traffic(self, kept: RetrievalLayers) -> None:
        """Report what is counted to the front end after every step."""
        requests, unit_bytes = kept.requests, 0
        if kept.tier is not None:
            unit_bytes = kept.tier.unit_bytes
        report = TrafficReport(
            None if kept.tier is None else kept.tier.traffic,
            requests.corrected,
            requests.spared,
            page_size=kept.config.page_size,
            unit_bytes=unit_bytes,
            slots=0 if kept.tier is None else kept.tier.slots,
            rank=self.rank,
        )
        if has_kv_transfer_group() and isinstance(get_kv_transfer_group(), RetrievalConnector):
            get_kv_transfer_group().report(
                requests_at_once(self.vllm_config) if self.tiers is None else self.tiers.seats,
                set,
                lambda: report.take(requests.counted()),
            )
        else:
            self.unconnected = report

    def sample_tokens(self, grammar_output: Any) -> Any:
        """See ``Worker.sample_tokens``; adds what was counted, if no connector of ours takes it."""
        output = super().sample_tokens(grammar_output)
        if self.unconnected is None or output is None:
            return output
        requests = self.model_runner.retrieval_layers.requests
        return attach(output, self.unconnected.take(requests.counted()))
