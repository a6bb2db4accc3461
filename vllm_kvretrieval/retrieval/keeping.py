"""Methods that drop tokens: which tokens of a prompt they keep, by the attention received."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.values import require_int, shortened

ALL = "all"
"""Value of ``observation``: every query of a prompt counts."""

RATINGS = ("sum", "latest", "stamp", "position")
"""A token's rating is the sum of all attention that it received; that of the latest query alone;
the position of the latest query whose attention in some head was more than ``STAMPED``; or, for
tokens that are decoded, their own position."""

STAMPED = 1e-4
"""RaaS's threshold of a high attention."""


@dataclass(frozen=True)
class Keeping:
    """How a prompt's tokens are rated, and which of them are always kept.

    A token's rating follows from the attention that it receives: the softmax weights of the query
    heads of a KV head, or of the layer, summed.

    Attributes:
        observation: Queries at the end of a prompt whose attention counts; None: all.
        per_layer: Whether all KV heads of a layer keep the same tokens; else each its own.
        sink: First tokens, always kept.
        recent_share: The share of the kept tokens that are the most recent ones.
        recent: The least number of most recent tokens that are kept.
        smoothing: A token is rated as the best of this many tokens around it.
        rating: One of ``RATINGS``.
        page: Tokens that are kept or dropped together, rated as the best of them.
    """

    observation: int | None = None
    per_layer: bool = False
    sink: int = 0
    recent_share: float = 0.0
    recent: int = 0
    smoothing: int = 1
    rating: str = "sum"
    page: int = 1

    def first_observed(self, end: int) -> int:
        """Position of the first query that counts in a prompt of ``end`` tokens."""
        return 0 if self.observation is None else max(end - self.observation, 0)

    def most_recent(self, counts: torch.Tensor) -> torch.Tensor:
        """int64 [n]; how many of ``counts`` kept tokens are kept because they are recent."""
        share = (counts.double() * self.recent_share).long()
        return torch.minimum(share.clamp(min=self.recent), (counts - self.sink).clamp(min=0))

    @property
    def slides(self) -> bool:
        """Whether recent tokens can slide: there are some, and they are dropped one by one."""
        return self.page == 1 and (self.recent > 0 or self.recent_share > 0)

    def kept(self, room: torch.Tensor, prompt: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """int64; how many tokens a head keeps.

        Args:
            room: int64; most tokens that it may keep.
            prompt: int64; tokens of the prompt, of which as many are kept as fit.
            added: int64; tokens since then; others are dropped for them if there is no room.
        """
        tail = prompt % self.page
        whole = tail + (room - tail).clamp(min=0) // self.page * self.page
        first = torch.where(prompt <= room, prompt, torch.minimum(whole, room))
        beyond = (first + added - room).clamp(min=0)
        return first + added - -(-beyond // self.page) * self.page

    def keep(self, mass: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
        """Positions that each KV head keeps.

        Args:
            mass: float32 [n, tokens]; attention that the prompt's tokens received, with a row per
                KV head, or one row for all heads.
            counts: int [heads]; tokens to keep, no more than there are.

        Returns:
            Per head int64 [its count], rising. Of equally rated tokens the earlier are kept.
        """
        kept = [mass.new_empty(0)] * len(counts)
        for count in {*counts.tolist()}:
            heads = [head for head, own in enumerate(counts.tolist()) if own == count]
            rows = heads if len(mass) > 1 else [0]  # or heads share what they keep
            recent = int(self.most_recent(torch.tensor(count)))
            best = self._best(torch.stack([mass[row] for row in rows]), count, recent)
            for place, head in enumerate(heads):
                kept[head] = best[min(place, len(rows) - 1)]
        return kept

    def ratings(
        self, mass: torch.Tensor, positions: torch.Tensor, budget: int, slides: bool
    ) -> torch.Tensor:
        """Ratings of the tokens that a head keeps of a prompt, for the steps that drop tokens.

        Tokens that never leave are rated infinity. By ``stamp`` these are all tokens of a prompt
        that leaves room for recent pages and for one that can go (RaaS keeps prompts). Where tokens
        slide, they are those that are kept for their attention; the others have their positions.

        Args:
            mass: float32 [tokens]; attention that the prompt's tokens received.
            positions: int64 [n]; the kept tokens, rising.
            budget: Tokens that the head may attend to, a new one included.
            slides: Whether the recent tokens slide.

        Returns:
            float32 [n].
        """
        end, count = len(mass), len(positions)
        recent = int(self.most_recent(torch.tensor(budget)))
        if slides:
            rated = positions.float()
            if count < end:
                rated[: count - int(self.most_recent(torch.tensor(count)))] = math.inf
            else:
                rated[self._order(mass[None])[0, : budget - recent]] = math.inf
            return rated
        pages, recent_pages = (-(-tokens // self.page) for tokens in (end, recent))
        if self.rating == "stamp" and pages + recent_pages < budget // self.page:
            return mass.new_full((count,), math.inf)
        return mass[positions]

    def _best(self, mass: torch.Tensor, count: int, recent: int) -> torch.Tensor:
        """int64 [n, count]; positions that heads keep, whose tokens received ``mass``."""
        end = mass.shape[1]
        if self.page > 1:
            return self._best_pages(mass, count)
        best = self._order(mass[:, : end - recent])[:, : count - recent]
        latest = torch.arange(end - recent, end, device=mass.device).expand(len(mass), -1)
        return torch.cat([best.sort().values, latest], 1)

    def _order(self, mass: torch.Tensor) -> torch.Tensor:
        """Positions of tokens, the sink first, then the best rated; of each row."""
        rated = self._smooth(mass)
        rated[:, : self.sink] = math.inf
        return rated.sort(descending=True, stable=True).indices

    def _best_pages(self, mass: torch.Tensor, count: int) -> torch.Tensor:
        """The last page, perhaps unfinished, and the best others; of equal ones the latest."""
        end, size = mass.shape[1], self.page
        tail = min(end % size, count)
        rated = mass[:, : end // size * size].unflatten(1, (-1, size)).amax(2)
        pages = rated.shape[1]
        rated[:, : -(-self.sink // size)] = math.inf
        rated[:, pages - self.recent // size :] = math.inf
        order = rated.flip(1).sort(descending=True, stable=True).indices
        best = (pages - 1 - order[:, : (count - tail) // size]).sort().values
        tokens = best[..., None] * size + torch.arange(size, device=mass.device)
        last = torch.arange(end - tail, end, device=mass.device).expand(len(mass), -1)
        return torch.cat([tokens.flatten(1), last], 1)

    def _smooth(self, mass: torch.Tensor) -> torch.Tensor:
        if self.smoothing == 1 or not mass.shape[1]:
            return mass.clone()
        size = self.smoothing
        return torch.nn.functional.max_pool1d(mass, size, 1, size // 2)


def observation_of(value: Any, default: int | None) -> int | None:
    """The option ``observation`` of a method that keeps by mass.

    Raises:
        RetrievalConfigError: It is neither ``all`` nor a number of queries.
    """
    if value is None:
        return default
    if value == ALL:
        return None
    if isinstance(value, str) or require_int("observation", value) < 1:
        raise RetrievalConfigError(
            f"observation={shortened(value)} must be {ALL}, or how many of a prompt's last "
            "queries count, such as 32."
        )
    return int(value)


def entropy_shares(entropies: np.ndarray, least: float, most: float) -> np.ndarray:
    """Shares in proportion to entropies, within bounds (Entropy-guided KV caching, section 3.3).

    Args:
        entropies: float64 [n]; 0 or more.
        least, most: Bounds of each share; 1 lies between them.

    Returns:
        float64 [n]; 1 on average.
    """
    if not entropies.sum() > 0:
        return np.ones(len(entropies))
    low, high = 0.0, most / entropies[entropies > 0].min()
    for _ in range(100):  # find the factor with which the clipped shares add up
        factor = (low + high) / 2
        if np.clip(entropies * factor, least, most).mean() < 1:
            low = factor
        else:
            high = factor
    shares = np.clip(entropies * high, least, most)
    return shares / shares.mean()
