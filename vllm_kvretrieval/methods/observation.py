"""The latest queries of requests, by which filter layers select (OmniKV, section 4.2)."""

from typing import NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.kernels import DecodeRows


class Observed(NamedTuple):
    """Queries of a step that are to be kept, int64 [n] each.

    Attributes:
        tokens: Places of the queries among the step's tokens.
        seats: Seats of the requests.
        places: In these requests' rings: position in the context, modulo the ring.
    """

    tokens: torch.Tensor
    seats: torch.Tensor
    places: torch.Tensor


class LatestQueries:
    """The latest queries of one filter layer: a ring per seat.

    Args:
        seats: Seats of the requests.
        window: Queries per request.
        heads, head_size, dtype: Sizes and element type of the layer's queries.
        drafts: The most draft tokens of a request in a step, whose queries may be taken back.
    """

    def __init__(
        self,
        seats: int,
        window: int,
        heads: int,
        head_size: int,
        dtype: torch.dtype,
        drafts: int = 0,
    ) -> None:
        self.window = window
        self.queries = torch.zeros(seats, window + drafts, heads, head_size, dtype=dtype)

    def take(self, query: torch.Tensor, observed: Observed) -> None:
        """Keep queries of a step, [tokens, heads, head_size]."""
        self.queries[observed.seats, observed.places] = query[observed.tokens]

    def of(self, rows: DecodeRows) -> torch.Tensor:
        """[rows * window, heads, head_size]; the latest of each row at the end, without drafts."""
        lens = rows.seq_lens.long()
        if rows.starts is not None:
            lens = lens - (rows.starts.diff() - 1)
        positions = lens[:, None] - self.window + torch.arange(self.window)
        ring = positions % self.queries.shape[1]
        return self.queries[rows.seats.long()[:, None], ring].flatten(0, 1)


class Observation:
    """Knows of each seat how many of its latest queries have been kept without a gap.

    Args:
        weights: Weights of a window's queries, the latest one's at the end.
        ends: int32 [seats]; the caller's own; zero whenever a seat changes hands.
        begins: int32 [seats]; likewise.
        drafts: See :class:`LatestQueries`.
    """

    def __init__(
        self, weights: tuple[float, ...], ends: np.ndarray, begins: np.ndarray, drafts: int = 0
    ) -> None:
        self.weights = torch.tensor(weights)
        self._ring = len(weights) + drafts
        # Positions of the first query that is kept, and behind the last one.
        self._begins, self._ends = begins, ends

    @property
    def keeps(self) -> bool:
        """Whether more queries count than a step's own."""
        return len(self.weights) > 1

    def observe(self, seats: np.ndarray, lens: np.ndarray, starts: np.ndarray) -> Observed:
        """Note a step.

        Args:
            seats: int32 [n]; of its requests.
            lens: int32 [n]; tokens of their contexts, the step's included.
            starts: int32 [n + 1]; first token of each in the step.
        """
        new = np.diff(starts)
        kept, before = np.minimum(new, self._ring), lens - new
        # Drafts of the last step may have been rejected.
        goes_on = (self._begins[seats] <= before) & (before <= self._ends[seats])
        begins = np.where(goes_on, self._begins[seats], before)
        self._begins[seats] = np.maximum(begins, lens - self._ring)
        self._ends[seats] = lens
        back = np.concatenate([np.arange(count, 0, -1) for count in kept])
        rows = np.repeat(np.arange(len(seats)), kept)
        return Observed(
            torch.from_numpy(starts[1:][rows].astype(np.int64) - back),
            torch.from_numpy(seats[rows].astype(np.int64)),
            torch.from_numpy((lens[rows].astype(np.int64) - back) % self._ring),
        )

    def weights_of(self, seats: np.ndarray, lens: np.ndarray) -> torch.Tensor:
        """float32 [n, window]; zero for queries that have not been seen.

        Args:
            seats: int32 [n]; of requests.
            lens: int32 [n]; tokens of their contexts, the last of which has the latest query.
        """
        window = len(self.weights)
        if window == 1:
            return self.weights.expand(len(seats), 1).contiguous()
        seen = torch.from_numpy((lens - self._begins[seats]).astype(np.int64))
        return torch.where(torch.arange(window) >= window - seen[:, None], self.weights, 0.0)
