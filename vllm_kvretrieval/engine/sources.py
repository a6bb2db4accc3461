"""What the answers of requests attended to: the attention of their steps, page by page."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.kernels import TokenLists

MOST = 16
"""Requests whose record is kept; each takes 8 bytes per page and retrieval layer."""
GROUPS = 4
"""Groups of adjacent layers that are told apart."""


@dataclass
class Record:
    """The attention of one request's answer.

    Attributes:
        weights: float32 [layers, pages]; the largest share of its attention that a query head of
            the layer gives to the page, added up over steps.
        peaks: float32 [layers, pages]; the largest of these shares, of all steps.
        tokens: Tokens of the context at the last step.
        steps: Steps whose attention is known, by layer.
    """

    weights: np.ndarray
    peaks: np.ndarray
    steps: np.ndarray
    tokens: int = 0


class LayerSources(NamedTuple):
    """A retrieval layer's part of the records.

    Attributes:
        of: The records.
        number: The layer's place among the retrieval layers.
    """

    of: "Sources"
    number: int

    def asked(self, seats: torch.Tensor) -> bool:
        """Whether a request in one of these seats asks."""
        return bool(len(self.of.asking(seats.numpy())))

    def note(self, rows: Any, lists: TokenLists, weights: torch.Tensor) -> None:
        """See :meth:`Sources.note`.

        Args:
            rows: Have ``seats``, ``block_table`` and ``seq_lens``, such as ``DecodeRows``.
            lists, weights: See there.
        """
        contexts = rows.block_table, rows.seq_lens
        self.of.note(self.number, rows.seats.numpy(), contexts, lists, weights)


@dataclass
class Sources:
    """The records of the requests that ask for theirs.

    Attributes:
        page_size: Tokens per page.
        layers: Numbers of the retrieval layers in the model.
        most_pages: Pages of the longest context.
    """

    page_size: int
    layers: Sequence[int]
    most_pages: int
    _records: OrderedDict[str, Record] = field(default_factory=OrderedDict)
    _seats: dict[int, Record] = field(default_factory=dict)

    def sit(self, seat: int, req_id: str, asks: bool) -> None:
        """Follow a request that takes a seat, or reads its options anew."""
        self._seats.pop(seat, None)
        if not asks:
            return
        if req_id not in self._records:
            sums, peaks = np.zeros((2, len(self.layers), self.most_pages), dtype=np.float32)
            steps = np.zeros(len(self.layers), dtype=np.int64)
            self._records[req_id] = Record(sums, peaks, steps)
            if len(self._records) > MOST:
                self._records.popitem(last=False)
        self._records.move_to_end(req_id)
        self._seats[seat] = self._records[req_id]

    def leave(self, seat: int) -> None:
        """Follow a request that gives back its seat; its record stays."""
        self._seats.pop(seat, None)

    def asking(self, seats: np.ndarray) -> np.ndarray:
        """int64 [n]; the places of the seats whose requests ask."""
        if not self._seats:
            return np.arange(0)
        return np.flatnonzero([seat in self._seats for seat in seats.tolist()])

    def note(
        self,
        layer: int,
        seats: np.ndarray,
        contexts: tuple[torch.Tensor, torch.Tensor],
        lists: TokenLists,
        weights: torch.Tensor,
    ) -> None:
        """Note the attention of a step in one layer.

        Args:
            layer: The layer's place among the retrieval layers.
            seats: int [R]; those of the rows.
            contexts: The rows' ``block_table``, int32 [R, >= pages], and ``seq_lens``, int32 [R].
            lists: The tokens that the rows attend to, by their places in the KV cache.
            weights: float32 [R, heads, >= tokens of the longest list]; their attention.
        """
        table, lens = contexts
        for row in self.asking(seats).tolist():
            record, tokens = self._seats[int(seats[row])], int(lens[row])
            pages = -(-tokens // self.page_size)
            by_page = self._by_page(row, table[row, :pages].long(), lists, weights[row]).numpy()
            record.weights[layer, :pages] += by_page
            peaks = record.peaks[layer, :pages]
            np.maximum(peaks, by_page, out=peaks)
            record.steps[layer] += 1
            record.tokens = tokens

    def _by_page(
        self, row: int, table: torch.Tensor, lists: TokenLists, weights: torch.Tensor
    ) -> torch.Tensor:
        """float32 [pages]; the most that a head gives to each page of a context."""
        kv_heads, size = lists.kv_heads, self.page_size
        place = torch.zeros(int(table.max()) + 1, dtype=torch.int64)
        place[table] = torch.arange(len(table))
        of_heads = weights.view(kv_heads, -1, weights.shape[-1])
        by_head = torch.zeros(*of_heads.shape[:2], len(table))
        for head in range(kv_heads):
            own = row * kv_heads + head
            length = int(lists.lengths[own])
            entries = lists.entries[own if lists.per_head else row, : -(-length // lists.run)]
            units = entries.long() if lists.run == size else entries.long() * lists.run // size
            pages = units // kv_heads if lists.per_head else units
            at = place[pages].repeat_interleave(lists.run)[:length]
            by_head[head].index_add_(1, at, of_heads[head, :, :length])
        return by_head.flatten(0, 1).amax(0)

    def told(self, request_id: str) -> dict[str, Any] | None:
        """The record of a request, as plain numbers; None: there is none.

        Args:
            request_id: The server's name of the request, which begins the engine's.

        Returns:
            ``page_size``; ``tokens`` of the context at the last step; ``steps``; the first and last
            layers of each of ``groups``; ``weights``, for each group and page the mean over layers
            and steps of the largest share that a head gives to the page; and ``peaks``, the mean
            over layers of the largest of all steps. What models attend to at each step, whatever
            they write, has peaks that are hardly larger than its weights.
        """
        found = [name for name in self._records if name.rpartition("-")[0] == request_id]
        found += [request_id] if request_id in self._records else []
        if not found:
            return None
        record = self._records[found[-1]]
        known = np.flatnonzero(record.steps)
        pages = -(-record.tokens // self.page_size)
        groups = [part for part in np.array_split(known, GROUPS) if len(part)]
        means = [record.weights[part, :pages] / record.steps[part, None] for part in groups]
        peaks = [record.peaks[part, :pages] for part in groups]
        return {
            "page_size": self.page_size,
            "tokens": record.tokens,
            "steps": int(record.steps.max()),
            "groups": [[int(self.layers[part[0]]), int(self.layers[part[-1]])] for part in groups],
            "weights": [_over_layers(group) for group in means],
            "peaks": [_over_layers(group) for group in peaks],
        }


def _over_layers(group: np.ndarray) -> list[float]:
    return [round(float(share), 5) for share in group.mean(0)]
