"""The attention of a prompt's last whole chunk, and how much of it sparse prefill leaves."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_kvretrieval.explain.attended import make_chooser
from vllm_kvretrieval.explain.observed_attention import LayerAttention
from vllm_kvretrieval.kernels import reference
from vllm_kvretrieval.methods.page_chunks import PageChunkPlanner, PromptReads, is_late
from vllm_kvretrieval.methods.prompt_chunks import Prompts
from vllm_kvretrieval.options.engine import RetrievalConfig


def last_chunk(config: RetrievalConfig, tokens: int) -> tuple[int, int]:
    """The first token of a prompt's last whole chunk, and the one after its last.

    Args:
        config: Options of an engine with a ``prefill_budget``.
        tokens: Tokens of the prompt.

    Raises:
        ValueError: The method has no such chunks, or the prompt is too short for one that selects.
    """
    assert config.prefill_chunk is not None
    if config.prefill_queries is None:
        raise ValueError(
            f"--prefill-budget: chunks of {config.method} attend to what its filters select, which "
            "is not shown here. Use another method"
        )
    end = tokens // config.prefill_chunk * config.prefill_chunk
    if end - config.prefill_chunk < config.exact_prefill:
        raise ValueError(
            f"--prefill-budget {config.prefill_budget}: a prompt of {tokens} tokens is read with "
            f"full attention; chunks select from {config.exact_prefill} tokens on. Give a longer "
            "text, or a smaller budget"
        )
    return end - config.prefill_chunk, end


class ChunkShares(NamedTuple):
    """How much of a chunk's attention a layer keeps.

    Attributes:
        kept: float32 [kv_heads]; means over the chunk's queries and the query heads of a KV head.
        shares: float64 [kv_heads]; the heads' shares in what is selected, 1 on average.
    """

    kept: torch.Tensor
    shares: torch.Tensor


def chunk_shares(
    config: RetrievalConfig,
    layers: Mapping[int, LayerAttention],
    chunk: tuple[int, int],
    model: Any,
) -> dict[int, ChunkShares]:
    """The share of a chunk's attention that falls on the tokens to which it would attend.

    Args:
        config: Options of an engine with a ``prefill_budget``.
        layers: The model's layers with plain full attention, by number.
        chunk: See :func:`last_chunk`. It is taken for one that is not the last of all.
        model: The model's configuration, as :meth:`PromptShares.of` takes it.

    Returns:
        By layer. Dense layers keep all.
    """
    assert config.prompt_shares is not None
    count = model.hf_text_config.num_hidden_layers
    retrieve = [number for number in layers if number >= config.dense_layers]
    early = {number for number in retrieve if not is_late(config, number, count)}
    rows = config.prompt_shares.of(model, retrieve, early)
    kept = {n: ChunkShares(*[torch.ones(layer.kv_heads)] * 2) for n, layer in layers.items()}
    for number, shares in zip(retrieve, torch.from_numpy(rows).unbind(1), strict=True):
        kept[number] = _kept(config, layers[number], chunk, shares, number not in early)
    return kept


def _kept(
    config: RetrievalConfig,
    layer: LayerAttention,
    chunk: tuple[int, int],
    shares: torch.Tensor,
    late: bool,
) -> ChunkShares:
    assert config.prefill_budget is not None
    assert config.prefill_queries is not None
    (begin, end), size = chunk, config.page_size
    reads = PromptReads(shares=shares.T.numpy())
    planner = PageChunkPlanner(config, layer.kv_heads, reads)
    budget = config.page_budget(config.prefill_budget, key="prefill_budget")
    division = planner.divide(np.array([end]), np.array([end - begin]))
    always = np.array([[budget.sink], [budget.window]])
    pages = torch.arange(-(-end // size), dtype=torch.int32)
    prompts = Prompts(0, division, always, np.array([end + 1]), pages[None], 0, 0)
    chunks = planner.plan(prompts).of_layer(late)
    query = layer.queries_at(begin, end).transpose(0, 1)
    group = len(layer.queries) // layer.kv_heads * config.prefill_queries
    counts = chunks.counts(shares)
    chooser = make_chooser(config, layer, group, int(counts.max()), counts[0])
    reference.plan_decode(chunks.grouped(query, layer.kv_heads), chunks.rows, chooser)
    attended = torch.zeros(layer.kv_heads, len(pages), dtype=torch.bool)
    for head, length in enumerate(chunks.rows.lengths.tolist()):
        attended[head, chunks.rows.lists[head, : -(-length // size)] // layer.kv_heads] = True
    mass = layer.attention(begin, end)[:, :end].unflatten(1, (-1, size)).sum(2)
    return ChunkShares((mass * attended).sum(1), shares[chunks.shares[0]])
