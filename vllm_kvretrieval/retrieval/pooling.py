"""Pooling: the scores of a KV head's query heads become one score, by which pages are chosen."""

from enum import IntEnum

import torch


class Pooling(IntEnum):
    """Pooling over the group of query heads. Options use the name in lower case.

    ``MEAN_SOFTMAX``: the mean of each head's softmax over all entries (FreeKV, section 3.2).
    ``RELATIVE``: the sum of each head's mass relative to that of its best entry: softmax without
    its denominator, so that a head with spread-out attention has more say. ``MAX``: the highest
    score of the group. ``SUM``: the sum of the scores. ``MAX_SOFTMAX``: the highest softmax of the
    group (ShadowKV, algorithm 2).
    """

    MEAN_SOFTMAX = 0
    RELATIVE = 1
    MAX = 2
    SUM = 3
    MAX_SOFTMAX = 4

    @property
    def raw(self) -> bool:
        """Whether scores are pooled as they are; else relative to each head's total or best."""
        return self in (Pooling.MAX, Pooling.SUM)

    def norms(self, scores: torch.Tensor) -> torch.Tensor:
        """float64 [group, 1]; the number subtracted from each head's scores before pooling.

        Args:
            scores: [group, n]; scores of all entries of a context.
        """
        scores = scores.double()
        if self in (Pooling.MEAN_SOFTMAX, Pooling.MAX_SOFTMAX):
            return scores.logsumexp(-1, keepdim=True)
        if self is Pooling.RELATIVE:
            return scores.amax(-1, keepdim=True)
        return torch.zeros(len(scores), 1, dtype=torch.float64)

    def pool(self, scores: torch.Tensor, parts: int) -> torch.Tensor:
        """Pool over the group and over the entries of a page.

        Args:
            scores: [group, pages * parts]; minus :meth:`norms`. The last page may have fewer.
            parts: Entries per page.

        Returns:
            float64 [pages]. For all but raw poolings this is the logarithm of the pooled score, so
            that pages keep their order however far apart they are.
        """
        scores = scores.double()
        missing = -scores.shape[1] % parts
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
        scores = scores.unflatten(1, (-1, parts))
        if self is Pooling.MAX:
            return scores.amax(-1).amax(0)
        if self is Pooling.SUM:
            return scores.sum(0).amax(-1)
        if self is Pooling.MAX_SOFTMAX:
            return scores.amax(0).logsumexp(-1)
        return scores.logsumexp(-1).logsumexp(0)


POOLINGS = tuple(pooling.name.lower() for pooling in Pooling)
"""The names that options use."""
