"""The options of a method in an engine that is started on this machine."""

from collections.abc import Mapping
from typing import Any

from vllm.config import ModelConfig
from vllm.platforms import current_platform

from vllm_kvretrieval.doctor.logs import quiet
from vllm_kvretrieval.platforms.cpu import CpuRetrieval
from vllm_kvretrieval.retrieval.presets import presets


def served_options(model: str, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an engine with a method, smaller pages included where it would have them.

    Where vLLM does not serve the model, they are the given ones.

    Args:
        model: Path, or name on a hub.
        method: The engine's own method.
        options: The engine's options, as the user wrote them.
    """
    if not presets()[method].finer or not isinstance(current_platform, CpuRetrieval):
        return {**options}
    from vllm_kvretrieval.platforms.finer import finer_for_model  # which loads the kernels

    try:
        with quiet():
            config = ModelConfig(model)
    except (ValueError, OSError):
        return {**options}
    return {**options, **finer_for_model(config, method, options)}
