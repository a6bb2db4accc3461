"""The worker's reports to vLLM, by a KV connector that moves no KV.

The interface carries facts for the scheduler (how many requests may run at once, which store there
is, blocks that could not be read) and metrics for the front end (vLLM's log line and Prometheus
endpoint).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_kvretrieval.engine.block_pools import Split
from vllm_kvretrieval.engine.metrics import COUNTERS, RetrievalMetrics, known, log_line
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.store.disk.ranks import name_of_all
from vllm_kvretrieval.store.serving.scheduler import SchedulerStore

ENGINES = "engines"
"""In the connector's configuration: how many engines of this server run on one machine. vLLM lets
engines of data parallelism forget it, but where they share experts."""


@dataclass
class Seats(KVConnectorHandshakeMetadata):
    """A worker's message to the scheduler before the first request: how many may run at once.

    Attributes:
        count: How many.
        store: Name of the store that holds the slow home, if one does.
        split: The division of vLLM's blocks, if not all groups of layers lie in a slow home.
    """

    count: int
    store: str | None = None
    split: Split | None = None


def connector_config(engines: int = 1) -> KVTransferConfig:
    """The configuration with which vLLM loads the connector and fails requests with lost pages.

    Args:
        engines: How many engines of this server run on one machine.
    """
    return KVTransferConfig(
        kv_connector_extra_config={ENGINES: engines},
        kv_connector=RetrievalConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_consumer",
        kv_load_failure_policy="fail",
    )


def _config(vllm_config: Any) -> RetrievalConfig:
    config = RetrievalConfig.from_vllm(vllm_config)
    assert config is not None, "the connector belongs to engines that retrieve"
    return config


class RetrievalConnector(KVConnectorBase_V1, SupportsHMA):
    """Both halves: the worker's, which reports, and the scheduler's, which passes on how many
    requests all workers have room for."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = _config(vllm_config)
        self._failed_blocks: Callable[[], set[int]] = set
        self._stats: Callable[[], dict[str, int]] = dict
        self._seats: Seats | None = None
        self._limit: Callable[[int], None] = lambda seats: None
        self._divide: Callable[[Split], None] = lambda split: None
        self._divided = False
        self._restore: Callable[[str], SchedulerStore] | None = None
        self._stored: SchedulerStore | None = None

    def report(
        self,
        seats: int,
        failed_blocks: Callable[[], set[int]],
        stats: Callable[[], dict[str, int]],
        store: str | None = None,
        split: Split | None = None,
    ) -> None:
        """Say how many requests may run at once, and ask the others after every step of the worker.

        Args:
            seats: Most requests that the worker has room for at once.
            failed_blocks: vLLM's blocks that could not be read, each told once.
            stats: What ``COUNTERS`` count since the last call, and ``GAUGES`` now; may be empty.
            store: Name of the store that holds the slow home, if one does.
            split: The division of vLLM's blocks, if not all groups of layers lie in a slow home.
        """
        self._seats = Seats(seats, store, split)
        self._failed_blocks, self._stats = failed_blocks, stats

    def limit_by(self, limit: Callable[[int], None]) -> None:
        """Call ``limit`` with the number of requests at once, when the scheduler's half has it."""
        self._limit = limit

    def divide_by(self, divide: Callable[[Split], None]) -> None:
        """Call ``divide`` with the division of blocks, when the scheduler's half has it."""
        self._divide = divide

    def restore_by(self, restore: Callable[[str], SchedulerStore]) -> None:
        """Call ``restore`` with the name of the store, when the scheduler's half has it."""
        self._restore = restore

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._seats

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the messages of the workers of all ranks, in the scheduler's half."""
        told = [message for message in metadata.values() if isinstance(message, Seats)]
        if not self._divided and told[0].split is not None:
            self._divided = True
            self._divide(told[0].split)
        self._limit(min(message.count for message in told))
        # vLLM 0.33 tells it once more whenever a server that slept wakes up.
        if self._stored is None and self._restore is not None and told[0].store is not None:
            self._stored = self._restore(name_of_all(told[0].store))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._failed_blocks()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counts = self._stats() if self._stored is None else self._stored.take_counts()
        return RetrievalStats(known(counts, self._config)) if counts else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded from elsewhere."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded from elsewhere."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved elsewhere."""

    def wait_for_save(self) -> None:
        """Nothing is saved elsewhere."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing comes from elsewhere; but a request may have to wait for a check of the store.

        vLLM asks again then, and looks up anew what the request shares.
        """
        waits = self._stored is not None and self._stored.waits(request)
        return (None if waits else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is loaded from elsewhere."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM may free the blocks at once."""
        if self._stored is not None:
            self._stored.finish(request, block_ids)
        return False, None

    def shutdown(self) -> None:
        """Close the store, in the scheduler's half."""
        if self._stored is not None:
            self._stored.close()
            self._stored = None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "RetrievalStats":
        return RetrievalStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "ConnectorMetrics":
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class RetrievalStats(KVConnectorStats):
    """Counters and gauges of some steps; ``data`` is empty, or has all counters of the engine."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Merge steps, or workers of a step: counters add up, the last value of a gauge counts."""
        if self.is_empty() or other.is_empty():
            return other if self.is_empty() else self
        both = {**self.data, **other.data}
        counted = [key for key in COUNTERS if key in both]
        summed = {key: self.data.get(key, 0) + other.data.get(key, 0) for key in counted}
        return RetrievalStats({**both, **summed})

    def reduce(self) -> dict[str, int | float]:
        """The values for vLLM's log line."""
        return log_line(self.data)

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """``vllm:kv_retrieval_*`` in vLLM's Prometheus endpoint, by what the connector brings."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        config = _config(vllm_config)
        self.metrics = RetrievalMetrics(config, metric_types, labelnames, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self.metrics.observe(transfer_stats_data, engine_idx)
