"""vLLM's V2 model runner with retrieval."""

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_kvretrieval.attention.cuda.refusals import fills_at_start
from vllm_kvretrieval.attention.cuda.side import SideStream, SideWork
from vllm_kvretrieval.attention.cuda.workspace import Workspace
from vllm_kvretrieval.attention.refusals import WITHOUT, has_foreign_connector
from vllm_kvretrieval.compat import one_block
from vllm_kvretrieval.engine.cuda.graphs import RetrievalGraphs, limit_graphs
from vllm_kvretrieval.engine.cuda.heads import RetrievalHeads
from vllm_kvretrieval.engine.cuda.host import limit_seats, move_home
from vllm_kvretrieval.engine.cuda.layers import (
    RetrievalLayers,
    groups_that_retrieve,
    retrieving,
    roles_of_layers,
)
from vllm_kvretrieval.engine.cuda.requests import Attended, Batch, RunningRequests
from vllm_kvretrieval.engine.cuda.tiers import HostTiers
from vllm_kvretrieval.engine.loads import FIELD, LoadedPages
from vllm_kvretrieval.engine.memory import least_of_workers
from vllm_kvretrieval.engine.running import notes
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import triton
from vllm_kvretrieval.kernels.triton.mapped import map_host
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.needs import PARTIAL_MODELS
from vllm_kvretrieval.retrieval.roles import Filters, Role

MODEL_STATES = (DefaultModelState, MambaHybridModelState)
"""vLLM's descriptions of steps that are served: of decoders, also with state-space layers."""


def check_model_state(state: type, config: RetrievalConfig, model: str) -> None:
    """Refuse a model that describes its steps to vLLM's runner in its own way.

    Its rows may, for example, attend in both directions, or not be those that the runner has
    numbered, and nothing in a step shows it.

    Args:
        state: The class of the runner's ``model_state``.
        config: Options of the engine.
        model: The model's name.

    Raises:
        RetrievalConfigError: The model has such a class; names it.
    """
    if state not in MODEL_STATES:
        known = " or ".join(known.__name__ for known in MODEL_STATES)
        raise RetrievalConfigError(
            f"{config.method} does not support {model} on a GPU: its steps are described by "
            f"{state.__name__}, not by vLLM's {known}. {WITHOUT}"
        )


