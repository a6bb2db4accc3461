"""vLLM's blocks, by number, whichever of its pools they are of."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any


class Blocks:
    """The blocks of one pool, or of several with different numbers.

    Args:
        pools: vLLM's, by the numbers of the groups of layers that they are for.
        longest: Blocks of the longest request in each of these groups.
    """

    def __init__(self, pools: Sequence[Any], longest: Sequence[int]) -> None:
        # Where there are two, blocks of the second come behind those of the first.
        self._pools = sorted(dict.fromkeys(pools), key=lambda pool: len(pool.blocks))
        self._spare = []  # what the longest request leaves, but for the null block
        for pool in self._pools:
            needed = sum(count for own, count in zip(pools, longest, strict=True) if own is pool)
            self._spare.append(max(pool.num_gpu_blocks - 1 - needed, 0))
        self.hash_size: int = pools[0].hash_block_size
        """Tokens of which vLLM makes a hash each."""
        self.null: int = pools[0].null_block.block_id
        """The number of vLLM's block that is never written."""

    def __getitem__(self, number: int) -> Any:
        return self._pool(number).blocks[number]

    def _pool(self, number: int) -> Any:
        return next(pool for pool in self._pools if number < len(pool.blocks))

    def by_pool(self, blocks: Iterable[Any]) -> list[list[Any]]:
        """Blocks, by the pool that they are of, in their order."""
        if len(self._pools) == 1:
            return [[*blocks]]
        found: list[list[Any]] = [[] for _ in self._pools]
        for block in blocks:
            found[self._pools.index(self._pool(block.block_id))].append(block)
        return found

    def cache(self, block: Any, key: bytes, tokens: int) -> None:
        """Put a block into the prefix cache.

        Args:
            block: The block.
            key: Its hash, with the number of its group.
            tokens: How many the hash is of.
        """
        block.set_block_hash(key, num_tokens=tokens)
        self._pool(block.block_id).cached_block_hash_to_block.insert(key, block)

    def touch(self, blocks: Iterable[Any]) -> None:
        """Hold blocks."""
        for pool, own in zip(self._pools, self.by_pool(blocks), strict=True):
            pool.touch(own)

    def free(self, blocks: Iterable[Any]) -> None:
        """Let go of blocks, in the order in which they are to be evicted."""
        for pool, own in zip(self._pools, self.by_pool(blocks), strict=True):
            pool.free_blocks(own)

    def evict(self, numbers: Collection[int]) -> None:
        """Take blocks out of the prefix cache."""
        blocks = self.by_pool(self[number] for number in numbers)
        for pool, own in zip(self._pools, blocks, strict=True):
            pool.evict_blocks({block.block_id for block in own})

    def first(self, wanted: Iterable[int], share: float, beside: float = 0.0) -> list[int]:
        """The first of these blocks, as many as may be held: requests need the others.

        Args:
            wanted: Numbers of blocks.
            share: The most of all blocks that these may be.
            beside: The share that may be held for another reason.
        """
        found: list[int] = []
        by_pool = self.by_pool(self[number] for number in wanted)
        for pool, spare, own in zip(self._pools, self._spare, by_pool, strict=True):
            size = pool.num_gpu_blocks
            most = min(int(share * size), max(spare - int(beside * size), 0))
            found += [block.block_id for block in own[:most]]
        return found
