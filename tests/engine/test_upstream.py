"""What works around vLLM is listed, and vLLM still needs it."""

import inspect
import pkgutil
from pathlib import Path

import pytest
import torch
from torch._dynamo import aot_compile_types
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from vllm_kvretrieval import compat, upstream
from vllm_kvretrieval.upstream import WORKAROUNDS
from vllm_kvretrieval.upstream.rotary import flatten_heads


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
