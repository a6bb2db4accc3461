"""The way of counts from workers to the front end where there is no connector of ours.

A worker attaches them to its output, the scheduler puts them into vLLM's statistics, and the
front end's logger takes them out.
"""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_kvretrieval import __version__, compat
from vllm_kvretrieval.engine.metrics import (
    FREE,
    OF_FRONT_END,
    PREFIX,
    RetrievalMetrics,
    counters,
    log_line,
    metric_name,
)
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.choices import HOMES
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.home_file import directory_for, free_space

logger = init_logger("vllm.kvretrieval.metrics")

FIELD = "kv_retrieval"
"""Attribute of a worker's output with what it has counted."""
CARRIER = "num_kv_fetch_reqs_by_stage"
"""A mapping of names to whole numbers in vLLM's statistics, of which it reads known names only."""
DISK_S = 10.0
"""Seconds from one look at the disk to the next."""


def in_use(vllm_config: Any, config: RetrievalConfig) -> dict[str, str]:
    """The labels of ``vllm:kv_retrieval_info``: what holds where the user has named nothing, too.

    Args:
        vllm_config: The configuration of the engine.
        config: The engine's options of retrieval.
    """
    from vllm.platforms import current_platform

    budget, prefill = config.page_budget(), config.prefill_budget
    allowed = config.client_options
    values = {
        "method": config.method,
        "also": ",".join(name for name in config.methods if name != config.method),
        "budget": config.budget,
        "max_budget": config.budget_limit,
        "allow_exact": config.allow_exact,
        "client_options": "all" if allowed is None else ",".join(allowed),
        "sink": budget.sink * config.page_size,
        "window": budget.window * config.page_size,
        "page_size": config.page_size,
        "dense_layers": config.dense_layers,
        "prefill_budget": "all" if prefill is None else prefill,
        "prefill_share": config.prefill_share or 0,
        "prefill_depth": config.prefill_depth or 1,
        "reuse": config.reuse,
        "home": config.home,
        "codec": config.codec,
        "store": config.store is not None,
        "attention": current_platform.attending_kernels(vllm_config, config),
        "version": __version__,
    }
    return {name: str(value) for name, value in values.items()}


def has_requests(output: Any) -> bool:
    """Whether a worker's output, or one on its way in vLLM's V2 runner, is of any requests."""
    return bool(getattr(getattr(output, "model_runner_output", output), "req_ids", None))


def attach(output: Any, counts: Mapping[str, int]) -> Any:
    """A worker's output with a step's counts; it may be one that has not arrived yet."""
    if isinstance(output, AsyncModelRunnerOutput):
        return _Arriving(output, counts)
    setattr(output, FIELD, dict(counts))
    return output


class _Arriving(AsyncModelRunnerOutput):
    """An output on its way from the device, and the counts that go with it."""

    def __init__(self, output: AsyncModelRunnerOutput, counts: Mapping[str, int]) -> None:
        self._output, self._counts = output, counts

    def get_output(self) -> Any:
        return attach(self._output.get_output(), self._counts)

    def get_kv_connector_output(self) -> Any:
        """What a KV connector says, if the output cannot be had; vLLM 0.33 asks for it."""
        return self._output.get_kv_connector_output()


def put(output: Any, stats: Any) -> None:
    """Put what is attached to a worker's output into vLLM's statistics of the step, if there are
    any."""
    counts = getattr(output, FIELD, None)
    if stats is not None and counts:
        getattr(stats, CARRIER).update({f"{PREFIX}{name}": n for name, n in counts.items()})


def take(stats: Any) -> dict[str, int]:
    """Take the counts out of vLLM's statistics; empty if there are none."""
    carried = getattr(stats, CARRIER)
    names = [name for name in carried if name.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): carried.pop(name) for name in names}


class RetrievalStatLogger(AggregateStatLoggerBase):
    """Shows in the front end what retrieval counts (``vllm.stat_logger_plugins``).

    vLLM makes it for every server; it does nothing for one without retrieval, nor under a vLLM
    under which retrieval stays off, whose configuration may be another.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        off = compat.version_refusal() is not None
        self._config = None if off else RetrievalConfig.from_vllm(vllm_config)
        self._vllm_config, self._engines = vllm_config, engine_indexes
        self._metrics: RetrievalMetrics | None = None
        self._since: dict[str, int] = {}
        self._free: list[Gauge] = []
        self._looked = float("-inf")

    def log_engine_initialized(self) -> None:
        """Register the metrics; before, vLLM's own logger would remove them."""
        if self._config is None:
            return
        name = self._vllm_config.model_config.served_model_name
        labels: dict[int, list[object]] = {i: [name, str(i)] for i in self._engines}
        names = ["model_name", "engine"]
        options = in_use(self._vllm_config, self._config)
        info = Gauge(
            f"{PREFIX}info",
            "KV retrieval: options of the engine, as they are in use.",
            [*names, *options],
            multiprocess_mode="mostrecent",
        )
        for values in labels.values():
            info.labels(*values, *options.values()).set(1)
        if not self._by_connector:
            kinds = {Counter: Counter, Gauge: Gauge}
            self._metrics = RetrievalMetrics(self._config, kinds, names, labels)
        if HOMES[self._config.home].on_disk or self._config.store is not None:
            about = f"KV retrieval: {OF_FRONT_END[FREE]}."
            disk = Gauge(metric_name(FREE), about, names, multiprocess_mode="mostrecent")
            self._free = [disk.labels(*values) for values in labels.values()]
            self._look_at_disk()

    @property
    def _by_connector(self) -> bool:
        """Whether our connector brings the counts, and vLLM shows them."""
        from vllm_kvretrieval.engine.connector import RetrievalConnector

        transfer = self._vllm_config.kv_transfer_config
        return transfer is not None and transfer.kv_connector == RetrievalConnector.__name__

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """See ``StatLoggerBase.record``; other loggers do not see what is ours."""
        self._look_at_disk()
        if scheduler_stats is None or self._metrics is None or self._config is None:
            return
        if counts := take(scheduler_stats):
            self._metrics.observe(counts, engine_idx)
            for name in counters(self._config):
                self._since[name] = self._since.get(name, 0) + counts.get(name, 0)

    def log(self) -> None:
        """Say what steps have attended to since the last line, if there were any."""
        self._look_at_disk()
        if self._since.get("units_attended") and logger.isEnabledFor(logging.INFO):
            said = ", ".join(f"{key}={value}" for key, value in log_line(self._since).items())
            logger.info("KV retrieval metrics: %s", said)
        self._since = {}

    def _look_at_disk(self) -> None:
        """Measure what is free on the disk of the home, or of the store, now and then."""
        now = time.monotonic()
        if not self._free or self._config is None or now - self._looked < DISK_S:
            return
        self._looked = now
        with contextlib.suppress(RetrievalConfigError):  # the directory is gone
            free = free_space(directory_for(self._config.home_directory))
            for gauge in self._free:
                gauge.set(free)
