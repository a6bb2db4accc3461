"""Shares: how the selected part of a budget is divided among layers and KV heads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.files import FILE, contents, has_file, reason
from vllm_kvretrieval.values import shortened

PYRAMID_BETA = 20
"""The default of the paper's experiments."""
ENTROPY_BOUNDS = (0.125, 2.0)
"""Least and most share of a layer; 1 is the mean. The paper's bounds are 8 and 128 tokens."""
OPTION = "budget_shares"
RULES = ("uniform", "pyramid", "entropy")
"""Names of rules that need no numbers."""
EXAMPLES = (
    "uniform, pyramid, {'pyramid': {'beta': 20}}, entropy (with methods that go by a prompt's "
    "attention), a list with a number per retrieval layer (or a list of numbers, one per KV head), "
    "or a file of such a list in JSON"
)


def pyramid(layers: int, beta: float = PYRAMID_BETA) -> np.ndarray:
    """float64 [layers]; shares that fall linearly with depth (PyramidKV, 2406.02069, section 4.2).

    The last layer has ``1 / beta`` of the mean, the first one the rest of twice the mean.
    """
    return np.linspace(2 - 1 / beta, 1 / beta, layers) if layers > 1 else np.ones(layers)


@dataclass(frozen=True)
class Shares:
    """A rule by which (layer, KV head) pairs divide the selected part of a budget.

    Attributes:
        given: The option as the user wrote it, for messages.
        beta: The parameter of ``pyramid``; None: another rule.
        entropy: Least and most share of a layer, if shares follow the entropy of its attention once
            a prompt has been read; None: another rule.
        numbers: Weights, one per retrieval layer, or one per KV head of it; None: a rule.
        option: The option's name, for messages.
    """

    given: str = "uniform"
    beta: float | None = None
    numbers: tuple[float | tuple[float, ...], ...] | None = None
    entropy: tuple[float, float] | None = None
    option: str = OPTION

    @property
    def uniform(self) -> bool:
        """Whether all pairs have the same share in every model."""
        return self.beta is None and self.numbers is None and self.entropy is None

    @property
    def by_head(self) -> bool:
        """Whether KV heads of some layer have different shares."""
        rows = [row for row in self.numbers or () if isinstance(row, tuple)]
        return any(len({*row}) > 1 for row in rows)

    def of(self, kv_heads: Sequence[int]) -> np.ndarray:
        """float64 [all KV heads], layer after layer; the mean is 1. With ``entropy`` all are equal.

        Args:
            kv_heads: KV heads of each retrieval layer, in the model's order.

        Raises:
            RetrievalConfigError: The numbers have another shape; says which.
        """
        per_layer: Any = self.numbers
        if per_layer is None:
            count = len(kv_heads)
            per_layer = np.ones(count) if self.beta is None else pyramid(count, self.beta)
        if len(per_layer) != len(kv_heads):
            raise RetrievalConfigError(
                f"kv_retrieval.{self.option}={self.given}: {len(per_layer)} layers, but "
                f"{len(kv_heads)} retrieve (dense ones have no share); give as many."
            )
        rows = []
        for layer, (share, heads) in enumerate(zip(per_layer, kv_heads, strict=True)):
            row = np.atleast_1d(np.asarray(share, dtype=np.float64))
            if isinstance(share, tuple) and len(row) != heads:
                raise RetrievalConfigError(
                    f"kv_retrieval.{self.option}={self.given}: {len(row)} numbers for layer "
                    f"{layer} of those that retrieve, which has {heads} KV heads; give as many, or "
                    "one for all."
                )
            rows.append(np.broadcast_to(row, heads))
        shares = np.concatenate(rows) if rows else np.ones(0)
        shares = shares / shares.max(initial=0.0)  # so that the sum is finite
        return shares * (len(shares) / shares.sum())


UNIFORM = Shares()


