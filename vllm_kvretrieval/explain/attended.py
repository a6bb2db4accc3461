"""The tokens of a prompt that a method lets the next query attend to."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.explain.observed_attention import LayerAttention
from vllm_kvretrieval.kernels import (
    Chooser,
    Contexts,
    DecodeRows,
    IndexRecords,
    Selection,
    reference,
)
from vllm_kvretrieval.methods.kept_prompts import LocalHeads, kept_prompts
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.capacity import Capacity
from vllm_kvretrieval.retrieval.families import DroppingMethod
from vllm_kvretrieval.retrieval.keeping import Keeping, entropy_shares
from vllm_kvretrieval.retrieval.seats import SEAT_FIELDS
from vllm_kvretrieval.retrieval.shares import ENTROPY_BOUNDS, Shares, allot


class Attended(NamedTuple):
    """The tokens of a prompt that the KV heads of a layer attend to.

    Attributes:
        tokens: bool [kv_heads, tokens]; the attended tokens.
        always: bool, the same shape; those of them that are attended to whatever attention they
            get: the sink, the window or the most recent tokens, and outliers; in dense layers and
            retrieval heads all tokens.
    """

    tokens: torch.Tensor
    always: torch.Tensor


class EntropyBudgets(NamedTuple):
    """How layers share a budget by the entropies of their attention.

    Attributes:
        shares: float64 [layers]; 1 on average.
        tokens: Per layer int64 [kv_heads].
    """

    shares: np.ndarray
    tokens: list[np.ndarray]


def entropy_budgets(layers: Sequence[LayerAttention], budget: int, longest: int) -> EntropyBudgets:
    """Budgets of layers by the rule of entropy-guided KV caching, within its bounds.

    Args:
        layers: The layers' attention.
        budget: Tokens per KV head on average.
        longest: Tokens of the longest context of the model.
    """
    entropies = np.array([layer.entropy for layer in layers])
    kv_heads = [layer.kv_heads for layer in layers]
    allotment = allot(Shares(entropy=ENTROPY_BOUNDS), kv_heads, longest, together=True)
    shares = entropy_shares(entropies, *ENTROPY_BOUNDS)
    counts = allotment.of_layers(shares).counts(budget)
    return EntropyBudgets(shares, np.split(counts, np.cumsum(kv_heads)[:-1]))


def attended(
    config: RetrievalConfig,
    layers: Mapping[int, LayerAttention],
    longest: int,
    whole: np.ndarray | None = None,
) -> dict[int, Attended]:
    """Attended tokens with the method and options of an engine, for a prompt beyond the budget.

    For a method that retrieves these are the tokens that the prompt's last query selects, also if
    a step may attend to an earlier query's selection. For a method that drops tokens these are the
    tokens that are left when the prompt has been read.

    Args:
        config: Options of the engine.
        layers: The model's layers with plain full attention, by number, rising.
        longest: Tokens of the longest context of the model.
        whole: bool [layers that are not dense, kv_heads]; heads that attend to whole contexts.
    """
    dense_layers = max(layers) + 1 if config.own.whole else config.dense_layers
    dense = [layer for number, layer in layers.items() if number < dense_layers]
    retrieval = [layer for number, layer in layers.items() if number >= dense_layers]
    everything = [torch.ones_like(layer.keys[..., 0], dtype=torch.bool) for layer in dense]
    found = [Attended(mask, mask) for mask in everything]
    if retrieval and isinstance(config.own, DroppingMethod):
        found += _kept(config, retrieval, longest)
    elif retrieval:
        found += _selected(config, retrieval, longest)
    if whole is not None:
        for of_layer, heads in zip(found[len(dense) :], torch.from_numpy(whole), strict=True):
            of_layer.tokens[heads] = of_layer.always[heads] = True
    return dict(zip(layers, found, strict=True))


def _kept(
    config: RetrievalConfig, layers: Sequence[LayerAttention], longest: int
) -> list[Attended]:
    """The tokens that an engine keeps when the first token after the prompt is decoded."""
    tokens = layers[0].keys.shape[1]
    ends = np.cumsum([layer.kv_heads for layer in layers]).tolist()
    heads = LocalHeads(
        [slice(end - layer.kv_heads, end) for end, layer in zip(ends, layers, strict=True)]
    )
    room = Capacity(config, [layer.kv_heads for layer in layers], longest)
    selected = torch.zeros(1, heads.count, dtype=torch.int32)
    prompts = kept_prompts(config, heads, selected, room)
    assert prompts is not None
    prompts.admit(0, 0, tokens, config.page_budget(), exact=False)
    entropies = torch.tensor([layer.entropy for layer in layers], dtype=torch.float64)
    prompts.watched(0).entropies.copy_(entropies)
    prompts.settle(0, 0)
    rule, found = prompts.rules[0], []
    for layer, own in zip(layers, heads.slices, strict=True):
        counts = selected[0, own]
        parts = zip(rule.keep(layer.mass, counts), _first_recent(rule, counts, tokens), strict=True)
        found.append(_masks(tokens, [(kept, rule.sink, recent) for kept, recent in parts]))
    return found


def _first_recent(rule: Keeping, counts: torch.Tensor, tokens: int) -> list[int]:
    """For each KV head, the first of the tokens that are kept because they are the most recent."""
    recents = rule.most_recent(counts.long()).tolist()
    return [tokens // rule.page * rule.page - recent // rule.page * rule.page for recent in recents]


def _masks(tokens: int, heads: Sequence[tuple[torch.Tensor, int, int]]) -> Attended:
    """Attended tokens of KV heads from positions, the end of the sink and the window's begin."""
    mask = torch.zeros(len(heads), tokens, dtype=torch.bool)
    always = mask.clone()
    for head, (positions, sink, window) in enumerate(heads):
        mask[head, positions] = True
        always[head, :sink] = always[head, window:] = True
    return Attended(mask, mask & always)


