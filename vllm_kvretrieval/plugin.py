"""vLLM's entry points. Called in every process, so nothing heavy is imported here."""

import functools
import logging
import multiprocessing

SUPPORTED_VLLM = "0.32"
BACKENDS = {
    "cpu": "vllm_kvretrieval.attention.cpu.backend",
    "cuda": "vllm_kvretrieval.attention.cuda.backend",
}
"""The module of the backends per device; a backend's name is that of its preset, in capitals."""
PLATFORMS = {
    "cpu": "vllm_kvretrieval.platforms.cpu.CpuRetrievalPlatform",
    "cuda": "vllm_kvretrieval.platforms.cuda.CudaRetrievalPlatform",
}

NOT_MISSED = {
    "vllm.triton_utils.importing": "Triton is installed, but doesn't include CPU backend",
    "torch._library.triton": "Triton not available",
}
"""Warnings of other packages, by logger, that every process on a CPU would begin with."""

logger = logging.getLogger("vllm.kvretrieval")


def version_refusal() -> str | None:
    """Why retrieval stays off under the vLLM that is installed, and the remedy; None: it serves."""
    from vllm.version import __version__

    if ".".join(__version__.split(".")[:2]) == SUPPORTED_VLLM:
        return None
    return (
        f"vllm-kvretrieval is made for vLLM {SUPPORTED_VLLM} and stays off under vLLM "
        f"{__version__}: install vllm=={SUPPORTED_VLLM}.* or a release of vllm-kvretrieval for "
        "your vLLM."
    )


@functools.cache  # vLLM calls both entry points, and the refusal is one line
def _vllm_is_supported() -> bool:
    if why := version_refusal():
        logger.error(why)
    return why is None


@functools.cache
def _device() -> str | None:
    """The device that vLLM is built for and finds here, if retrieval has a platform for it."""
    from vllm.platforms import cpu_platform_plugin, cuda_platform_plugin

    if cpu_platform_plugin() is not None:
        return "cpu"
    return "cuda" if cuda_platform_plugin() is not None else None


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
    elif _device() is None:
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
    """Make the methods known as attention backends (``vllm.general_plugins``). Idempotent.

    On a platform that is not ours they stay unknown, so that an engine for which one is named does
    not start: vLLM's own platform for CPUs would ignore the name, and serve its own attention.
    """
    if _vllm_is_supported() and _platform_is_ours():
        _register_backends()


def _register_backends() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_kvretrieval.retrieval.presets import preset_names

    for name in map(str.upper, preset_names()):
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, f"{BACKENDS[_device() or 'cpu']}.{name}")


def activate_platform() -> str | None:
    """Register the backends and name our platform class (``vllm.platform_plugins``).

    The engine core unpickles its configuration, backend name included, before general plug-ins are
    loaded; platform plug-ins are loaded before that. vLLM's CPU platform ignores foreign backends,
    and its CUDA platform takes one for layers with sliding windows, too; so subclasses stand in for
    them. On other devices vLLM's own platform stays, and no backend is registered.
    """
    device = _device() if _vllm_is_supported() else None
    if device is None:
        return None
    _register_backends()
    if device == "cpu":
        _leave_out_triton()
    return PLATFORMS[device]


def _leave_out_triton() -> None:
    """Keep vLLM and torch from warning that there is no Triton for a CPU, which needs none."""
    for name, beginning in NOT_MISSED.items():
        logging.getLogger(name).addFilter(functools.partial(_begins_otherwise, beginning))


def _begins_otherwise(beginning: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(beginning)
