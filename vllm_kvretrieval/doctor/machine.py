"""Checks of the machine: threads, memory and what else vLLM's workers share."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_kvretrieval.doctor.findings import Finding, advice, error, judged
from vllm_kvretrieval.doctor.logs import quiet

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = 1 << 30
"""Bytes of shared memory that several workers want; containers often have 64 MiB."""
OPENMP = ("libgomp", "libiomp5", "libomp")
SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""Environment variable by which vLLM is told the size of the KV cache, in GiB."""
GIB = 1 << 30


def check_threads(parallel: Any = None, connector: Any = None) -> Iterator[Finding]:
    """On how many cores vLLM's workers would compute, by vLLM's own division of cores.

    Args:
        parallel: vLLM's parallel configuration; None: one worker.
        connector: vLLM's configuration of a KV connector, for which it keeps back one core more.
    """
    from vllm.config import ParallelConfig
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    from vllm_kvretrieval.attention.cpu.nixl import uses_nixl
    from vllm_kvretrieval.upstream import defaults

    parallel = parallel or ParallelConfig()
    config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=connector)
    cores, workers = defaults.cores_of(os.getpid()), parallel.local_world_size
    try:
        with quiet():
            lists = OMPProcessManager(config).cpu_lists
    except (AssertionError, RuntimeError, ValueError) as e:
        settings = defaults.all_cores(workers)["VLLM_CPU_OMP_THREADS_BIND"]
        yield error(
            "threads",
            f"vLLM cannot divide {len(cores)} cores among {workers} workers ({e})",
            f"set VLLM_CPU_OMP_THREADS_BIND='{settings}' in its environment",
        )
        return
    used = [core for cores_of_worker in lists for core in cores_of_worker]
    if shared := sorted({core for core in used if used.count(core) > 1}):
        yield advice(
            "threads",
            f"workers share the cores {', '.join(map(str, shared))}",
            "give each worker cores of its own, with | between them in VLLM_CPU_OMP_THREADS_BIND",
        )
    nixl = uses_nixl(connector)
    yield judged("threads", *defaults.check_threads(cores, len(used) or len(cores), workers, nixl))


def check_openmp() -> Finding:
    """Which OpenMP runtimes a worker would have; two of them fight over cores."""
    import vllm._custom_ops  # noqa: F401  (with vLLM's own kernels)

    maps = Path("/proc/self/maps").read_text()
    # A wheel may bring its own copy, whose name then ends with a hash: libgomp-24e2ab19.so.1.0.0.
    files = {Path(line.split()[-1]).name for line in maps.splitlines() if ".so" in line}
    found = [name for name in OPENMP if any(re.match(rf"{name}[-.]", file) for file in files)]
    text = ", ".join(found) or "none"
    if len(found) > 1:
        return advice(
            "openmp",
            f"a worker has two runtimes, {text}",
            "two compete for cores: preload (LD_PRELOAD) none, or the one that vLLM is to use",
        )
    return Finding("openmp", text)


def check_huge_pages(setting: Path = HUGE_PAGES) -> Finding:
    """Whether the system has huge pages for the KV cache, of which steps read scattered pieces."""
    text = setting.read_text() if setting.exists() else ""
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Finding("huge pages", f"transparent huge pages: {chosen}")
    return advice(
        "huge pages",
        f"transparent huge pages are {chosen or 'not in this kernel'}, so steps over long contexts "
        "are slower",
        f"as root: echo madvise > {setting}",
    )


def check_memory(cache: Any = None) -> Finding:
    """Whether there is the memory that a start of vLLM asks for.

    Args:
        cache: vLLM's configuration of the KV cache; None: that of a server without options.
    """
    from vllm.config import CacheConfig
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
    free, total = node.available_memory, node.total_memory
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB available"
    space = os.environ.get(SPACE, "").strip()
    if space and not space.isdecimal():
        return error("memory", f"{SPACE}={space} is no number of GiB", f"set {SPACE}=2, or none")
    size = int(space or 0) * GIB or None
    if cache is not None:
        size = cache.kv_cache_memory_bytes
    share = (cache or CacheConfig()).gpu_memory_utilization
    if size is None and share * total > free:
        report = advice if cache is None else error  # a server without options is only supposed
        return report(
            "memory",
            f"{text}, and vLLM does not start, since it takes {share:.0%} of all memory if the "
            "size of the KV cache is not given",
            f"add --kv-cache-memory-bytes 2G (or set {SPACE}=2), or more",
        )
    if size is not None and size > free:
        return error(
            "memory",
            f"{text}, and the KV cache is to have {size / GIB:.1f} GiB",
            f"lower --kv-cache-memory-bytes ({SPACE})",
        )
    return Finding("memory", text)


def check_shared_memory(workers: int, directory: Path = SHARED_MEMORY) -> Finding:
    """Whether several workers have room for their messages."""
    free = shutil.disk_usage(directory).free if directory.exists() else 0
    text = f"{free / GIB:.1f} GiB free in {directory}"
    if workers > 1 and free < LEAST_SHARED:
        return advice("shared memory", text, "give a container more: --shm-size 4g")
    return Finding("shared memory", text)
