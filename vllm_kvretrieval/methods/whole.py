"""Rows that attend to whole contexts, where these are not read in place."""

import torch

from vllm_kvretrieval.kernels import Contexts, DecodeRows, TokenLists
from vllm_kvretrieval.methods.base import WHOLE, DecodePlan, GroupFacts


def plan_whole(facts: GroupFacts, context: Contexts, index: torch.Tensor) -> DecodePlan:
    """Rows that list all pages of their contexts, and reach for them as others do.

    Args:
        facts: The layers.
        context: Contexts for which the lists have room.
        index: int64 [queries]; their tokens in the batch.
    """
    count = len(context.seq_lens) * facts.kv_heads
    rows = DecodeRows.whole(context, facts.lists[:count], lengths=facts.lengths[:count])
    lists = TokenLists(
        rows.lists, rows.lengths, facts.page_size, facts.kv_heads, starts=rows.starts
    )
    return DecodePlan(WHOLE, rows, index, lists)
