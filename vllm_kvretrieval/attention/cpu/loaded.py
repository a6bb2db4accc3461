"""Pages that something else than the model has filled."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.requests import RequestTable


class Pages(NamedTuple):
    """Pages of some requests' contexts.

    Attributes:
        ids: int32 [n]; each page once.
        lengths: int32 [n]; tokens in each.
    """

    ids: torch.Tensor
    lengths: torch.Tensor


def loaded_pages(
    requests: "RequestTable",
    lens: np.ndarray,
    before: np.ndarray,
    block_table: torch.Tensor,
    page_size: int,
) -> Pages | None:
    """Pages that requests have brought into a step and whose indexes are to be built.

    A KV connector has filled some. And a context that ends within a page may end in a copy, whose
    index covers all that its source holds.

    Args:
        requests: Table of the running requests.
        lens: int32 [R]; tokens of each context with the step.
        before: int32 [R]; tokens of each context before it.
        block_table: int32 [R, >= pages]; page ids in context order.
        page_size: Tokens per page.
    """
    arrived = [r in requests.arrived for r in requests.batch[: len(lens)]]
    rows = np.flatnonzero(arrived & (before > 0))
    if not len(rows):
        return None
    table = block_table.numpy()[rows]
    position = np.arange(table.shape[1]) * page_size
    row, place = np.nonzero(position < before[rows][:, None])
    unindexed = position[place] + page_size > before[rows][row]
    if requests.loaded is not None:
        unindexed |= requests.loaded.among(table[row, place])
    row, place = row[unindexed], place[unindexed]
    if not len(row):
        return None
    ids, first = np.unique(table[row, place], return_index=True)
    lengths = np.minimum(lens[rows][row] - position[place], page_size)[first]
    return Pages(torch.from_numpy(ids), torch.from_numpy(lengths.astype(np.int32)))
