"""A compiled model is loaded at the next start, which vLLM does not manage on CPUs.

vLLM saves the model that torch has compiled. When it loads the model, it calls
``finalize_loading``, a method of the functions that vLLM's own compiler backend makes. On CPUs the
backend is torch's ``inductor``, whose functions lack the method, so vLLM 0.32 and 0.33 compile at
every start.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Loaded

CPUINFO = Path("/proc/cpuinfo")


def load_compiled(vllm_config: Any) -> None:
    """Let vLLM load, in this process, the model that an earlier start has compiled.

    Compiled code needs the instructions of the CPU that it was made on, which vLLM's key of the
    saved model leaves out. So they become a part of the configuration, on which the key depends.

    Args:
        vllm_config: vLLM's configuration in this process.
    """
    additional = vllm_config.additional_config
    if not isinstance(additional, Mapping):
        return
    vllm_config.additional_config = {**additional, "instructions": _instructions()}
    if not hasattr(Loaded, "finalize_loading"):
        Loaded.finalize_loading = _already_whole


def _already_whole(loaded: Loaded, vllm_config: Any) -> None:
    """Nothing is left to load: torch's functions are whole."""


def _instructions() -> str:
    """A hash of the names of the CPU's instructions and other abilities."""
    lines = CPUINFO.read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()
