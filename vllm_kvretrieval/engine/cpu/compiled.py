"""A compiled model is loaded at the next start, which vLLM does not manage on CPUs.

vLLM saves the model that torch has compiled. When it loads the model, it calls
``finalize_loading``, a method of the functions that vLLM's own compiler backend makes. On CPUs the
backend is torch's ``inductor``, whose functions lack the method, so vLLM 0.32 and 0.33 compile at
every start.
"""

import hashlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Loaded

from vllm_kvretrieval import __version__
from vllm_kvretrieval.engine.cpu import linear, model, rotary

CPUINFO = Path("/proc/cpuinfo")


def load_compiled(vllm_config: Any) -> None:
    """Let vLLM load, in this process, the model that an earlier start has compiled.

    vLLM's key of the saved model leaves out the CPU that compiled code is for, and the code of this
    package that changes models. Both become a part of the configuration, on which the key depends.

    Args:
        vllm_config: vLLM's configuration in this process.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, Mapping):
        return
    vllm_config.additional_config = {**additional, "compiled_for": _compiled_for()}
    if not hasattr(Loaded, "finalize_loading"):
        Loaded.finalize_loading = _already_whole


def _already_whole(loaded: Loaded, vllm_config: Any) -> None:
    """Nothing is left to load: torch's functions are whole."""


def _compiled_for() -> str:
    """A hash of the abilities of the CPU, and of the code that changes models."""
    lines = CPUINFO.read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    sources = [inspect.getsource(module) for module in (linear, model, rotary)]
    return hashlib.sha256("\n".join([__version__, flags, *sources]).encode()).hexdigest()
