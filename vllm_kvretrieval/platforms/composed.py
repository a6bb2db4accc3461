"""The platform of this process: the one that vLLM would have chosen, with retrieval in front.

vLLM takes one platform from outside, by its path, and then none of its own. So what its own would
bring (``ZenCpuPlatform`` with zentorch, NVML or not on GPUs) comes by inheritance.
"""

from vllm.platforms.interface import Platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_kvretrieval import compat
from vllm_kvretrieval.platforms import PLATFORMS, composed_name
from vllm_kvretrieval.platforms.shared import RetrievalPlatform


def compose(retrieval: type[RetrievalPlatform], base: type[Platform]) -> type[RetrievalPlatform]:
    """One of vLLM's platforms with retrieval in front.

    Args:
        retrieval: What retrieval adds on the device.
        base: vLLM's platform.
    """
    name = composed_name(base.__name__)
    return type(name, (retrieval, base), {"__module__": __name__, "__doc__": base.__doc__})


def __getattr__(name: str) -> type[RetrievalPlatform]:
    chosen = compat.vllm_platform()
    if chosen is None or name != composed_name(chosen.path.rsplit(".", 1)[1]):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    retrieval = resolve_obj_by_qualname(PLATFORMS[chosen.device])
    made = compose(retrieval, resolve_obj_by_qualname(chosen.path))
    globals()[name] = made
    return made