def make_shares(value: Any) -> Shares:
    """The shares that the option ``budget_shares`` describes.

    Raises:
        RetrievalConfigError: The option is none of ``EXAMPLES``; says why.
    """
    given = shortened(value[FILE] if has_file(value) else value)
    if value == "uniform":
        return UNIFORM
    if value == "pyramid":
        return Shares(given, beta=PYRAMID_BETA)
    if value == "entropy":
        return Shares(given, entropy=ENTROPY_BOUNDS)
    if isinstance(value, str) or has_file(value):
        return Shares(given, numbers=numbers_of(load(value), given))
    if isinstance(value, dict) and "entropy" in value:
        return Shares(given, entropy=_bounds(value, given))
    if isinstance(value, dict):
        return Shares(given, beta=_beta(value, given))
    return Shares(given, numbers=numbers_of(value, given))


def _beta(value: dict[Any, Any], given: str) -> float:
    parameters = value.get("pyramid")
    if value.keys() != {"pyramid"} or not isinstance(parameters, dict):
        raise RetrievalConfigError(f"budget_shares={given} is unknown; use one of {EXAMPLES}.")
    beta = parameters.get("beta", PYRAMID_BETA)
    if parameters.keys() - {"beta"} or not _is_number(beta) or not 1 <= beta < math.inf:
        raise RetrievalConfigError(
            f"budget_shares={given}: pyramid has beta, a number from 1 (all layers alike) on, such "
            f"as {PYRAMID_BETA}."
        )
    return float(beta)


def _bounds(value: dict[Any, Any], given: str) -> tuple[float, float]:
    parameters = value["entropy"]
    names = ("least", "most")
    known = isinstance(parameters, dict) and not parameters.keys() - {*names}
    numbers = dict(zip(names, ENTROPY_BOUNDS, strict=True)) | (parameters if known else {})
    valid = known and value.keys() == {"entropy"} and all(map(_is_number, numbers.values()))
    if not valid or not 0 <= numbers["least"] <= 1 <= numbers["most"] < math.inf:
        raise RetrievalConfigError(
            f"budget_shares={given}: entropy has least (0 to 1) and most (1 or more), the bounds "
            f"of a layer's share, where 1 is the mean, such as {ENTROPY_BOUNDS}."
        )
    return float(numbers["least"]), float(numbers["most"])


def load(given: Any) -> Any:
    """The contents of a file of shares, not yet checked.

    Args:
        given: See :func:`vllm_kvretrieval.retrieval.files.contents`.

    Raises:
        RetrievalConfigError: It cannot be read, or is no JSON.
    """
    name = shortened(given[FILE] if has_file(given) else given)
    return contents(
        given,
        lambda error: RetrievalConfigError(
            f"budget_shares={name} cannot be read as a file of JSON ({reason(error)}); use one of "
            f"{EXAMPLES}."
        ),
    )


def numbers_of(
    value: Any, given: str, option: str = OPTION
) -> tuple[float | tuple[float, ...], ...]:
    """A list of weights, checked.

    Args:
        value: The list: a number per layer, or a list of them, one per KV head.
        given: The value as the user wrote it, for messages.
        option: The option's name, for messages.

    Raises:
        RetrievalConfigError: It is no such list.
    """
    if not isinstance(value, list | tuple) or not value:
        raise RetrievalConfigError(f"{option}={given} must be one of {EXAMPLES}.")
    numbers = tuple(tuple(row) if isinstance(row, list | tuple) else row for row in value)
    flat = [n for row in numbers for n in (row if isinstance(row, tuple) else (row,))]
    if not flat or not all(_is_number(n) and 0 <= n < math.inf for n in flat) or not any(flat):
        raise RetrievalConfigError(
            f"{option}={given} must hold numbers of 0 or more, and one above 0 at least."
        )
    return tuple(
        tuple(float(n) for n in row) if isinstance(row, tuple) else float(row) for row in numbers
    )


