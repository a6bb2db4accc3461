"""Steps in which a rule chooses pages, for all implementations of the ops."""

import torch

from vllm_kvretrieval.kernels.rows import DecodeRows
from vllm_kvretrieval.kernels.types import Chooser
from vllm_kvretrieval.retrieval.index.rule import Rule, RuleState


def choose_pages(
    rule: Rule,
    query: torch.Tensor,
    record: dict[str, torch.Tensor],
    rows: DecodeRows,
    row: int,
    head: int,
    chooser: Chooser,
) -> torch.Tensor:
    """The pages that a rule chooses for a KV head of a row.

    Args:
        rule: The index of the chooser.
        query: float32 [group, head_size].
        record: See :meth:`Rule.select`.
        rows: The rows of the step; this one selects.
        row, head: Numbers of the row and of the KV head.
        chooser: How to select.

    Returns:
        int64 [as many as the head selects]; positions in the context, rising.

    Raises:
        ValueError: The rule does not choose what it has to.
    """
    selection, seat = chooser.selection, int(rows.seats[row])
    length, size = int(rows.seq_lens[row]), chooser.store.page_size
    first, last = int(rows.sink[row]), -(-length // size) - int(rows.window[row])
    count = int(rows.select[row])
    if selection.counts is not None:
        count = min(int(selection.counts[seat, head]), last - first)
    if count < 1:
        return torch.empty(0, dtype=torch.int64)
    state = RuleState(first, last, count, chooser.scale, None, None, {})
    if rows.fresh[row]:
        selection.memory[seat, head] = state.memory
    else:
        heads = slice(head * chooser.group, (head + 1) * chooser.group)
        state.query = selection.query[seat, heads].to(torch.float32, copy=True)
        state.pages = selection.chosen[seat, head, :count].long()
        state.memory = selection.memory.setdefault((seat, head), state.memory)
    return rule.choose(query.clone(), record, state)
