"""The way of counts to the front end without a connector; ``test_serving`` goes all of it."""

import pickle
from types import SimpleNamespace

from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_kvretrieval.engine.reports import RetrievalStatLogger, attach, put, take

COUNTS = {"units_attended": 7, "planning_us": 3}


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
    put(None, SchedulerStats())
    put(output(), SchedulerStats())
    put(attach(output(), COUNTS), None)  # the server keeps no statistics


def test_a_server_without_retrieval():
    attention = SimpleNamespace(backend=None, backend_per_kind={})
    config = SimpleNamespace(attention_config=attention, additional_config={})
    logger = RetrievalStatLogger(config, [0])
    logger.log_engine_initialized()
    logger.record(SchedulerStats(), None)
    logger.log()
