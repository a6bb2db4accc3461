"""Attention, and the tokens that it reads: kept, staged or written."""

import math
from dataclasses import replace
from itertools import pairwise

import torch

from vllm_kvretrieval.kernels.reference.index import tokens_of
from vllm_kvretrieval.kernels.rows import DecodeRows, PromptLists, Remainder, TokenLists
from vllm_kvretrieval.kernels.types import KeptTokens
from vllm_kvretrieval.retrieval.keeping import STAMPED, Keeping


def drop_tokens(weights: torch.Tensor, rows: DecodeRows, kept: KeptTokens, rule: Keeping) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.drop_tokens`."""
    for r in range(len(rows)):
        seat, last = int(rows.seats[r]), int(rows.seq_lens[r]) - 1
        for head in range(kept.chosen.shape[1]):
            count = int(kept.counts[seat, head])
            of_head = weights[r, min(head, weights.shape[1] - 1), :, : count + 1]
            chosen, ratings = kept.chosen[seat, head], kept.ratings[seat, head]
            positions = torch.cat([chosen[:count], torch.tensor([last], dtype=torch.int32)])
            rated = torch.cat([ratings[:count], torch.zeros(1)])
            if rule.rating == "stamp":
                high = (of_head > STAMPED).any(0)
                rated[high] = rated[high].clamp(min=last)
            elif rule.rating == "position":
                rated[count] = last
            else:
                received = of_head.sum(0)
                rated = rated + received if rule.rating == "sum" else received
            budget = kept.budgets[seat, head].long()
            if count + 1 >= budget:
                spared = positions > last - rule.most_recent(budget)
                open_ = rated.masked_fill(spared | (positions < rule.sink), math.inf)
                pages = positions // rule.page
                best = {int(p): float(open_[pages == p].max()) for p in pages.unique()}
                goes = min(best, key=lambda page: best[page])
                if math.isinf(best[goes]):  # all are spared
                    behind = [p for p in best if int(positions[pages == p][0]) >= rule.sink]
                    goes = min(behind, default=int(pages[-1]))
                left = pages != goes
                positions, rated = positions[left], rated[left]
            chosen[: len(positions)], ratings[: len(rated)] = positions, rated


def stage_pages(
    source: torch.Tensor,
    pages: torch.Tensor,
    target: torch.Tensor,
    layout: str = "vec",
    token_major: bool = False,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.stage_pages`."""
    _, kv_heads, page_size, width = source.shape
    block_size, size = target.shape[2], width // 2
    blocks = target[: len(pages) * page_size // block_size]
    parts = block_size // page_size
    chosen = source[pages.long()].view(len(blocks), parts, kv_heads, page_size, width)
    if token_major:
        keys, values = chosen[..., :size].transpose(3, 4), chosen[..., size:]
    else:
        keys, values = chosen.flatten(3).chunk(2, dim=3)
        keys = keys.unflatten(3, (size, page_size))
        values = values.unflatten(3, (page_size, size))
    halves = blocks.view(len(blocks), kv_heads, 2, block_size * size)
    keys = keys.permute(0, 2, 3, 1, 4).flatten(3)  # [blocks, kv_heads, head_size, tokens]
    values = values.transpose(1, 2).flatten(2, 3)  # [blocks, kv_heads, tokens, head_size]
    if layout == "amx":
        keys = keys.unflatten(2, (-1, 2)).unflatten(4, (-1, 16)).permute(0, 1, 4, 2, 5, 3)
        values = values.unflatten(2, (-1, 2)).unflatten(4, (-1, 16)).permute(0, 1, 4, 2, 5, 3)
    halves[:, :, 0] = keys.flatten(2)
    halves[:, :, 1] = values.flatten(2)


def stage_tokens(
    source: torch.Tensor, lists: TokenLists, target: torch.Tensor, layout: str = "vec"
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.stage_tokens`."""
    heads, (block_size, width) = lists.kv_heads, target.shape[2:]
    tokens, first = source.view(-1, width), 0
    for row, length in enumerate(lists.lengths[::heads].tolist()):
        entries = lists.entries[row * heads : (row + 1) * heads, :length].long()
        blocks = -(-length // block_size)
        padding = (0, 0, 0, blocks * block_size - length)
        listed = torch.nn.functional.pad(tokens[entries], padding)
        pages = listed.unflatten(1, (blocks, block_size)).transpose(0, 1).contiguous()
        order = torch.arange(blocks, dtype=torch.int32)
        stage_pages(pages, order, target[first : first + blocks], layout, token_major=True)
        first += blocks


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    layout: str,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.write_cache`."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, cache.shape[2])
            rows = torch.cat(tokens_of(cache[page], layout), -1)
            rows[:, offset] = torch.cat([key[token], value[token]], -1)
            if layout == "token_major":
                cache[page] = rows
            else:
                first = torch.zeros(1, dtype=torch.int32)
                stage_pages(rows[None], first, cache[page : page + 1], layout, token_major=True)


def attend(
    query: torch.Tensor,
    lists: TokenLists,
    cache: torch.Tensor,
    output: torch.Tensor,
    layout: str,
    scale: float,
    lse: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    remainder: Remainder | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.attend`."""
    units = cache.flatten(0, -3)
    keys, values = (part.flatten(0, 1).double() for part in tokens_of(units, layout))
    group = query.shape[1] // lists.kv_heads
    if lists.starts is not None:  # a row for each query
        count = lists.starts.diff()
        row = torch.arange(len(count)).repeat_interleave(count)
        unseen = lists.starts[1:].repeat_interleave(count) - 1 - torch.arange(len(row))
        lengths = lists.lengths.view(-1, lists.kv_heads)[row] - unseen[:, None]
        of_row = lists.entries.view(
            -1, lists.kv_heads if lists.per_head else 1, lists.entries.shape[1]
        )
        lists = replace(
            lists,
            entries=of_row[row].flatten(0, 1),
            lengths=lengths.clamp(min=0).flatten().int(),
            starts=None,
        )
    for unit, length in enumerate(lists.lengths.tolist()):
        row, head = divmod(unit, lists.kv_heads)
        heads = slice(head * group, (head + 1) * group)
        entries = lists.entries[unit if lists.per_head else row, : -(-length // lists.run)].long()
        units = entries if lists.per_head else entries * lists.kv_heads + head
        stretches = units * lists.run
        chosen = (stretches[:, None] + torch.arange(lists.run)).flatten()[:length]
        logits = query[row, heads].double() @ keys[chosen].T * scale
        if softcap:
            logits = softcap * (logits / softcap).tanh()
        if sinks is not None:
            logits = torch.cat([logits, sinks[heads].double()[:, None]], -1)
        if remainder is not None:
            logits = torch.cat([logits, remainder.lse[row, heads].double()[:, None]], -1)
        nothing = logits.isneginf().all(-1, keepdim=True)
        found = logits.softmax(-1).masked_fill(nothing, 0)
        attended = found[:, :length] @ values[chosen]
        if remainder is not None:
            attended += found[:, -1:] * remainder.values[row, heads].double()
        found = found[:, :length]
        output[row, heads] = attended.to(output.dtype)
        if lse is not None:
            lse[row, heads] = logits.logsumexp(-1).float()
        if weights is not None:
            weights[row, heads, :length] = found.float()


def attend_prompt(
    query: torch.Tensor,
    lists: PromptLists,
    cache: torch.Tensor,
    output: torch.Tensor,
    layout: str,
    scale: float,
    *,
    lse: torch.Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.ops.Ops.attend_prompt`."""
    kv_heads, page_size = lists.kv_heads, cache.shape[-2]
    keys, values = (part.double() for part in tokens_of(cache.flatten(0, -3), layout))
    group = query.shape[1] // kv_heads
    for sequence, (start, end) in enumerate(pairwise(lists.starts.tolist())):
        for head in range(kv_heads):
            row = sequence * kv_heads + head if lists.per_head else sequence
            limits = int(lists.seen[row]) + torch.arange(end - start)
            tokens = torch.arange(int(limits[-1]))
            first = limits[:, None] - (window or len(tokens))
            visible = (tokens < limits[:, None]) & (tokens >= first)
            pages = -(-len(tokens) // page_size)
            units = lists.entries[row, :pages].long()
            units = units if lists.per_head else units * kv_heads + head
            heads = slice(head * group, (head + 1) * group)
            seen = (part[units].flatten(0, 1)[: len(tokens)] for part in (keys, values))
            key, value = seen
            logits = query[start:end, heads].double().transpose(0, 1) @ key.T * scale
            if softcap:
                logits = softcap * (logits / softcap).tanh()
            logits = logits.masked_fill(~visible, -torch.inf)
            if sinks is not None:
                sink = sinks[heads].double()[:, None, None].expand(-1, end - start, 1)
                logits = torch.cat([logits, sink], -1)
            weights = logits.softmax(-1)[..., : len(tokens)]
            for i, of_row in enumerate(visible):  # else 0 * inf of others would be NaN
                attended = weights[:, i, of_row] @ value[of_row]
                output[start + i, heads] = attended.to(output.dtype)
            if lse is not None:
                lse[start:end, heads] = logits.logsumexp(-1).T.float()
