"""The worker, its metadata and its layers, driven step by step without a model around them.

Queries and keys are random. Values tell whose they are: a constant of the request, of the KV head
and of the layer, which every average over tokens of that request keeps, and none over others'.
Memory is filled before it is used: keys that nobody has written get attention, and values that
nobody has written show in what is attended to. Behind and before each tensor lie bytes of a known
value.
"""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.support.bare_request import Running
from tests.support.guarded_memory import GuardedMemory, WrittenWeights
from vllm_kvretrieval.attention.cpu.impl import RetrievalAttentionImpl
from vllm_kvretrieval.attention.cpu.metadata import RetrievalMetadataBuilder
from vllm_kvretrieval.engine.cpu import planner as planner_module
from vllm_kvretrieval.engine.cpu import worker as worker_module
from vllm_kvretrieval.engine.cpu.worker import RetrievalCPUWorker
from vllm_kvretrieval.methods.filters import Filter
from vllm_kvretrieval.options.engine import RetrievalConfig

LAYERS, HEADS, GROUP, HEAD_SIZE = 4, 2, 2, 32
BLOCK = 128  # tokens, unless a page has more
UNWRITTEN = 1e30
"""Stands for values that were never written."""
MIB = 1 << 20


class Backend(NamedTuple):
    """vLLM's name of one."""

    name: str