def _selected(
    config: RetrievalConfig, layers: Sequence[LayerAttention], longest: int
) -> list[Attended]:
    """The attention of the last query, by the specification of the ops."""
    method, units = config.own, config.page_size if config.own.per_token else 1
    budget = config.page_budget()
    select = budget.select * units
    room = Capacity(config, [layer.kv_heads for layer in layers], longest)
    counts = room.counts(method.name, budget)
    ends = np.cumsum([layer.kv_heads for layer in layers])[:-1]
    by_layer = [torch.from_numpy(part).int() for part in np.split(counts, ends)]
    return [
        _plan(config, layer, (budget.sink * units, select, budget.window * units), per_head)
        for layer, per_head in zip(layers, by_layer, strict=True)
    ]


def _plan(
    config: RetrievalConfig,
    layer: LayerAttention,
    parts: tuple[int, int, int],
    counts: torch.Tensor,
) -> Attended:
    """What the prompt's last query selects in one layer.

    Args:
        config: Options of the engine.
        layer: The layer's attention.
        parts: Units of selection in the sink, selected on average, and in the window.
        counts: int32 [kv_heads]; units that each KV head selects.
    """
    method, size, tokens = config.own, config.page_size, layer.keys.shape[1]
    (sink, select, window), most = parts, int(counts.max())
    group = len(layer.queries) // layer.kv_heads
    chooser = make_chooser(config, layer, group, most, counts)
    pages, width = chooser.store.pages, sink + most + window
    rows = DecodeRows.selecting(
        Contexts(
            torch.arange(pages, dtype=torch.int32)[None],
            torch.tensor([tokens], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
        ),
        torch.zeros(layer.kv_heads, width, dtype=torch.int32),
        sink=sink,
        window=window,
        select=select,
        corrected=torch.zeros(1, dtype=torch.int64),
        numbers={known.column: known.of(method) for known in SEAT_FIELDS},
        spared=torch.zeros(1, dtype=torch.int64),
        per_token=method.per_token,
    )
    reference.plan_decode(layer.queries[:, -1][None], rows, chooser)
    unit = 1 if method.per_token else size
    last = tokens if method.per_token else -(-tokens // size)
    heads = []
    for listed, length in zip(rows.lists.long(), rows.lengths.tolist(), strict=True):
        numbers = listed[: -(-length // unit)]
        if method.per_token:
            positions = numbers // size // layer.kv_heads * size + numbers % size
        else:
            positions = (numbers // layer.kv_heads)[:, None] * size + torch.arange(size)
        heads.append((positions[positions < tokens], sink * unit, (last - window) * unit))
    attended = _masks(tokens, heads)
    between = sink, last - window
    for head, selected in enumerate(counts.clamp(max=last - window - sink).tolist()):
        if count := chooser.outlier_units(selected):
            entries = torch.arange(pages * chooser.store.parts)
            found = reference.find_outliers(entries, head, chooser.store, between, count)
            whole = attended.always[head, : tokens // size * size]
            whole.unflatten(0, (-1, size))[sink + found] = True
    return attended


def make_chooser(
    config: RetrievalConfig,
    layer: LayerAttention,
    group: int,
    most: int,
    counts: torch.Tensor | None = None,
) -> Chooser:
    """The method's chooser, over a token-major cache with the prompt's keys and their index.

    Args:
        config: Options of the engine.
        layer: The layer's attention.
        group: Queries per KV head.
        most: The most units that a KV head selects.
        counts: int32 [kv_heads]; units that each KV head selects; None: as rows say.
    """
    method, size = config.own, config.page_size
    kv_heads, tokens, head_size = layer.keys.shape
    pages = -(-tokens // size)
    pages += -pages % method.entry_pages
    padded = torch.nn.functional.pad(layer.keys, (0, head_size, 0, pages * size - tokens))
    store = IndexRecords.empty(
        method.index,
        pages=pages,
        kv_heads=kv_heads,
        head_size=head_size,
        page_size=size,
        dtype=layer.keys.dtype,
        entry_tokens=method.entry_tokens,
        cache=padded.unflatten(1, (pages, size)).transpose(0, 1).contiguous(),
        layout="token_major",
    )
    if store.records.shape[-1]:
        whole = torch.arange(tokens // store.entry_tokens)
        store.records[whole] = reference.build(reference.keys_of_entries(whole, store), store)
        if rest := tokens % size:  # an unfinished entry, too
            last = torch.tensor([tokens // size])
            reference.index_pages(last, torch.tensor([rest]), store)
    selection = Selection.empty(
        seats=1,
        kv_heads=kv_heads,
        group=group,
        head_size=head_size,
        most_selected=most,
        dtype=layer.keys.dtype,
        counts=None if counts is None else counts[None].contiguous(),
    )
    return Chooser(
        store, selection, method.pooling, layer.scale, method.rerank, outliers=method.outliers
    )
