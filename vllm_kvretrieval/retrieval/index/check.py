"""The check at start-up that an index of another package does what :class:`Index` requires."""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.index import OWN, Field, Index, IndexKind, pack, unpack
from vllm_kvretrieval.retrieval.index.min_max import MinMax
from vllm_kvretrieval.retrieval.index.rule import Rule, RuleState

ENTRIES, GROUP, SCALE = 5, 3, 0.125
CLOSE = 0.02
"""How much the score of an entry scored alone may differ, relative to the largest score."""


def check_outside(kinds: Iterable[IndexKind], head_size: int, dtype: torch.dtype) -> None:
    """Check those of ``kinds`` whose indexes other packages bring."""
    for kind in kinds:
        if type(kind.index) not in OWN:
            check_index(kind.index, kind.entry_tokens, head_size, dtype)


@functools.cache
def check_index(index: Index, entry_tokens: int, head_size: int, dtype: torch.dtype) -> None:
    """Try an index on keys drawn at random.

    Args:
        index: The index.
        entry_tokens: Tokens per entry.
        head_size, dtype: Head size and dtype of the KV cache.

    Raises:
        RetrievalConfigError: The index does not do what :class:`Index` requires.
    """
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(ENTRIES, entry_tokens, head_size, generator=generator).to(dtype).float()
    query = torch.randn(GROUP, head_size, generator=generator)
    try:
        fields = _fields(index, head_size, entry_tokens)
        if isinstance(index, Rule):
            _try_rule(index, _record(index, fields, keys, dtype), query)
            return
        together = _scores(index, fields, keys, query, dtype)
        alone = torch.cat(
            [_scores(index, fields, entry[None], query, dtype) for entry in keys], dim=1
        )
    except _MisfitError as misfit:
        why = str(misfit)
    except Exception as error:
        why = f"it raises {type(error).__name__} ({error})"
    else:
        if (alone - together).abs().max() <= CLOSE * together.abs().max():
            return
        why = "the score of an entry depends on what else is built or scored with it"
    raise RetrievalConfigError(
        f"index {index.name} ({type(index).__module__}.{type(index).__qualname__}) cannot serve "
        f"entries of {entry_tokens} tokens of head size {head_size} in {dtype}: {why}. Mend the "
        "package that brings it."
    )


class _MisfitError(Exception):
    """An index does not do what :class:`Index` requires; the message says where."""


def _fields(index: Index, head_size: int, entry_tokens: int) -> tuple[Field, ...]:
    if index.grows and type(index) is not MinMax:
        raise _MisfitError(
            f"grows is True, and only records of {MinMax.name} can grow: others are built when "
            "their entries are complete. Leave it False"
        )
    if index.spans and type(index) not in OWN:
        raise _MisfitError(
            "spans is True, and only indexes of this package can have entries of several pages. "
            "Leave it False"
        )
    if index.tells_outliers and type(index) not in OWN:
        raise _MisfitError(
            "tells_outliers is True, and only indexes of this package can tell outliers. Leave it "
            "False"
        )
    if isinstance(index, Rule) and index.per_token:
        raise _MisfitError("per_token is True, and a rule chooses pages. Leave it False")
    fields = index.fields(head_size, entry_tokens)
    for field in fields:
        if not isinstance(field, Field):
            raise _MisfitError(f"fields has {field!r}, which is no Field")
        sizes = all(isinstance(size, int) and size > 0 for size in field.shape)
        if not sizes or not isinstance(field.dtype, torch.dtype | None):
            raise _MisfitError(
                f"fields has {field!r}, which has no shape, or no dtype, of a tensor"
            )
    names = [field.name for field in fields] + ["keys"] * index.reads_keys
    if len(set(names)) < len(names):
        raise _MisfitError(f"fields has names that are not its own: {', '.join(names)}")
    return fields


def _record(
    index: Index, fields: tuple[Field, ...], keys: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """What the index is given of stored records."""
    built = index.build(keys)
    for field in fields:
        _check_tensor(f"build's {field.name}", built.get(field.name), (len(keys), *field.shape))
    record = unpack(fields, pack(fields, built, dtype), dtype) if fields else {}
    for field in fields:
        stored = record[field.name].double()
        if not stored.isfinite().all():
            raise _MisfitError(f"build's {field.name} is not finite in {record[field.name].dtype}")
        exact = built[field.name].double()
        if not record[field.name].is_floating_point() and (stored - exact).abs().max() > 1:
            raise _MisfitError(f"build's {field.name} does not fit in {field.dtype}")
    if index.reads_keys:
        record["keys"] = keys
    return record


def _scores(
    index: Index,
    fields: tuple[Field, ...],
    keys: torch.Tensor,
    query: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Scores from stored records, float32 [group, n, ...]; of single tokens with ``per_token``."""
    record = _record(index, fields, keys, dtype)
    scores = index.score(query, record, SCALE)
    _check_scores("score", scores, (len(query), len(keys)))
    if not index.per_token:
        return scores.float()
    of_tokens = index.score_tokens(query, record, SCALE)
    _check_scores("score_tokens", of_tokens, (len(query), *keys.shape[:2]))
    return torch.cat([scores[..., None], of_tokens], -1).float()


def _try_rule(rule: Rule, record: dict[str, torch.Tensor], query: torch.Tensor) -> None:
    """Two steps in which a rule chooses pages; one is the sink, one the window."""
    state = RuleState(1, ENTRIES - 1, 2, SCALE, None, None, {})
    for _ in range(2):
        try:
            state.pages = rule.choose(query, record, state)
        except ValueError as error:
            raise _MisfitError(str(error)) from error
        state.query = query


def _check_scores(what: str, scores: Any, shape: tuple[int, ...]) -> None:
    _check_tensor(what, scores, shape)
    if not scores.is_floating_point() or not scores.isfinite().all():
        raise _MisfitError(f"{what} gives {scores.dtype} that are not all finite numbers")


def _check_tensor(what: str, value: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(value, torch.Tensor):
        raise _MisfitError(f"{what} is {value!r}, where {list(shape)} numbers are wanted")
    if value.shape != shape:
        raise _MisfitError(f"{what} has the shape {list(value.shape)}, wanted is {list(shape)}")
