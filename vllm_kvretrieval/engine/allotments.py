"""Which of vLLM's blocks a step overwrites, and which ones of others its requests rely on."""

from typing import Any


def allotted_blocks(step: Any, block_size: int) -> tuple[list[int], list[int]]:
    """The blocks that requests get in a step, of a KV cache with one group of layers.

    Args:
        step: vLLM's scheduler output.
        block_size: Tokens of a block.

    Returns:
        Numbers of the blocks that were computed before, and of those that are written anew.
    """
    cached = step.scheduled_cached_reqs
    allotted = [(new.block_ids, new.num_computed_tokens) for new in step.scheduled_new_reqs]
    for name, blocks, tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if blocks is not None:
            allotted.append((blocks, tokens if name in cached.resumed_req_ids else 0))
    shared, new = list[int](), list[int]()
    for (of_request,), tokens in allotted:
        count = -(-tokens // block_size)
        shared += of_request[:count]
        new += of_request[count:]
    return shared, new
