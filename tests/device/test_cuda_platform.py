"""An engine as vLLM configures it on a GPU, from its arguments to its classes.

See tests/support/stubbed_cuda.py. No engine is started.
"""

import json
import subprocess
import sys

import pytest

from benchmarks.common import ROOT

SERVED = (
    "kvretrieval freekv quest arkvale infllm twilight shadowkv fier omnikv ttkv entropykv "
    "snapkv h2o tova raas razor streamingllm full kivi kvquant oracle"
).split()


@pytest.fixture(scope="module")
def found():
    """What the program prints."""
    command = [sys.executable, "-m", "tests.support.stubbed_cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_platform_is_vllms_with_retrieval(found):
    names = found["platform"]
    assert names[:2] == ["RetrievalNvmlCudaPlatform", "CudaRetrieval"]
    assert "NvmlCudaPlatform" in names
    assert found["gpu"] == "NVIDIA H100 80GB HBM3, compute capability 9.0"


def test_an_engine_as_a_user_starts_it(found):
    """With nothing but the name of a backend."""
    device = found["device"]
    assert device["worker"] == "vllm_kvretrieval.engine.cuda.worker.RetrievalGPUWorker"
    assert device["scheduler"] == "vllm_kvretrieval.engine.scheduler.RetrievalAsyncScheduler"
    assert device["v2"]
    assert device["block"] == 16, "until layers have their backends"
    assert device["graphs"] == "FULL_AND_PIECEWISE"
    assert device["seats"] == 1024
    assert device["connector"] is None
    backend = "vllm_kvretrieval.attention.cuda.backend.FREEKV"
    assert found["backend"] == [backend, "FLASH_ATTN"]
    assert found["host"] == device | {"connector": "RetrievalConnector"}


def test_every_preset_is_served_or_refused_by_name(found):
    refusals = found["refusals"]
    assert [name for name in refusals if refusals[name] is None] == SERVED
    for name in refusals.keys() - SERVED:
        assert "GPU" in refusals[name]
        assert f"{name} " in refusals[name]
