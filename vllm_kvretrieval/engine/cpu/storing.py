"""A CPU worker that knows which store is that of its model."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvretrieval.compat import bound_warm_up
from vllm_kvretrieval.engine.cpu.memory import PlanningWorker
from vllm_kvretrieval.engine.memory import least_of_workers
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.storage import Storage
from vllm_kvretrieval.storage.file import FileStorage
from vllm_kvretrieval.storage.lost import LostLoads
from vllm_kvretrieval.store.disk.store import Geometry, WorkerShare
from vllm_kvretrieval.store.serving.halves import FIELD, StoreStep
from vllm_kvretrieval.store.serving.identity import hashing_weights, identity_of
from vllm_kvretrieval.store.serving.worker import WorkerStore


class StoringWorker(PlanningWorker):
    """vLLM's CPU worker; with ``kv_retrieval.store`` the weights stay those of the store."""

    _computed: StoreStep | None = None  # a step whose tokens have yet to be sampled

    def load_model(self, **options: Any) -> None:
        """See ``CPUWorker.load_model``; with a store, the weights are hashed meanwhile."""
        directory = self.retrieval_config.store
        if directory is None:
            super().load_model(**options)
            return
        with hashing_weights() as hashes:
            super().load_model(**options)
        specs = self.get_kv_cache_spec().values()
        if any(type(spec) is not FullAttentionSpec for spec in specs):
            raise RetrievalConfigError(
                f"kv_retrieval.store={directory!r} keeps blocks of full attention, and this model "
                "has layers of other kinds; leave the store out."
            )
        if len(hashes) != 1:
            load_format = self.vllm_config.load_config.load_format
            raise RetrievalConfigError(
                f"kv_retrieval.store cannot tell which weights load_format={load_format} has "
                "loaded; use load_format=auto, or leave the store out."
            )
        layers = self.retrieving(self.layer_numbers)
        weights = [""] * self.parallel_config.tensor_parallel_size
        torch.distributed.all_gather_object(weights, hashes[0], get_tp_group().cpu_group)
        identity = identity_of(self.vllm_config, self.retrieval_config, layers, weights)
        self.stored = WorkerStore(
            directory,
            {**identity, "attention_own": self.attention.own},
            WorkerShare(self.rank, len(weights)),
        )

    def attach_store(
        self, parts: Sequence[torch.Tensor], storage: Storage
    ) -> Callable[[], set[int]]:
        """Say what the store has to keep beside a slow home, or without one.

        Args:
            parts: What memory has of each block, uint8 [blocks, bytes of a block] each.
            storage: Where the KV of retrieval layers is.

        Returns:
            Takes the blocks that were lost since the last call.
        """
        stored = self.stored
        if stored is None:
            return storage.take_lost
        if isinstance(storage, FileStorage):
            pages = storage.facts.pages_per_block
            stored.attach(parts, storage.lost, storage.encoded_pages, pages)
            return storage.take_lost
        size = sum(part.shape[1] for part in parts)
        stored.make(Geometry(len(parts[0]), 0, 0, size))
        stored.attach(parts, lost := LostLoads())
        return lost.take

    def compile_or_warm_up_model(self) -> Any:
        """See ``CPUWorker.compile_or_warm_up_model``; it writes to nothing that a store keeps."""
        seats = least_of_workers(self.seats)
        bound_warm_up(self.model_runner, seats, writes=self.stored is None)
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        """See ``Worker.execute_model``; before and after it, the store follows the step."""
        step: StoreStep | None = getattr(scheduler_output, FIELD, None)
        if self.stored is None or step is None:
            return super().execute_model(scheduler_output)
        self.stored.begin_step(step)
        output = super().execute_model(scheduler_output)
        if output is None:
            self._computed = step
        else:
            self.stored.end_step(step)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """See ``Worker.sample_tokens``; by then vLLM has asked what the step has lost."""
        output = super().sample_tokens(grammar_output)
        step, self._computed = self._computed, None
        if self.stored is not None and step is not None:
            self.stored.end_step(step)
        return output

    def shutdown(self) -> None:
        """See ``Worker.shutdown``; before, the store gets what it has yet to get."""
        if self.stored is not None:
            self.stored.close()
        super().shutdown()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """See ``Worker.reload_weights``; refused with a store."""
        self._check_weights_stay()
        super().reload_weights(*args, **kwargs)

    def reset_weights(self) -> None:
        """See ``Worker.reset_weights``; refused with a store."""
        self._check_weights_stay()
        super().reset_weights()

    def update_weights(self, update_info: Any) -> None:
        """See ``Worker.update_weights``; refused with a store."""
        self._check_weights_stay()
        super().update_weights(update_info)

    def _check_weights_stay(self) -> None:
        if self.stored is not None:
            raise RetrievalConfigError(
                "kv_retrieval.store holds keys and values of the weights that the server has "
                "started with, which therefore cannot change. Start it anew with the others, or "
                "without a store."
            )
