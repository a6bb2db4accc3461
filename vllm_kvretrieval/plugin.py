"""vLLM's entry points. Called in every process, so nothing heavy is imported here."""

import functools
import logging

SUPPORTED_VLLM = "0.32"
BACKENDS = "vllm_kvretrieval.attention.cpu.backend"
"""Module of the backends; each has the name of its preset, in capitals."""

logger = logging.getLogger("vllm.kvretrieval")


@functools.cache  # vLLM calls both entry points, and the refusal is one line
def _vllm_is_supported() -> bool:
    from vllm.version import __version__

    if ".".join(__version__.split(".")[:2]) == SUPPORTED_VLLM:
        return True
    logger.error(
        "vllm-kvretrieval is made for vLLM %s and stays off under vLLM %s: install vllm==%s.* or a "
        "release of vllm-kvretrieval for your vLLM.",
        SUPPORTED_VLLM,
        __version__,
        SUPPORTED_VLLM,
    )
    return False


def register() -> None:
    """Make the methods known as attention backends (``vllm.general_plugins``). Idempotent."""
    if _vllm_is_supported():
        _register_backends()


def _register_backends() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_kvretrieval.retrieval.presets import preset_names

    for name in map(str.upper, preset_names()):
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, f"{BACKENDS}.{name}")


def activate_platform() -> str | None:
    """Register the backends and, on a CPU, name our platform class (``vllm.platform_plugins``).

    The engine core unpickles its configuration, backend name included, before general plug-ins are
    loaded; platform plug-ins are loaded before that. vLLM's CPU platform ignores foreign backends,
    so there a subclass stands in for it; elsewhere vLLM's own platform stays.
    """
    if not _vllm_is_supported():
        return None
    _register_backends()
    from vllm.platforms import cpu_platform_plugin

    if cpu_platform_plugin() is None:
        return None
    return "vllm_kvretrieval.platform.CpuRetrievalPlatform"
