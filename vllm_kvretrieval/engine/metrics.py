"""What workers count for vLLM's Prometheus endpoint and log, and its names there."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_kvretrieval.options.engine import RetrievalConfig

PREFIX = "vllm:kv_retrieval_"
COUNTERS = {
    "units_attended": "(page, KV head) units, sink and window included, that decode steps attended "
    "to where they attended to a part of the context",
    "units_in_context": "(page, KV head) units of the contexts of these steps",
    "tokens_read": "tokens of KV heads whose keys and values these steps read",
    "heads_decoded": "KV heads of these steps",
    "heads_corrected": "KV heads that selected pages anew before attention",
    "units_looked_up": "(page, KV head) units, or tokens of KV heads where methods select these, "
    "that were looked up in recall caches: those attended to, and the whole contexts of requests "
    "within their budgets in the same steps",
    "units_missed": "those looked up that had to be read from home in the step that needed them",
    "bytes_recalled": "bytes read from home into recall caches, ahead or not",
    "prompt_pairs": "pairs of tokens that exact prefill attends to, where layers prefill sparsely",
    "prompt_pairs_skipped": "those of these pairs that were not attended to",
    "planning_us": "seconds for which workers chose the pages or tokens of decode steps",
    "waiting_us": "seconds for which workers waited until the chosen pages were in memory",
    "store_blocks_written": "blocks written to the store",
    "store_bytes_written": "bytes of these",
    "store_blocks_found": "blocks of an earlier run that a request has shared for the first time",
    "store_tokens_restored": "tokens of earlier runs that were in the prefix cache at the start",
    "store_tokens_hit": "tokens that requests have found in blocks of earlier runs; "
    "vllm:prefix_cache_hits has those of this run, too",
    "store_bytes_checked": "bytes of blocks of earlier runs that were compared with their sums",
    "store_blocks_read_ahead": "blocks of an earlier run that were read for a session before it "
    "asked",
    "store_blocks_evicted": "stored blocks that had to make room",
    "store_blocks_expired": "stored blocks that have become older than store_days",
    "store_blocks_damaged": "blocks of earlier runs whose bytes were not those of their sums",
}
"""Summed over layers and workers; what a worker does not report is 0."""
OF_SPECULATION = ("heads_corrected",)
"""Those that only engines have of whose methods one speculates. Others select anew at each step."""
GAUGES = {
    "slots_used": "slots of all recall caches that hold a unit, or a token of a KV head",
    "slots": "slots of all recall caches",
}
"""Summed over layers and workers; on their way they are named after the worker, ``slots/0``."""
FREE = "home_free_bytes"
OF_FRONT_END = {
    FREE: "bytes that are free on the disk of the home, or of the store, where the front end runs",
}
"""Gauges that no worker reports."""
MICROSECONDS = "_us"
"""How names of durations end on their way; Prometheus has them in seconds."""


def metric_name(name: str) -> str:
    """The name of a counter or gauge in Prometheus, without the ``_total`` of counters."""
    duration = name.endswith(MICROSECONDS)
    return PREFIX + (name.removesuffix(MICROSECONDS) + "_seconds" if duration else name)


def counters(config: RetrievalConfig) -> dict[str, str]:
    """The ``COUNTERS`` of an engine."""
    if any(method.speculates for method in config.methods.values()):
        return COUNTERS
    return {name: text for name, text in COUNTERS.items() if name not in OF_SPECULATION}


def known(counts: Mapping[str, int], config: RetrievalConfig) -> dict[str, int]:
    """What a worker has counted, with all :func:`counters` of the engine and no others."""
    own = counters(config)
    gauges = {name: count for name, count in counts.items() if name not in COUNTERS}
    return {name: counts.get(name, 0) for name in own} | gauges


def gauge(data: Mapping[str, int], name: str) -> int:
    """One of ``GAUGES`` of all workers."""
    return sum(value for key, value in data.items() if key.partition("/")[0] == name)


def log_line(data: Mapping[str, int]) -> dict[str, int | float]:
    """What vLLM's log line says of some steps.

    Args:
        data: Sums of the engine's :func:`counters`, and ``GAUGES`` by worker.
    """
    reduced: dict[str, int | float] = {"units attended": data["units_attended"]}
    if "heads_corrected" in data:
        reduced["heads corrected"] = data["heads_corrected"]
    if whole := data.get("units_in_context"):
        reduced["share of the cache read"] = round(data["units_attended"] / whole, 4)
    if slots := gauge(data, "slots"):
        looked_up = max(data["units_looked_up"], 1)
        reduced |= {
            "recall hit rate": round(1 - data["units_missed"] / looked_up, 4),
            "MiB recalled": round(data["bytes_recalled"] / (1 << 20), 1),
            "slots used": gauge(data, "slots_used"),
            "slots": slots,
        }
    return reduced


class RetrievalMetrics:
    """``vllm:kv_retrieval_*`` in vLLM's Prometheus endpoint.

    Args:
        config: Options of the engines.
        metric_types: Classes to make in place of those of ``prometheus_client``.
        labelnames: Names of vLLM's labels.
        per_engine_labelvalues: The values of the labels, by the index of the engine.
    """

    def __init__(
        self,
        config: RetrievalConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        # Several front-end processes may each have a value: the latest one is right.
        gauges = {"multiprocess_mode": "mostrecent"}
        self._counters = counters(config)
        self._metrics = {
            name: create_metric_per_engine(
                metric_types[kind](
                    name=metric_name(name),
                    documentation=f"KV retrieval: {text}.",
                    labelnames=labelnames,
                    **options,
                ),
                per_engine_labelvalues,
            )
            for kind, metrics, options in ((Counter, self._counters, {}), (Gauge, GAUGES, gauges))
            for name, text in metrics.items()
        }

    def observe(self, data: Mapping[str, int], engine: int = 0) -> None:
        """Add what some steps have counted.

        Args:
            data: See ``COUNTERS`` and ``GAUGES``.
            engine: Index of the engine.
        """
        for name in self._counters:
            scale = 1e-6 if name.endswith(MICROSECONDS) else 1
            # A counter that goes back ends the front end.
            self._metrics[name][engine].inc(max(data.get(name, 0), 0) * scale)
        for name in {key.partition("/")[0] for key in data}.intersection(GAUGES):
            self._metrics[name][engine].set(gauge(data, name))
