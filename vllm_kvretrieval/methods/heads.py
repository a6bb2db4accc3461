"""Methods by which some KV heads attend to whole contexts and others to sink and window (razor)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_kvretrieval.kernels import DecodeRows, TokenLists
from vllm_kvretrieval.methods.base import DecodePlan, GroupFacts, StepRows
from vllm_kvretrieval.methods.scored import Scored, connect, layer_method, scratch_bytes
from vllm_kvretrieval.retrieval.heads import EVERYTHING
from vllm_kvretrieval.retrieval.method import Method

if TYPE_CHECKING:
    from vllm.config import ModelConfig

__all__ = ["connect", "fixed_counts", "group_method", "layer_method", "scratch_bytes"]


class Heads(Scored):
    """A group's rows of one method; see :class:`GroupMethod`."""

    def __init__(self, facts: GroupFacts, number: int, method: Method) -> None:
        super().__init__(facts, number, method)
        self.even = False

    def plan(self, rows: StepRows) -> DecodePlan:
        """Rows whose heads attend to what is known beforehand, perhaps to everything."""
        heads, size = self.facts.kv_heads, self.facts.page_size
        pages = -(-int(rows.lens.max()) // size)
        decode_rows = DecodeRows.given(
            rows.context,
            torch.empty(len(rows.seats) * heads, pages, dtype=torch.int32),
            sink=torch.from_numpy(rows.options["sink"].copy()),
            window=torch.from_numpy(rows.options["window"].copy()),
            fresh=torch.from_numpy(rows.fresh.astype(np.uint8)),
        )
        lists = TokenLists(decode_rows.lists, decode_rows.lengths, size, heads)
        return DecodePlan(self.number, decode_rows, rows.index, lists)


group_method = Heads


def fixed_counts(
    method: Method, model: "ModelConfig", layers: Sequence[int]
) -> torch.Tensor | None:
    """How many pages each KV head selects, whatever the budget; None: the budget says it.

    Args:
        method: The method.
        model: vLLM's configuration of the model.
        layers: Numbers of the layers that attend to parts of long contexts.

    Returns:
        int32 [KV heads of the model in these layers, layer after layer].
    """
    if method.heads is None:
        return None
    return torch.from_numpy(method.heads.of(model, layers)).flatten().int() * EVERYTHING
