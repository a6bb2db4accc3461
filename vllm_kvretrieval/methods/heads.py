"""Methods by which some KV heads attend to whole contexts and others to sink and window (razor)."""

import numpy as np
import torch

from vllm_kvretrieval.kernels import DecodeRows, TokenLists
from vllm_kvretrieval.methods.base import DecodePlan, GroupFacts, StepRows
from vllm_kvretrieval.methods.scored import (
    Scored,
    connect,
    device_method,
    layer_method,
    scratch_bytes,
)
from vllm_kvretrieval.retrieval.families import Method

__all__ = ["connect", "device_method", "group_method", "layer_method", "scratch_bytes"]


class Heads(Scored):
    """A group's rows of one method; see :class:`GroupMethod`."""

    def __init__(self, facts: GroupFacts, number: int, method: Method) -> None:
        super().__init__(facts, number, method)
        self.even = False

    def plan(self, rows: StepRows) -> DecodePlan:
        """Rows whose heads attend to fixed numbers of pages, perhaps to all."""
        heads, size = self.facts.kv_heads, self.facts.page_size
        pages = -(-int(rows.lens.max()) // size)
        decode_rows = DecodeRows.given(
            rows.context,
            torch.empty(len(rows.seats) * heads, pages, dtype=torch.int32),
            sink=torch.from_numpy(rows.options["sink"].copy()),
            window=rows.window(size, 1),
            fresh=torch.from_numpy(rows.fresh.astype(np.uint8)),
        )
        listed, starts = decode_rows.lists, decode_rows.starts
        lists = TokenLists(listed, decode_rows.lengths, size, heads, starts=starts)
        return DecodePlan(self.number, decode_rows, rows.index, lists)


group_method = Heads
