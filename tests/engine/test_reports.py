"""The way of counts to the front end without a connector; ``test_serving`` goes all of it."""

import logging
import pickle
import shutil
import time
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from tests.support.engine import checkpoint
from vllm_kvretrieval.engine.metrics import FREE, metric_name
from vllm_kvretrieval.engine.reports import (
    DISK_S,
    RetrievalStatLogger,
    attach,
    in_use,
    put,
    take,
)
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.presets import preset_names

COUNTS = {"units_attended": 7, "heads_corrected": 1, "planning_us": 3}


def output():
    return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})


class Arriving(AsyncModelRunnerOutput):
    """An output of a device that works by itself."""

    def get_output(self):
        return output()


def test_from_worker_to_front_end():
    for told in (attach(output(), COUNTS), attach(Arriving(), COUNTS).get_output()):
        arrived = pickle.loads(pickle.dumps(told))
        stats = SchedulerStats(num_kv_fetch_reqs_by_stage={"waiting": 2})
        put(arrived, stats)
        assert take(stats) == COUNTS
        assert stats.num_kv_fetch_reqs_by_stage == {"waiting": 2}, "what is vLLM's stays"
        assert take(stats) == {}


def test_nothing_to_tell():
    for told in (None, output()):
        stats = SchedulerStats()
        put(told, stats)
        assert take(stats) == {}
    put(attach(output(), COUNTS), None)  # the server keeps no statistics


def test_a_server_without_retrieval():
    attention = SimpleNamespace(backend=None, backend_per_kind={})
    config = SimpleNamespace(attention_config=attention, additional_config={})
    logger = RetrievalStatLogger(config, [0])
    logger.log_engine_initialized()
    logger.record(SchedulerStats(), None)
    logger.log()


def test_under_a_vllm_of_which_nothing_is_known(monkeypatch):
    monkeypatch.setattr("vllm.version.__version__", "0.1.7")
    logger = RetrievalStatLogger(SimpleNamespace(), [0])
    logger.log_engine_initialized()
    logger.record(SchedulerStats(), None)
    logger.log()


@pytest.mark.model
def test_through_the_loggers_of_a_server(caplog, monkeypatch):
    """vLLM's own loggers beside ours, which takes out what they do not know."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm")
    model = checkpoint("SmolLM2-135M-Instruct")
    config = EngineArgs(
        model=model,
        served_model_name="m",
        attention_backend="freekv",
        additional_config={"kv_retrieval": {"budget": 512}},
    ).create_engine_config()
    loggers = StatLoggerManager(config, [0], custom_stat_loggers=[RetrievalStatLogger])
    loggers.log_engine_initialized()
    for _ in range(2):
        stats = SchedulerStats()
        put(attach(output(), COUNTS), stats)
        loggers.record(stats, None, engine_idx=0)
    labels = {"model_name": "m", "engine": "0"}

    def value(name):
        return REGISTRY.get_sample_value(f"vllm:kv_retrieval_{name}", labels)

    assert value("units_attended_total") == 14
    assert value("planning_seconds_total") == pytest.approx(6e-6)
    info = [m for m in REGISTRY.collect() if m.name == "vllm:kv_retrieval_info"]
    assert info[0].samples[0].labels.items() >= {"method": "freekv", "budget": "512"}.items()
    assert REGISTRY.get_sample_value(metric_name(FREE), labels) is None, "home=device"
    loggers.log()
    assert "KV retrieval metrics: units attended=14" in caplog.text
    assert "KV fetch" not in caplog.text
    unregister_vllm_metrics()


@pytest.mark.model
def test_what_is_in_use(tmp_path, monkeypatch):
    """No label is ``None``, whatever the method leaves open; and how full the disk is, is told."""
    options = {"home": "disk", "home_path": str(tmp_path)}
    vllm_config = EngineArgs(
        model=checkpoint("SmolLM2-135M-Instruct"),
        served_model_name="m",
        attention_backend="freekv",
        additional_config={"kv_retrieval": options},
    ).create_engine_config()
    for name in preset_names():
        used = in_use(vllm_config, RetrievalConfig.from_options(name, {}))
        assert used["max_budget"] == used["budget"] == "2048"
        assert used["attention"] in ("own", "vllm")
        assert (used["prefill_budget"], used["prefill_depth"]) == ("all", "1")
        assert "None" not in used.values()
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    unregister_vllm_metrics()
    logger = RetrievalStatLogger(vllm_config, [0])
    logger.log_engine_initialized()

    def free():
        return REGISTRY.get_sample_value(metric_name(FREE), {"model_name": "m", "engine": "0"})

    assert free() == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    monkeypatch.setattr("vllm_kvretrieval.engine.reports.free_space", lambda directory: 7)
    logger.record(SchedulerStats(), None)
    assert free() > 7, "not at every step"
    clock[0] += DISK_S
    logger.record(SchedulerStats(), None)
    assert free() == 7
    unregister_vllm_metrics()
