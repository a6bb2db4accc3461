"""The reports of a slow home, and their way through vLLM's metrics."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_kvretrieval.engine.connector import RetrievalConnector, RetrievalStats, connector_config
from vllm_kvretrieval.engine.metrics import COUNTERS, GAUGES, gauge, metric_name

STEP = dict.fromkeys(COUNTERS, 0) | {
    "units_attended": 100,
    "units_in_context": 400,
    "tokens_read": 3200,
    "heads_decoded": 10,
    "prompt_pairs": 70,
    "prompt_pairs_skipped": 30,
    "planning_us": 1500000,
    "waiting_us": 500,
    "units_looked_up": 120,
    "units_missed": 12,
    "bytes_recalled": 3 << 20,
    "heads_corrected": 4,
    "store_blocks_written": 5,
    "store_blocks_found": 2,
    "slots_used/0": 50,
    "slots/0": 80,
}


def engine_of(method):
    """The configuration of an engine with our connector."""
    backend = AttentionBackendEnum[method.upper()]
    return SimpleNamespace(
        kv_transfer_config=connector_config(),
        attention_config=SimpleNamespace(backend=backend, backend_per_kind={}),
        additional_config={},
    )


OTHER_WORKER = {key.replace("/0", "/1"): value for key, value in STEP.items()}


def test_stats_add_up():
    nothing = RetrievalConnector.build_kv_connector_stats({})
    once = RetrievalConnector.build_kv_connector_stats(STEP)
    assert nothing.is_empty()
    assert nothing.aggregate(nothing).is_empty()
    assert nothing.aggregate(once).data == once.aggregate(nothing).data == STEP
    twice = once.aggregate(RetrievalStats(STEP | {"slots_used/0": 60, "units_missed": 0}))
    assert twice.data == dict.fromkeys(COUNTERS, 0) | {
        "units_attended": 200,
        "units_in_context": 800,
        "tokens_read": 6400,
        "heads_decoded": 20,
        "prompt_pairs": 140,
        "prompt_pairs_skipped": 60,
        "planning_us": 3000000,
        "waiting_us": 1000,
        "units_looked_up": 240,
        "units_missed": 12,
        "bytes_recalled": 6 << 20,
        "heads_corrected": 8,
        "store_blocks_written": 10,
        "store_blocks_found": 4,
        "slots_used/0": 60,
        "slots/0": 80,
    }
    assert twice.reduce() == {
        "units attended": 200,
        "heads corrected": 8,
        "share of the cache read": 0.25,
        "recall hit rate": 0.95,
        "MiB recalled": 6.0,
        "slots used": 60,
        "slots": 80,
    }
    both = twice.aggregate(RetrievalStats(OTHER_WORKER))
    assert both.reduce() == {
        "units attended": 300,
        "heads corrected": 12,
        "share of the cache read": 0.25,
        "recall hit rate": round(1 - 24 / 360, 4),
        "MiB recalled": 9.0,
        "slots used": 110,
        "slots": 160,
    }, "of two workers"
    in_memory = RetrievalStats(STEP | {"slots/0": 0})
    assert in_memory.reduce() == {
        "units attended": 100,
        "heads corrected": 4,
        "share of the cache read": 0.25,
    }
    without = {key: value for key, value in STEP.items() if not key.startswith("store_")}
    assert once.aggregate(RetrievalStats(without)).data["store_blocks_written"] == 5
    twice.reset()
    assert twice.is_empty()


def test_prometheus():
    unregister_vllm_metrics()  # another engine's, in this process
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    config = engine_of("freekv")
    metrics = RetrievalConnector.build_prom_metrics(config, kinds, ["model", "engine"], labels)
    for _ in range(2):
        metrics.observe(STEP | OTHER_WORKER, 1)
    metrics.observe({"tokens_read": -1}, 1)  # which Prometheus would refuse, and the front end end

    def value(name, engine):
        return REGISTRY.get_sample_value(
            f"{metric_name(name)}{'_total' * (name in COUNTERS)}", {"model": "m", "engine": engine}
        )

    for name in COUNTERS:
        scale = 1e-6 if name.endswith("_us") else 1
        assert value(name, "1") == pytest.approx(2 * STEP[name] * scale)
        assert value(name, "0") == 0
    for name in GAUGES:
        assert value(name, "1") == 2 * STEP[f"{name}/0"]
        assert metrics.metrics._metrics[name][1]._multiprocess_mode == "mostrecent"


def test_only_methods_that_speculate_correct():
    """With others every head selects anew at each step, which looks like an alarm and is none."""
    unregister_vllm_metrics()
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    labels: dict[int, list[object]] = {0: ["m", "0"]}
    for method, corrects in (("quest", False), ("freekv", True)):
        config = engine_of(method)
        worker: Any = RetrievalConnector(config, KVConnectorRole.WORKER, None)
        worker.report(1, set, lambda: STEP)
        stats = worker.get_kv_connector_stats()
        assert stats.data["heads_decoded"] == 10
        assert ("heads corrected" in stats.aggregate(stats).reduce()) == corrects
        RetrievalConnector.build_prom_metrics(config, kinds, ["model", "engine"], labels)
        names = {metric.name for metric in REGISTRY.collect()}
        assert ("vllm:kv_retrieval_heads_corrected" in names) == corrects
        assert "vllm:kv_retrieval_heads_decoded" in names
        unregister_vllm_metrics()


def test_the_scheduler_counts_what_it_sees_of_a_store():
    """Its counters join those of the workers, and its silence about slots changes no gauge."""
    config = engine_of("freekv")
    worker: Any = RetrievalConnector(config, KVConnectorRole.WORKER, None)
    worker.report(1, set, lambda: {"store_blocks_written": 5, "slots/0": 80}, "kv-01")
    scheduler: Any = RetrievalConnector(config, KVConnectorRole.SCHEDULER, None)
    counts = [{"store_tokens_hit": 256}, {}]
    stored = SimpleNamespace(take_counts=lambda: counts.pop(0))
    stores = {"kv-01": stored}
    scheduler.restore_by(stores.pop)
    for _ in range(2):  # vLLM 0.33 tells it again when a server wakes up
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
    seen = scheduler.get_kv_connector_stats()
    together = worker.get_kv_connector_stats().aggregate(seen).data
    assert together["store_blocks_written"] == 5
    assert together["store_tokens_hit"] == 256
    assert gauge(together, "slots") == 80
    assert not [key for key in seen.data if key.startswith("slots")]
    assert scheduler.get_kv_connector_stats() is None


def test_the_scheduler_learns_the_least_of_all_workers():
    """Workers of all ranks report by vLLM's handshake metadata, also from other processes."""
    config = engine_of("freekv")
    told = {}
    for number, seats in enumerate((7, 3, 5)):
        worker = RetrievalConnector(config, KVConnectorRole.WORKER, None)
        assert worker.get_handshake_metadata() is None
        worker.report(seats, set, dict)
        told[divmod(number, 2)] = pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
    scheduler = RetrievalConnector(config, KVConnectorRole.SCHEDULER, None)
    limits: list[int] = []
    scheduler.limit_by(limits.append)
    scheduler.set_xfer_handshake_metadata_pp_aware(told)
    assert limits == [3]