class RetrievalModelRunner(GPUModelRunner):
    """vLLM's V2 model runner, which also owns retrieval's state beside the KV cache.

    vLLM makes a KV cache twice: a small one on the device, over which it captures CUDA graphs to
    measure their memory, and the real one. Retrieval's state lives as long as the cache that it was
    made for.

    Attributes:
        ops: Implementation of the ops.
        graphs: What takes the place of vLLM's ``ModelCudaGraphManager``.
        tiers: Sizes, if the retrieval layers' cache is in host memory; the worker sets them, and
            before the first cache those that it expects.
        retrieval_layers: The state; None as long as there is no KV cache.
    """

    ops: ClassVar[Any] = triton
    graphs: ClassVar[type[RetrievalGraphs]] = RetrievalGraphs
    cudagraph_manager: Any
    tiers: HostTiers | None = None
    retrieval_layers: RetrievalLayers | None = None

    @staticmethod
    def map_home(nbytes: int, device: torch.device) -> torch.Tensor:
        """uint8 [nbytes] of host memory, as the device sees it."""
        return map_host(nbytes, device)[1]

    @staticmethod
    def make_side(device: torch.device) -> SideWork:
        """The runner of work beside the model."""
        return SideStream(device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """See ``GPUModelRunner.load_model``."""
        super().load_model(*args, **kwargs)
        check_model_state(
            type(self.model_state), self.retrieval_config, self.vllm_config.model_config.model
        )

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, **options: Any
    ) -> None:
        """See ``GPUModelRunner.initialize_kv_cache``."""
        self._drop_retrieval()
        tiers, allocated, encoded = self.tiers, kv_cache_config, dict[str, torch.Tensor]()
        moves = tiers is not None and not is_profiling
        if moves:  # vLLM has no say in where a cache lies
            allocated = one_block(self.vllm_config, kv_cache_config)
        super().initialize_kv_cache(allocated, is_profiling, **options)
        if moves:
            assert tiers is not None
            (group,) = kv_cache_config.kv_cache_groups
            at_home = self.retrieving(group.layer_names)
            home = move_home(self, kv_cache_config, at_home, tiers.home, self.map_home)
            if self.retrieval_config.encoding is not None:
                encoded = dict(zip(at_home, home, strict=True))
        seats = least_of_workers(self.max_num_reqs if tiers is None else tiers.seats)
        limit_graphs(self.cudagraph_manager, seats)
        if not is_profiling:
            limit_seats(self, seats)
        self._attach_retrieval(tiers, encoded, is_profiling)
        if has_foreign_connector(self.vllm_config) and not is_profiling:
            if fills_at_start(self.vllm_config):
                self._index_filled(kv_cache_config)
            else:
                self.running.loaded = LoadedPages(kv_cache_config.num_blocks)

    def profile_cudagraph_memory(self) -> int:
        """See ``GPUModelRunner.profile_cudagraph_memory``."""
        try:
            return super().profile_cudagraph_memory()
        finally:
            self._drop_retrieval()
            torch.accelerator.empty_cache()

    def compile_retrieval(self) -> None:
        """Compile all kernels that serving may launch, by steps without requests.

        The number of rows decides which variants of the kernels a step needs. Graphs are captured
        for some numbers of rows, if at all; eager steps may have any number.
        """
        most = self.max_num_reqs
        self.running.assumed = Attended.BOTH
        try:
            for rows in Workspace.rows_that_differ(most):
                self._dummy_run(rows, skip_eplb=True)
            if self.running.loaded is not None:
                self.running.loaded_pages = np.zeros(1, dtype=np.int32)  # nobody's
            # With more tokens than rows and their drafts, some rows read prompts.
            several = most * self.decode_query_len + 1
            self._dummy_run(min(several, self.max_num_tokens), skip_eplb=True)
        finally:
            self.running.assumed = None
            self.running.end_step()

    def add_requests(self, scheduler_output: Any) -> None:
        """See ``GPUModelRunner.add_requests``."""
        if self.running.encoded and scheduler_output.kv_cache_block_copies:
            raise RuntimeError("vLLM copies blocks of a KV cache that is encoded elsewhere")
        new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
        if len(new - self.req_states.req_id_to_index.keys()) > len(self.req_states.free_indices):
            raise RuntimeError(
                "the scheduler runs more requests at once than the "
                f"{self.scheduler_config.max_num_seqs} that there is room for"
            )
        super().add_requests(scheduler_output)
        groups = (group for new in scheduler_output.scheduled_new_reqs for group in new.block_ids)
        self.running.bring(itertools.chain.from_iterable(groups))
        for req_id, note in notes(scheduler_output, {}).items():
            self.running.admit(req_id, self.req_states.req_id_to_index[req_id], note)
        self.running.apply()

    def _remove_request(self, req_id: str) -> bool:
        self.running.leave(req_id)
        return super()._remove_request(req_id)

    def finish_requests(self, scheduler_output: Any) -> None:
        """See ``GPUModelRunner.finish_requests``."""
        super().finish_requests(scheduler_output)
        self.running.finish(scheduler_output.finished_req_ids)

    def gather_batch_req_state(self, *args: Any, **kwargs: Any) -> tuple[Any, int | None]:
        """See ``GPUModelRunner.gather_batch_req_state``; steps that no graph does are not
        uniform."""
        state, uniform = super().gather_batch_req_state(*args, **kwargs)
        rows = (state.idx_mapping_np, state.is_prefilling_np) if state is not None else None
        return state, None if rows and self.running.reads_whole(*rows) else uniform

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """See ``GPUModelRunner.prepare_inputs``; of steps of requests only."""
        batch = super().prepare_inputs(*args, **kwargs)
        self.running.begin_step(Batch.of(batch))
        return batch

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """See ``GPUModelRunner.execute_model``; dummy runs among others, which have no requests."""
        if self.retrieval_layers is not None:
            self.running.note_loads(getattr(scheduler_output, FIELD, ()))
        try:
            return super().execute_model(scheduler_output, *args, **kwargs)
        finally:
            if self.retrieval_layers is not None:
                self.running.end_step()

    @property
    def retrieval_config(self) -> RetrievalConfig:
        """Options of the engine."""
        config = RetrievalConfig.from_vllm(self.vllm_config)
        assert config is not None, "this runner is chosen for retrieval backends only"
        return config

    @functools.cached_property
    def roles(self) -> dict[str, Role]:
        """The roles of the layers by name, once the model is loaded; empty if all do alike."""
        return roles_of_layers(self.vllm_config, self.retrieval_config, self.get_kv_cache_spec())

    @functools.cached_property
    def heads(self) -> RetrievalHeads:
        """The KV heads of the layers that retrieve."""
        specs, rank = self.get_kv_cache_spec(), self.vllm_config.parallel_config.rank
        names = self.retrieving(specs)
        return RetrievalHeads(self.vllm_config, self.retrieval_config, specs, names, rank)

    def retrieving(self, names: Iterable[str]) -> list[str]:
        """The layers that attend to parts of long contexts."""
        return retrieving(self.retrieval_config, self.roles, names)

    def _attach_retrieval(
        self, tiers: HostTiers | None, encoded: Mapping[str, torch.Tensor], is_profiling: bool
    ) -> None:
        """Let the layers retrieve, over the KV cache that has just been allocated.

        Args:
            tiers: Sizes, if the cache of these layers is in host memory.
            encoded: The memory of layers there by name, if their pages are encoded.
            is_profiling: See ``GPUModelRunner.initialize_kv_cache``.
        """
        config = self.retrieval_config
        layers = self.compilation_config.static_forward_context
        attn_groups = itertools.chain.from_iterable(self.attn_groups)
        groups = groups_that_retrieve(config, self.roles, attn_groups)
        retrieving = {name: layers[name] for _, names in groups for name in names}
        if retrieving.keys() != self.heads.places.keys():
            model = self.vllm_config.model_config.model
            PARTIAL_MODELS.check(config.methods.values(), where=f" in {model}")
        token = max((layer.kv_cache[0, :, 0].nbytes for layer in retrieving.values()), default=1)
        far = tiers is not None
        self.running = RunningRequests(
            config,
            self.max_num_reqs,
            self.heads,
            token,
            self.device,
            far=far,
            drafts=self.num_speculative_steps,
        )
        kept = RetrievalLayers(self.ops, config, self.running, self.max_model_len, self.device)
        side = self.make_side(self.device)
        filters = [name for name, role in self.roles.items() if isinstance(role, Filters)]
        kept.attach(
            groups, layers, side, tiers, encoded, filters=filters, is_profiling=is_profiling
        )
        graphs = self.graphs.of(self.cudagraph_manager, self.running)
        whole = all(method.whole for method in config.methods.values())
        if kept.impls and not whole and not self.running.encoded:
            graphs.add_halves()
        self.cudagraph_manager = graphs
        # vLLM copies blocks on write in all of these; a block's entries come in a row.
        self.kv_caches += [store.records for store in kept.indexes]
        self.retrieval_layers = kept

    def _drop_retrieval(self) -> None:
        if self.retrieval_layers is not None:
            self.retrieval_layers.detach()
            self.retrieval_layers = None

    def _index_filled(self, kv_cache_config: Any) -> None:
        """Index the keys that vLLM's benchmark connector has written to the cache."""
        if kv_cache_config.needs_kv_cache_zeroing:
            raise RetrievalConfigError(
                "DecodeBenchConnector fills blocks of this model one by one, as they are used, and "
                "retrieval would not know; leave --kv-transfer-config out."
            )
        assert self.retrieval_layers is not None
        self.retrieval_layers.index_everything()
