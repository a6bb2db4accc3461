"""vLLM's attention on a CPU, outside of an engine."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops.setup import Shape


class StockAttention:
    """A step's attention by vLLM's kernel, scheduled once, as an engine does; called by layer.

    vLLM's library is loaded when the first one is made, so that a program may choose which.

    Args:
        starts: int32 [requests + 1]; the first query of each, and the end of the last.
        lens: int32 [requests]; tokens of context, those of the queries included.
        table: int32 [requests, >= blocks]; where the contexts are.
        shape, dtype: Of the layer.
        isa: Variant of the kernel, by vLLM's name.
        scale: Softmax scale.
    """

    def __init__(
        self,
        starts: torch.Tensor,
        lens: torch.Tensor,
        table: torch.Tensor,
        *,
        shape: Shape,
        dtype: torch.dtype,
        isa: str,
        scale: float,
    ) -> None:
        from vllm import _custom_ops as ops

        self.ops: Any = ops
        self.starts, self.lens, self.table, self.scale = starts, lens, table, scale
        self.schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lens),
            num_heads=shape.kv_heads * shape.group,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_size,
            seq_lens=lens,
            dtype=dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=True,
        )

    def __call__(self, query: torch.Tensor, blocks: torch.Tensor, output: torch.Tensor) -> None:
        """Attend in a layer.

        Args:
            query, output: [tokens, kv_heads * group, head_size]; the latter is written.
            blocks: [blocks, kv_heads, block_size, 2 * head_size], as vLLM's kernel lays them out.
        """
        count, kv_heads, size, width = blocks.shape
        keys, values = blocks.view(count, kv_heads, 2 * size, width // 2).chunk(2, dim=2)
        self.ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=keys,
            value_cache=values,
            output=output,
            query_start_loc=self.starts,
            seq_lens=self.lens,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.table,
            softcap=0.0,
            scheduler_metadata=self.schedule,
            s_aux=None,
        )
