"""vLLM's scheduler, ours, without a model or a worker: steps that compute nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.cli import SMOLLM2
from vllm_kvretrieval.engine.scheduler import RetrievalAsyncScheduler

BLOCK = 32


def full_attention(block: int = BLOCK) -> KVCacheSpec:
    """vLLM's spec of layers with full attention and blocks of ``block`` tokens."""
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=64, dtype=torch.float32)


class Stepper:
    """A scheduler, and requests that get made-up tokens.

    Args:
        options: Options of ``kv_retrieval``.
        blocks: Blocks of the KV cache.
        groups: Groups of layers; by default one with full attention.
        backend: The method.
        ahead: Steps that are scheduled before the tokens of one are known; with async scheduling.
        scheduler: A class in place of the one that the platform has chosen.
        engine: Further arguments of the engine.

    Attributes:
        outputs: Tokens that each request has got, by id.
        shared: Tokens that each request shared when it was first scheduled; of a session, at each
            input.
        look: Called with every step that has been scheduled, before its tokens are known.
    """

    def __init__(
        self,
        options: dict[str, Any],
        blocks: int = 1000,
        groups: Sequence[KVCacheSpec] = (),
        backend: str = "kvretrieval",
        ahead: int = 0,
        scheduler: type[Any] | None = None,
        **engine: Any,
    ) -> None:
        arguments: dict[str, Any] = {
            "max_num_batched_tokens": 512,
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 30,
            **engine,
        }
        config = EngineArgs(
            model=str(SMOLLM2),
            attention_backend=backend,
            additional_config={"kv_retrieval": options},
            **arguments,
        ).create_engine_config()
        specs = groups or [full_attention()]
        size = max(spec.block_size for spec in specs)
        config.cache_config.block_size = size
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = bool(ahead)
        if scheduler is None and ahead:  # the platform for CPUs chooses the other one
            scheduler = RetrievalAsyncScheduler
        if scheduler is not None:
            config.scheduler_config.scheduler_cls = scheduler
        if any(isinstance(spec, MambaSpec) for spec in specs):
            config.cache_config.mamba_cache_mode = "align"
        self.config, self.ahead = config, ahead
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(min(spec.block_size for spec in specs), sha256)
        self.scheduler: Any = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=size,
            hash_block_size=min(spec.block_size for spec in specs),
            log_stats=True,
        )
        self.outputs: dict[str, list[int]] = {}
        self.shared: dict[str, list[int]] = {}
        self.look: Callable[[SchedulerOutput], None] = lambda _: None
        self._pending: list[tuple[SchedulerOutput, set[str]]] = []
        self._made = 0

    def add(
        self,
        prompt: Sequence[int],
        tokens: int,
        options: dict[str, Any] | None = None,
        name: str | None = None,
        **arguments: Any,
    ) -> str:
        """Hand in a request of so many tokens to generate; returns its id."""
        self._made += 1
        name = name or str(self._made)
        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, extra_args={"kv_retrieval": options or {}}
        )
        params.update_from_generation_config({}, eos_token_id=0)
        self.outputs.setdefault(name, [])
        self.scheduler.add_request(
            Request(name, list(prompt), params, None, block_hasher=self.hasher, **arguments)
        )
        return name

    def requests(self) -> list[Request]:
        """The requests that have not ended."""
        return list(self.scheduler.requests.values())

    def step(self) -> SchedulerOutput:
        """Schedule a step, and tell the tokens of the one whose turn it is."""
        output: SchedulerOutput = self.scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self.shared.setdefault(new.req_id, []).append(new.num_computed_tokens)
        self.look(output)
        names = output.num_scheduled_tokens
        sampling = {n for n in names if not self.scheduler.requests[n].is_prefill_chunk}
        self._pending.append((output, sampling))
        while len(self._pending) > self.ahead:
            self._tell(*self._pending.pop(0))
        return output

    def run(self, most: int = 2000) -> None:
        """Step until all requests are done, and once more, as vLLM does."""
        for _ in range(most):
            self.step()
            if not self.scheduler.has_unfinished_requests():
                break
        else:
            raise AssertionError("requests do not end")
        while self._pending:
            self._tell(*self._pending.pop(0))
        self.step()
        self._pending.clear()

    def ask(
        self, prompt: Sequence[int], tokens: int, options: dict[str, Any] | None = None
    ) -> tuple[list[int], int]:
        """Serve a request: its tokens, and how many of its prompt it shared."""
        name = self.add(prompt, tokens, options)
        self.run()
        return self.outputs[name], self.shared[name][0]

    def _tell(self, output: SchedulerOutput, sampling: set[str]) -> None:
        names = list(output.num_scheduled_tokens)
        sampled = [[self._token(name)] if name in sampling else [] for name in names]
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for told in outputs.outputs:
                self.outputs[told.request_id] += told.new_token_ids

    def _token(self, name: str) -> int:
        return 1 + len(self.outputs[name]) * 7 % 500