class BareEngine:
    """An engine with a worker, whose layers attend to random queries.

    Args:
        method: The backend's name.
        options: Of ``kv_retrieval``.
        seats: Requests that run at once.
        max_model_len: Tokens of the longest context.
        step_tokens: Of a step at most.
        fast: Bytes of fast memory, with a slow home.
        dtype: Of the KV cache.
        stages: Of a pipeline, one of which the worker is.
        plan_only: Whether to divide memory, and no more.

    Raises:
        RetrievalConfigError: The options cannot be served.
    """

    def __init__(
        self,
        method: str,
        options: dict[str, Any],
        *,
        seats: int = 3,
        max_model_len: int = 512,
        step_tokens: int = 192,
        fast: int = 256 * MIB,
        dtype: torch.dtype = torch.float32,
        stages: int = 1,
        plan_only: bool = False,
    ) -> None:
        self.stages = stages
        self.seats, self.max_model_len, self.step_tokens = seats, max_model_len, step_tokens
        self.dtype, self.memory = dtype, GuardedMemory()
        self.random = torch.Generator().manual_seed(max_model_len)
        self.running: list[Running] = []
        self.layers: dict[str, Any] = {}
        self.finished = 0
        self._added = itertools.count()
        self._waiting: list[Running] = []
        self._ended: list[str] = []
        self._interrupted: list[str] = []
        self._arrived: list[Running] = []
        with self._vllm():
            self.worker = self._make_worker(method, options)
            self.config: RetrievalConfig = self.worker.retrieval_config
            self.page_size = self.config.page_size
            self.block_size = max(BLOCK, self.page_size)
            self.vllm_config.cache_config.block_size = self.block_size
            planner = self.worker.planner
            planner.tiers = planner.plan_tiers(fast, planner.staging_bytes())
            if plan_only:
                return
            self._make_layers()
            tiers = planner.tiers
            group = KVCacheGroupSpec([f"model.layers.{i}" for i in range(LAYERS)], self._spec)
            cache = KVCacheConfig(0 if tiers is None else tiers.blocks, [], [group])
            self.worker.initialize_from_config(cache)
            self._spoil()

    # ------------------------------------------------------------------------- what vLLM does

    @contextmanager
    def _vllm(self) -> Iterator[None]:
        """vLLM's part of a worker is this engine's."""
        config = SimpleNamespace(model_config=SimpleNamespace(dtype=self.dtype))
        builder = cpu_attn.CPUAttentionMetadataBuilder
        alone = SimpleNamespace(world_size=1)
        replaced: list[tuple[Any, str, Any]] = [
            (CPUWorker, "__init__", lambda own: self._init_worker(own)),
            (CPUWorker, "initialize_from_config", lambda *_: self._allocate()),
            (CPUWorker, "execute_model", lambda *_: self._run()),
            (builder, "__init__", lambda own: self._init_builder(own)),
            (cpu_attn, "get_current_vllm_config", lambda: config),
            (worker_module, "get_tp_group", lambda: alone),
            (planner_module, "least_of_workers", lambda count: count),
        ]
        with ExitStack() as patches:
            for place, name, by in replaced:
                patches.enter_context(mock.patch.object(place, name, by))
            patches.enter_context(self.memory.in_use())
            yield

    def _make_worker(self, method: str, options: dict[str, Any]) -> Any:
        backend = Backend(method.upper())
        self.vllm_config = SimpleNamespace(
            attention_config=SimpleNamespace(
                backend=backend, backend_per_kind={}, hisparse_config=None
            ),
            num_speculative_tokens=0,
            additional_config={"kv_retrieval": options},
            scheduler_config=SimpleNamespace(
                max_num_seqs=self.seats,
                max_num_active_seqs=None,
                max_num_batched_tokens=self.step_tokens,
                disable_hybrid_kv_cache_manager=False,
            ),
            model_config=SimpleNamespace(
                model="bare",
                dtype=self.dtype,
                max_model_len=self.max_model_len,
                get_head_size=lambda: HEAD_SIZE,
                get_num_kv_heads=lambda _: HEADS,
                get_total_num_kv_heads=lambda: HEADS,
                hf_text_config=SimpleNamespace(),
                get_total_num_hidden_layers=lambda: LAYERS,
                is_hybrid=False,
                is_attention_free=False,
                has_noops=False,
            ),
            parallel_config=SimpleNamespace(
                local_world_size=1, tensor_parallel_size=1, pipeline_parallel_size=self.stages
            ),
            cache_config=SimpleNamespace(
                num_gpu_blocks_override=None, kv_offloading_size=None, block_size=BLOCK
            ),
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
            kv_transfer_config=None,
            use_v2_model_runner=False,
        )
        return RetrievalCPUWorker()

    def _init_worker(self, worker: Any) -> None:
        worker.vllm_config, worker.rank = self.vllm_config, 0
        for name in ("scheduler", "model", "parallel", "cache"):
            setattr(worker, f"{name}_config", getattr(self.vllm_config, f"{name}_config"))
        worker.get_kv_cache_spec = lambda: {f"model.layers.{i}": self._spec for i in range(LAYERS)}
        worker.model_runner = self.runner = SimpleNamespace(
            vllm_config=self.vllm_config, input_batch=SimpleNamespace(req_ids=[]), attn_groups=[]
        )

    @property
    def _spec(self) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=self.dtype
        )

    def _init_builder(self, builder: Any) -> None:
        builder.num_kv_heads, builder.num_heads = HEADS, HEADS * GROUP
        builder.head_dim, builder.dtype = HEAD_SIZE, self.dtype
        builder.window_size, builder.block_size = -1, self.page_size
        builder.kv_cache_dtype = "auto"
        builder.is_cross_attention = builder.is_encoder_only_attention = False
        builder.isa = cpu_attn._get_attn_isa(self.dtype, self.page_size, HEAD_SIZE)

    def _make_layers(self) -> None:
        self.builder = RetrievalMetadataBuilder()
        for name in self.worker.get_kv_cache_spec():
            impl = RetrievalAttentionImpl(
                HEADS * GROUP, HEAD_SIZE, HEAD_SIZE**-0.5, HEADS, None, None, "auto"
            )
            self.layers[name] = SimpleNamespace(
                impl=impl, isa=self.builder.isa, _k_scale_float=1.0, _v_scale_float=1.0
            )
        group = SimpleNamespace(
            kv_cache_spec=self._spec,
            layer_names=[*self.layers],
            get_metadata_builder=lambda: self.builder,
        )
        self.runner.attn_groups.append([group])

    def _allocate(self) -> None:
        """Memory for the KV cache, by layer, in a home or not."""
        worker, planner = self.worker, self.worker.planner
        tiers = planner.tiers
        blocks = self.seats * -(-self.max_model_len // self.block_size) + 1
        if tiers is not None:
            blocks = tiers.blocks
        self.vllm_config.cache_config.num_gpu_blocks = blocks
        self._free = list(range(1, blocks))  # block 0 is vLLM's own
        size = blocks * self._spec.page_size_bytes
        names = [*self.layers]
        raw: dict[str, torch.Tensor] = {}
        if worker.storage.allocates:
            for part, memory in worker.storage.allocate(names, size):
                raw.update(zip(part, memory.split(size) if part else (), strict=True))
        shape = blocks * self.block_size // self.page_size, HEADS, self.page_size, 2 * HEAD_SIZE
        for name in names:
            memory = raw[name] if name in raw else torch.empty(size, dtype=torch.int8)
            cache = memory.view(self.dtype).view(shape)
            rows = self.config.token_major and name in planner.retrieving(names)
            if (
                self.config.encoding is None or name not in worker.storage.slow_layers
            ):  # else nobody has it
                cache.zero_()
                halves = cache.view(*shape[:2], 2, -1) if not rows else cache
                (halves[..., HEAD_SIZE:] if rows else halves[:, :, 1]).fill_(UNWRITTEN)
            self.layers[name].kv_cache = cache

    def _spoil(self) -> None:
        """Overwrite state that starts as zero but must not be read before it is written."""
        for impl in self.worker.retrieval_layers.values():
            impl.choosers[0].selection.chosen.fill_(-1)
        for watcher in self.watchers:
            if isinstance(watcher, Filter):
                watcher.selectors.rows.chosen.fill_(-1)
            else:
                watcher._kept.ratings.fill_(float("nan"))
                watcher._kernels = WrittenWeights()

    @property
    def watchers(self) -> list[Any]:
        """The methods that look at attention after it, of all layers."""
        return [w for layer in self.layers.values() for w in layer.impl.watchers.values()]

    # --------------------------------------------------------------------------------- requests

    def add(self, options: dict[str, Any], prompt: int, generates: int) -> None:
        """Let a request wait for a seat."""
        number = next(self._added)
        code = (number % 5 - 2) / 2
        request = Running(f"r{number}", options, prompt, generates, code, tokens=prompt)
        self._waiting.append(request)

    @property
    def left(self) -> int:
        """How many requests have not ended."""
        return len(self.running) + len(self._waiting)

    def preempt(self) -> None:
        """Interrupt the request that came last; it starts again, with all that it had."""
        request = self.running.pop()
        self._interrupted.append(request.name)
        self._give_back(request)
        request.computed = 0
        self._waiting.insert(0, request)

    def step(self) -> bool:
        """Run one step; whether there was anything to do."""
        while self._waiting and len(self.running) < self.worker.planner.seats:
            self.running.append(self._waiting.pop(0))
            self._arrived.append(self.running[-1])
        if not self.running:
            return False
        left, scheduled = self.step_tokens, dict[str, int]()
        for request in self.running:
            count = min(request.tokens - request.computed, left)
            if count:
                scheduled[request.name] = count
                left -= count
        self._scheduled = scheduled
        output = SimpleNamespace(
            finished_req_ids={*self._ended},
            preempted_req_ids={*self._interrupted},
            scheduled_new_reqs=[r.announced for r in self._arrived if r.name in scheduled],
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            kv_cache_block_copies=None,
        )
        self._ended.clear()
        self._interrupted.clear()
        self._arrived = [r for r in self._arrived if r.name not in scheduled]
        with self._vllm():
            self.worker.execute_model(output)
            assert self.worker.storage.check() == ""
        for request in [r for r in self.running if r.name in scheduled]:
            request.computed += scheduled[request.name]
            if request.done:
                self.running.remove(request)
                self._ended.append(request.name)
                self._give_back(request)
                self.finished += 1
            elif request.computed == request.tokens:
                request.tokens += 1
        return True

    def _give_back(self, request: Running) -> None:
        self._free += request.blocks
        request.blocks = []

    # ------------------------------------------------------------------------------------ a step

    def _run(self) -> None:
        """Run all layers, one after the other, over the tokens of the step."""
        batch = [r for r in self.running if r.name in self._scheduled]
        # Requests of a single token come first, as vLLM's runner has it.
        batch.sort(key=lambda request: self._scheduled[request.name] > 1)
        self.runner.input_batch.req_ids = [request.name for request in batch]
        new = [self._scheduled[request.name] for request in batch]
        common = self._describe(batch, new)
        metadata = self.builder.build(0, common)
        codes = torch.tensor([r.code for r in batch]).repeat_interleave(torch.tensor(new))
        for number, layer in enumerate(self.layers.values()):
            query, key, value = (
                torch.rand(sum(new), heads, HEAD_SIZE, generator=self.random).sub_(0.5).mul_(2)
                for heads in (HEADS * GROUP, HEADS, HEADS)
            )
            query = (query * 4).to(self.dtype)
            value[..., 0] = codes[:, None]
            value[..., 1] = torch.arange(HEADS) - 0.5
            value[..., 2] = number / LAYERS
            key, value = key.to(self.dtype), value.to(self.dtype)
            output = torch.empty_like(query)
            layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output)
            self._check(output.float(), codes, number, metadata)

    def _describe(self, batch: list[Running], new: list[int]) -> Any:
        """vLLM's description of a step."""
        each = self.block_size // self.page_size
        width = -(-self.max_model_len // self.block_size) * each
        table = torch.zeros(len(batch), width, dtype=torch.int32)
        slots = []
        for row, (request, count) in enumerate(zip(batch, new, strict=True)):
            end = request.computed + count
            while len(request.blocks) * self.block_size < end:
                request.blocks.append(self._free.pop(0))
            pages = [block * each + i for block in request.blocks for i in range(each)]
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            positions = torch.arange(request.computed, end)
            page = table[row, positions // self.page_size].long()
            slots.append(page * self.page_size + positions % self.page_size)
        lens = [request.computed + count for request, count in zip(batch, new, strict=True)]
        starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
        return SimpleNamespace(
            num_reqs=len(batch),
            num_actual_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=max(lens),
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_table_tensor=table,
            slot_mapping=torch.cat(slots),
            causal=True,
        )

    def _check(self, output: torch.Tensor, codes: torch.Tensor, number: int, metadata: Any) -> None:
        """Each token has attended to tokens of its own request, head and layer, and no others."""
        encoded = self.config.encoding is not None
        # 4 and 2 bits have so much between them, of values from -1 to 1.
        off = (0.34 if self.config.codec.startswith("k2v2") else 0.07) if encoded else 0.01
        shown = output.view(-1, HEADS, GROUP, HEAD_SIZE)
        said = torch.stack(
            torch.broadcast_tensors(
                codes[:, None, None],
                (torch.arange(HEADS) - 0.5)[None, :, None],
                torch.tensor(number / LAYERS),
            ),
            dim=-1,
        )
        worst = (shown[..., :3] - said).abs().amax((1, 2, 3))
        good = (worst <= off) & (output.abs().amax((1, 2)) <= 1 + off)
        if not good.all():
            token = int((~good).nonzero()[0])
            starts = metadata.query_start_loc
            row = int((starts <= token).sum()) - 1
            raise AssertionError(
                f"layer {number}, token {token}, request {self.runner.input_batch.req_ids[row]} "
                f"at {int(metadata.seq_lens[row])}: {shown[token, :, 0, :4].tolist()}, and not "
                f"{said[token, :, 0].tolist()}"
            )
