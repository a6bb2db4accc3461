"""The schedules of a step that vLLM's kernel needs."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata


class Schedule(NamedTuple):
    """For vLLM's kernel, to which every (row, KV head) is a sequence of its own.

    Attributes:
        seq_lens: int32 [rows * kv_heads]; tokens that each attends to, in every layer.
        query_start_loc: int32 [rows * kv_heads + 1]; 0, 1, 2, ...
        scheduler_metadata: vLLM's own.
    """

    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scheduler_metadata: torch.Tensor


class Schedules:
    """Makes schedules for the layers of a metadata builder.

    Args:
        builder: The builder; its sizes are read when they are needed.
        most: Sequences of one token each, at most.
    """

    def __init__(self, builder: Any, most: int) -> None:
        self._of = builder
        self._one_token_starts = torch.arange(most + 1, dtype=torch.int32)

    def of_lists(self, attended: np.ndarray) -> Schedule:
        """For rows whose KV heads each attend to a list of their own.

        Args:
            attended: int [R]; tokens that each head of a row attends to.
        """
        heads = self._of.num_kv_heads
        lengths = torch.from_numpy(np.repeat(attended.astype(np.int32), heads))
        starts = self._one_token_starts[: len(lengths) + 1]
        return Schedule(lengths, starts, self._schedule(lengths, starts, self._of.group, 1))

    def of_rows(
        self, dense: CPUAttentionMetadata, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> CPUAttentionMetadata:
        """The metadata of rows of one token; see :meth:`of_sequences`."""
        starts = self._one_token_starts[: len(seq_lens) + 1]
        return self.of_sequences(dense, starts, seq_lens, block_table)

    def of_sequences(
        self,
        dense: CPUAttentionMetadata,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> CPUAttentionMetadata:
        """vLLM's metadata of some sequences of queries.

        Args:
            dense: vLLM's metadata of the batch.
            query_start_loc: int32 [n + 1]; first query of each, counted from the first of all.
            seq_lens: int32 [n]; tokens of their contexts.
            block_table: int32 [n, >= pages]; page ids in context order.
        """
        heads = self._of.num_heads, self._of.num_kv_heads
        return replace(
            dense,
            num_actual_tokens=int(query_start_loc[-1]),
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=block_table,
            scheduler_metadata=self._schedule(seq_lens, query_start_loc, *heads),
        )

    def _schedule(
        self,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
    ) -> torch.Tensor:
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=seq_lens.shape[0],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self._of.head_dim,
            seq_lens=seq_lens,
            dtype=self._of.dtype,
            query_start_loc=query_start_loc,
            causal=True,
            sliding_window_size=-1,
            isa=self._of.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )


def without_schedule(common: CommonAttentionMetadata) -> CPUAttentionMetadata:
    """vLLM's metadata of a step, but for the schedule, which its kernel alone reads."""
    return CPUAttentionMetadata(
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=common.max_query_len,
        query_start_loc=common.query_start_loc,
        max_seq_len=common.max_seq_len,
        seq_lens=common.seq_lens,
        block_table=common.block_table_tensor,
        slot_mapping=common.slot_mapping,
        scheduler_metadata=None,
    )