def _is_number(value: Any) -> bool:
    """Whether the value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= 2**1000


def distribute(shares: np.ndarray, select: int, heads: np.ndarray | None = None) -> np.ndarray:
    """Divide the selected part of a budget: ``select`` for each KV head on average.

    Each head gets ``share * select``, rounded down or up so that the total is given away. Heads
    that have one share together get the same, so a rest may stay. Heads that would lose most by
    rounding down are rounded up first; among equal ones, the earlier.

    Args:
        shares: float64 [n]; 0 or more, 1 on average.
        select: Pages or tokens.
        heads: int64 [n]; KV heads that have each share; None: one.

    Returns:
        int64 [n]; pages or tokens of each head with the share.
    """
    heads = np.ones(len(shares), dtype=np.int64) if heads is None else heads
    exact = shares * select
    counts = np.floor(exact).astype(np.int64)
    left = select * int(heads.sum()) - int(counts @ heads)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[np.cumsum(heads[order]) <= left]] += 1
    return counts


@dataclass(frozen=True)
class Allotment:
    """The pages or tokens that a method gives to the KV heads of one worker.

    Attributes:
        shares: float64 [n]; shares of all KV heads of all retrieval layers of the model.
        own: int64 [m]; places of this worker's heads among them.
        longest: Pages or tokens of the longest context; no head selects more.
        highest: The largest possible share, if shares are found once a prompt has been read.
        kv_heads: KV heads of each retrieval layer of the model.
        together: Whether all KV heads of a layer get the same, rounding included.
    """

    shares: np.ndarray
    own: np.ndarray
    longest: int
    highest: float | None = None
    kv_heads: tuple[int, ...] = ()
    together: bool = False

    def of_layers(self, shares: np.ndarray) -> "Allotment":
        """The same allotment with a share per retrieval layer, float64 [layers], 1 on average."""
        by_head = np.repeat(shares, self.kv_heads)
        return replace(self, shares=by_head * (len(by_head) / by_head.sum()))

    def counts(self, select: int) -> np.ndarray:
        """int64 [m]; pages or tokens of each head, with ``select`` on average."""
        if self.together:
            heads = np.array(self.kv_heads)
            of_layers = self.shares[heads.cumsum() - heads]
            counts = distribute(of_layers, select, heads).repeat(heads)
        else:
            counts = distribute(self.shares, select)
        return np.minimum(counts[self.own], self.most(select))

    def most(self, select: int) -> np.ndarray:
        """int64 [m]; the most that any request gets with at most ``select`` on average."""
        shares = self.shares[self.own]
        if self.highest is not None:
            shares = np.full_like(shares, self.highest)
        exact = np.ceil(shares * select)
        return np.minimum(exact, self.longest).astype(np.int64)


def allot(
    shares: Shares,
    kv_heads: Sequence[int],
    longest: int,
    part: tuple[int, int] = (0, 1),
    together: bool = False,
) -> Allotment:
    """The allotment of a worker.

    Args:
        shares: Shares of the method.
        kv_heads: KV heads of each retrieval layer of the model, all workers' together.
        longest: Pages or tokens of the longest context.
        part: This worker's part of each layer's KV heads: its number, and the number of parts.
        together: Whether all KV heads of a layer get the same.
    """
    highest = None if shares.entropy is None else shares.entropy[1]
    own = own_heads(kv_heads, part)
    return Allotment(shares.of(kv_heads), own, longest, highest, tuple(kv_heads), together)


def own_heads(kv_heads: Sequence[int], part: tuple[int, int]) -> np.ndarray:
    """int64; places of a worker's KV heads among all, layer after layer; see :func:`allot`."""
    number, parts = part
    ends = np.cumsum(kv_heads)
    own = [
        np.arange(
            end - count + number * count // parts, end - count + (number + 1) * count // parts
        )
        for end, count in zip(ends, kv_heads, strict=True)
    ]
    return np.concatenate([np.zeros(0, dtype=np.int64), *own])
