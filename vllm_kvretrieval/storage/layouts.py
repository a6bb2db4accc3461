"""How the keys of an engine's pages are laid out on this CPU."""

import torch
from vllm.v1.attention.backends import cpu_attn

from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.codec import RAW


def layout_of(
    config: RetrievalConfig, dtype: torch.dtype, head_size: int, page_size: int | None = None
) -> str:
    """The layout of an engine's keys, by vLLM's name of the variant of its kernel that reads it.

    Args:
        config: Options of the engine.
        dtype: Elements of the KV cache.
        head_size: Channels of a head.
        page_size: Tokens of a page; None: those of the engine.
    """
    return chosen(config, cpu_attn._get_attn_isa(dtype, page_size or config.page_size, head_size))


def chosen(config: RetrievalConfig, layout: str) -> str:
    """The layout in place of the one that vLLM chooses.

    Codecs encode keys of plain layouts, and parts are put together by our own kernel, which reads
    these faster. vLLM writes them on a CPU with AMX as well as on others.
    """
    plain = config.codec != RAW or config.streaming_attention
    return "vec" if plain and layout == "amx" else layout
