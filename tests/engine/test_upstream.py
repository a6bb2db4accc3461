"""What works around vLLM is listed, and vLLM still needs it."""

import inspect
import os
import pkgutil
import signal
import time
from pathlib import Path

import pytest
import torch
import zmq
from torch._dynamo import aot_compile_types
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.utils.network_utils import get_open_zmq_ipc_path, zmq_socket_ctx

from vllm_kvretrieval import compat, upstream
from vllm_kvretrieval.upstream import WORKAROUNDS
from vllm_kvretrieval.upstream.rotary import flatten_heads
from vllm_kvretrieval.upstream.starting import start_engine


@pytest.mark.parametrize("entry", WORKAROUNDS, ids=lambda entry: entry.code)
def test_entries(entry):
    """The code is there, for a release that is served."""
    assert pkgutil.resolve_name(f"vllm_kvretrieval.{entry.code}")
    assert {*entry.versions} <= {*compat.TESTED}
    assert entry.why.endswith(".")
    assert entry.until.endswith(".")


def test_every_file_has_an_entry():
    """But for the one that calls two of the others."""
    files = {path.stem for path in Path(upstream.__file__).parent.glob("*.py")}
    listed = {entry.code.split(".")[1] for entry in WORKAROUNDS if entry.code[:8] == "upstream"}
    assert files - {"__init__", "mending"} == listed


def start(_):
    """What vLLM does while an engine starts, as Ctrl-C is pressed."""
    with zmq_socket_ctx(get_open_zmq_ipc_path(), zmq.ROUTER, bind=True):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
    return "it goes on"


def test_an_interrupted_start_still_goes_on(monkeypatch):
    monkeypatch.setattr("vllm.LLM.from_engine_args", start)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert start(None) == "it goes on"
        with pytest.raises(SystemExit) as end:
            start_engine(EngineArgs(model="m"))
        assert end.value.code == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert start_engine(EngineArgs(model="m")) == "it goes on", "it is not to be interrupted"
    finally:
        signal.signal(signal.SIGINT, before)


def test_compiled_models_are_still_not_loaded():
    assert "finalize_loading" not in inspect.getsource(aot_compile_types)


def test_queries_with_heads_are_still_rotated_wrongly():
    """By vLLM's kernel; flattened they are rotated as by its own reference."""
    config = VllmConfig()
    config.compilation_config.custom_ops = ["all"]
    with set_current_vllm_config(config):
        rotary = get_rope(64, 128, dtype=torch.float32)
    # Memory behind the positions is read, too, and has to hold positions.
    positions, query, key = torch.arange(100)[:5], torch.randn(5, 3, 64), torch.randn(5, 2, 64)
    expected = rotary.forward_native(positions, query.clone(), key.clone())

    def rotated():
        return rotary(positions, query.clone(), key.clone())

    assert not torch.allclose(rotated()[0], expected[0], atol=1e-5)
    assert flatten_heads(rotary) == 1
    for found, right in zip(rotated(), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
