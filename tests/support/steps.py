"""Steps as the metadata builder sees them, without an engine around it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from vllm_kvretrieval.attention.cpu.metadata import RetrievalMetadataBuilder
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.engine.requests import RequestTable
from vllm_kvretrieval.engine.running import Note
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.capacity import Capacity
from vllm_kvretrieval.storage.memory import Memory


class Runner:
    """What a table knows of vLLM's scheduler and model runner: requests, and their order.

    Attributes:
        notes: The table's.
        order: The batch that is about to run.
    """

    def __init__(self) -> None:
        self.notes: dict[str, Note] = {}
        self.order: tuple[str, ...] = ()
        self.table: RequestTable | None = None

    def batch(self, *req_ids: str, **options: Any) -> None:
        """The batch about to run; ``options`` are those of requests that are new in it."""
        assert self.table is not None
        self.order = req_ids
        for req_id in req_ids:
            if req_id not in self.notes:
                self.notes[req_id] = note(**options.get(req_id, {}))
        self.table.admit(req_ids)
        self.table.set_batch(None)


def note(**options: Any) -> Note:
    """Of a request with these options, which decodes."""
    return Note({"kv_retrieval": options}, prompt=0, tokens=0)


def request_table(
    config: RetrievalConfig,
    seats: int,
    kv_heads: Sequence[int],
    runner: Runner,
    longest: int = 1 << 20,
    **options: Any,
) -> RequestTable:
    """A table of requests for retrieval layers of so many KV heads, as a worker makes it."""
    room = Capacity(config, kv_heads, longest)
    heads = sum(kv_heads)
    table = RequestTable(config, seats, heads, room, lambda common: runner.order, **options)
    table.notes, runner.table = runner.notes, table
    return table


def metadata_builder(
    table: RequestTable, heads: int = 1, rows: bool = False
) -> RetrievalMetadataBuilder:
    """A builder for layers of so many KV heads and as many query heads."""
    page_size = table.config.page_size
    builder: Any = object.__new__(RetrievalMetadataBuilder)
    builder.block_size = page_size
    builder.num_heads = builder.num_kv_heads = heads
    builder.group = 1
    builder.head_dim, builder.dtype, builder.isa = 64, torch.float32, "vec"
    staging = PrefillStaging(page_size, heads, 64, torch.float32, 2048, token_major=rows)
    builder.attach(table, page_size, staging, Memory(rows), attends=rows)
    return builder


def split(builder, lens, queries=None, prefilling=None):
    """How a step is split: per request its context, new tokens and whether it reads its prompt."""
    count = len(lens)
    starts = torch.tensor([0, *(queries or [1] * count)], dtype=torch.int32).cumsum(0)
    common = SimpleNamespace(
        query_start_loc_cpu=starts,
        num_reqs=count,
    )
    table = builder.requests
    table.ends[table.seats[:count]] = np.where(prefilling or [False] * count, lens, 0)
    dense = CPUAttentionMetadata(
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(queries or [1]),
        query_start_loc=starts.to(torch.int32),
        max_seq_len=max(lens),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=torch.arange(count * 128, dtype=torch.int32).view(count, 128),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        scheduler_metadata=None,
    )
    return builder._split(common, dense, np.array(lens) - starts.diff().numpy())
