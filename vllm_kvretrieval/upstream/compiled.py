"""A compiled model is loaded at the next start, which vLLM does not manage on CPUs.

vLLM saves the model that torch has compiled. When it loads the model, it calls
``finalize_loading``, a method of the functions that vLLM's own compiler backend makes. On CPUs the
backend is torch's ``inductor``, whose functions lack the method, so vLLM 0.32 and 0.33 compile at
every start.

vLLM's key of the saved model leaves out some of the things that the code depends on: the CPU and
its vectors, how each linear layer multiplies, and whether the model takes tokens or embeddings.
Here they become a part of the configuration, on which the key depends.

vLLM warms a model up with as many tokens as a step may have, since what it compiles depends on
their number. A model that is loaded needs few.

torch tries at every start whether this machine runs code with the CPU's vectors, in a process for
each kind of them. Here it tries each of them once.
"""

import contextlib
import hashlib
import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Loaded
from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa
from vllm import envs
from vllm.logger import init_logger

from vllm_kvretrieval import __version__
from vllm_kvretrieval.quantization import layers, packing, product
from vllm_kvretrieval.upstream import linear, mending, rotary

if TYPE_CHECKING:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

logger = init_logger("vllm.kvretrieval.worker")

CPUINFO = Path("/proc/cpuinfo")
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
"""Environment variables by which torch and oneDNN leave instructions of the CPU out."""
CODE = (linear, mending, rotary, layers, packing, product)
"""Modules of ours whose functions are a part of the compiled code."""
FIELD = "compiled_for"
"""The entry of vLLM's ``additional_config``."""
FORCED = "VLLM_FORCE_AOT_LOAD"
"""vLLM's variable by which a saved model that cannot be loaded is an error."""
FEW = 64
"""Tokens of the warm-up of a model that is loaded."""
_PROBE = VecISA._probe_load


def load_compiled(network: nn.Module) -> None:
    """Let vLLM load, in this process, the model that an earlier start has compiled.

    Args:
        network: The model, with its weights and all changes to it. Its parts that vLLM compiles
            have not been called yet.
    """
    VecISA._probe_load = _probe_once
    parts = [part for part in network.modules() if not getattr(part, "do_not_compile", True)]
    for config in {id(part.vllm_config): part.vllm_config for part in parts}.values():
        if isinstance(additional := config.additional_config, Mapping):
            config.additional_config = {**additional, FIELD: _compiled_for(config, network)}
    if not hasattr(Loaded, "finalize_loading"):
        Loaded.finalize_loading = _already_whole


def warm_up_briefly(runner: "CPUModelRunner") -> None:
    """Let a runner warm up with few tokens where the model is loaded, and as vLLM does otherwise.

    Args:
        runner: Of a worker that is alone, since all warm up with as many tokens; of a model without
            images; and with a KV cache of a given size: where vLLM chooses the size, it looks at
            the memory that the warm-up takes.
    """
    as_vllm_does, most = runner.warming_up_model, runner.max_num_tokens

    def warm_up() -> None:
        runner.max_num_tokens = min(FEW, most)
        try:
            with forced_loading():
                as_vllm_does()
            return
        except Exception as error:  # an error that is not of loading comes again
            logger.debug("The model is compiled: %s", error)
        finally:
            runner.max_num_tokens = most
        as_vllm_does()

    runner.warming_up_model = warm_up


@contextlib.contextmanager
def forced_loading() -> Iterator[None]:
    """Let vLLM raise an error in place of compiling a model that it cannot load."""
    before = os.environ.get(FORCED)
    os.environ[FORCED] = "1"
    try:
        if not envs.VLLM_FORCE_AOT_LOAD:
            raise RuntimeError(f"vLLM does not look at {FORCED} any more")
        yield
    finally:
        if before is None:
            del os.environ[FORCED]
        else:
            os.environ[FORCED] = before


def _probe_once(isa: VecISA, library: str) -> bool:
    """Whether a library that torch has compiled for an ISA can be loaded.

    A file beside the library says that it was. Its name depends on all that it is compiled from.
    """
    loaded = Path(f"{library}.loaded")
    if loaded.exists():
        return True
    if found := _PROBE(isa, library):
        with contextlib.suppress(OSError):
            loaded.touch()
    return found


def _already_whole(loaded: Loaded, vllm_config: Any) -> None:
    """Nothing is left to load: torch's functions are whole.

    Raises:
        ValueError: The key of the saved model does not say what it is for. vLLM compiles then.
    """
    if FIELD not in (vllm_config.additional_config or {}):
        raise ValueError("without retrieval nothing says which CPU a saved model was compiled for")


def _compiled_for(vllm_config: Any, network: nn.Module) -> str:
    """A hash of all that vLLM's key leaves out."""
    lines = CPUINFO.read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    facts = [
        __version__,
        flags,
        str(pick_vec_isa()),
        *(os.environ.get(name, "") for name in VARIABLES),
        str(vllm_config.model_config.supports_multimodal_inputs),
        *(inspect.getsource(module) for module in CODE),
        *_products(network),
    ]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _products(network: nn.Module) -> Iterator[str]:
    """How linear layers multiply: vLLM's choice, or ours, by the CPU, weights and environment."""
    for name, layer in network.named_modules():
        if (product := getattr(layer, "cpu_linear", None)) is not None:
            code = getattr(product, "__code__", None)
            line = None if code is None else code.co_firstlineno
            defaults, shape = getattr(product, "__defaults__", None), tuple(layer.weight.shape)
            yield f"{name} {product.__qualname__} {line} {defaults} {shape}"
        if (numbers := getattr(layer, "packed_numbers", None)) is not None:
            yield f"{name} quantised {numbers} {layer.packed_groups is not None}"
