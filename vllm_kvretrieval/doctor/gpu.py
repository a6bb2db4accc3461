"""Checks of an NVIDIA GPU."""

import resource
from collections.abc import Iterator

from vllm_kvretrieval.doctor.findings import Finding, advice, error


def check_gpu() -> Iterator[Finding]:
    """Whether the kernels run on the GPU, and whether host memory may be locked for it."""
    from vllm.platforms import current_platform

    from vllm_kvretrieval.attention.cuda.refusals import CAPABILITY

    name, capability = current_platform.get_device_name(), current_platform.get_device_capability()
    if capability is None or capability < CAPABILITY:
        yield error(
            "gpu",
            f"{name} has compute capability {capability}",
            f"the kernels need {'.'.join(map(str, CAPABILITY))} or newer",
        )
    else:
        yield Finding("gpu", f"{name}, compute capability {capability.as_version_str()}")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("memlock", "any amount of host memory may be locked")
    else:
        yield advice(
            "memlock",
            f"{soft / (1 << 20):.0f} MiB of host memory may be locked",
            "home=host locks the whole KV cache: ulimit -l unlimited, or --ulimit memlock=-1",
        )
