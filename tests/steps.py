"""Steps as the metadata builder sees them, without an engine around it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from vllm_kvretrieval.attention.cpu.metadata import RetrievalMetadataBuilder
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.engine.requests import RequestTable
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.capacity import Capacity
from vllm_kvretrieval.storage import Memory


class Runner:
    """The part of vLLM's model runner that the table uses."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=[])
        self.requests: dict[str, Any] = {}

    def batch(self, *req_ids: str, **options: Any) -> None:
        """The batch about to run; ``options`` are those of requests that are new in it."""
        self.input_batch.req_ids = list(req_ids)
        for req_id in req_ids:
            params = SamplingParams(extra_args={"kv_retrieval": options.get(req_id, {})})
            self.requests.setdefault(req_id, SimpleNamespace(sampling_params=params))


def request_table(
    config: RetrievalConfig,
    seats: int,
    kv_heads: Sequence[int],
    runner: Any,
    longest: int = 1 << 20,
    **options: Any,
) -> RequestTable:
    """A table of requests for retrieval layers of so many KV heads, as a worker makes it."""
    room = Capacity(config, kv_heads, longest)
    return RequestTable(config, seats, sum(kv_heads), room, runner, **options)


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
    staging = PrefillStaging(page_size, heads, 64, torch.float32, 2048, rows=rows)
    builder.attach(table, page_size, staging, Memory(rows), attends=rows)
    return builder


def split(builder, lens, queries=None, prefilling=None):
    """How a step is split: per request its context, new tokens and whether it reads its prompt."""
    count = len(lens)
    starts = torch.tensor([0, *(queries or [1] * count)], dtype=torch.int32).cumsum(0)
    common = SimpleNamespace(
        query_start_loc_cpu=starts,
        num_reqs=count,
        is_prefilling=torch.tensor(prefilling or [False] * count),
    )
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
    return builder._split(common, dense)
