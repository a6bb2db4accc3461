"""vLLM's blocks where some groups of layers lie in a slow home, and the others in fast memory.

vLLM has one pool of blocks for all groups of layers, as if each block took the same memory,
whichever group has it. With a slow home, one of home's groups takes space in the file, and one of
another group fast memory, of which there is less. So blocks of home's groups come first by number,
and the other groups have a pool of their own for those behind them: the number of a block says
where it lies.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

from vllm.v1.core.block_pool import FreeKVCacheBlockQueue
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool


class Split(NamedTuple):
    """A division of vLLM's blocks.

    Attributes:
        homes: Numbers of the groups of layers that lie in home.
        blocks: Their blocks; the first by number, with vLLM's block 0.
        others: Blocks of all other groups, behind them.
    """

    homes: tuple[int, ...]
    blocks: int
    others: int


def divide(coordinator: Any, split: Split) -> None:
    """Give the groups that do not lie in home a pool of their own.

    A request gets blocks if both pools have enough of them.

    Args:
        coordinator: vLLM's ``KVCacheCoordinator``, before the first request.
        split: The division.
    """
    pool = coordinator.block_pool
    others = SharedEventQueueBlockPool(
        num_gpu_blocks=split.others + 1,
        enable_caching=pool.enable_caching,
        hash_block_size=pool.hash_block_size,
        enable_kv_cache_events=pool.enable_kv_cache_events,
        metrics_collector=pool.metrics_collector,
        event_owner=pool,
    )
    own = others.blocks[1:]
    for number, block in enumerate(own, split.blocks):
        block.block_id = number
    others.blocks = [others.null_block] * split.blocks + own  # found by number
    pool.num_gpu_blocks, pool.blocks = split.blocks, pool.blocks[: split.blocks]
    pool.free_block_queue = FreeKVCacheBlockQueue(pool.blocks[1:])
    managers = coordinator.single_type_managers
    behind = [manager for number, manager in enumerate(managers) if number not in split.homes]
    for manager in behind:
        manager.block_pool, manager._null_block = others, others.null_block
    if isinstance(coordinator, HybridKVCacheCoordinator):
        coordinator.verify_and_split_kv_cache_groups()  # it looks up equal layers in one pool
    _count_apart(coordinator, others, behind)


def _count_apart(coordinator: Any, pool: Any, managers: Collection[Any]) -> None:
    """Ask for the blocks of these managers in their pool, and for those of the others in vLLM's."""
    needed = list[int]()
    for manager in managers:
        manager.get_num_blocks_to_allocate = _noting(manager.get_num_blocks_to_allocate, needed)
    of_all = coordinator.get_num_blocks_to_allocate
    too_many = coordinator.block_pool.num_gpu_blocks + 1

    def of_home(*args: Any, **options: Any) -> int:
        needed.clear()
        blocks = of_all(*args, **options)
        return blocks if sum(needed) <= pool.get_num_free_blocks() else too_many

    coordinator.get_num_blocks_to_allocate = of_home


def _noting(count: Any, needed: list[int]) -> Any:
    """Blocks that are counted elsewhere."""

    def noting(*args: Any, **options: Any) -> int:
        needed.append(count(*args, **options))
        return 0

    return noting
