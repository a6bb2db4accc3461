"""A CPU worker that knows which store is that of its model."""

from typing import Any

from vllm_kvretrieval.engine.cpu.identity import hashing_weights, identity_of
from vllm_kvretrieval.engine.cpu.memory import PlanningWorker
from vllm_kvretrieval.engine.cpu.store import HomeStore
from vllm_kvretrieval.engine.store_steps import FIELD, StoreStep
from vllm_kvretrieval.errors import RetrievalConfigError


class StoringWorker(PlanningWorker):
    """vLLM's CPU worker; with ``kv_retrieval.store`` the weights stay those of the store."""

    def load_model(self, **options: Any) -> None:
        """See ``CPUWorker.load_model``; with a store, the weights are hashed meanwhile."""
        directory = self.retrieval_config.store
        if directory is None:
            super().load_model(**options)
            return
        with hashing_weights() as hashes:
            super().load_model(**options)
        if len(hashes) != 1:
            load_format = self.vllm_config.load_config.load_format
            raise RetrievalConfigError(
                f"kv_retrieval.store cannot tell which weights load_format={load_format} has "
                "loaded; use load_format=auto, or leave the store out."
            )
        layers = self.retrieving(self.layer_numbers)
        identity = identity_of(self.vllm_config, self.retrieval_config, layers, hashes[0])
        self.stored = HomeStore(directory, {**identity, "attention_own": self.attention.own})

    def execute_model(self, scheduler_output: Any) -> Any:
        """See ``Worker.execute_model``; before and after it, the store follows the step."""
        step: StoreStep | None = getattr(scheduler_output, FIELD, None)
        if self.stored is None or step is None:
            return super().execute_model(scheduler_output)
        self.stored.begin_step(step)
        output = super().execute_model(scheduler_output)
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
