"""Drafts by the served model itself: steps over the budget's pages between two steps of vLLM's.

They write to the blocks that vLLM has given a request ahead. The step that verifies a draft writes
the same positions anew, with what exact attention makes of them, so nothing of a draft is left.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_kvretrieval.attention.cpu.drafts import DraftedRecords
from vllm_kvretrieval.engine.drafter import Row

if TYPE_CHECKING:
    from vllm_kvretrieval.engine.requests import RequestTable
    from vllm_kvretrieval.storage.base import Storage


class CpuModelDrafts:
    """See :class:`vllm_kvretrieval.engine.drafter.ModelDrafts`; greedy drafts.

    Args:
        runner: vLLM's V1 model runner.
        requests: The table of running requests.
        storage: Where the KV of the retrieval layers is.
    """

    def __init__(self, runner: Any, requests: "RequestTable", storage: "Storage") -> None:
        self._runner, self._requests, self._storage = runner, requests, storage
        builders = [k.get_metadata_builder() for kinds in runner.attn_groups for k in kinds]
        records = [getattr(builder, "drafts", None) for builder in builders]
        self._drafted = [each for each in records if isinstance(each, DraftedRecords)]

    def room(self, place: int) -> int:
        """Tokens that the blocks hold of the request with this place in the batch."""
        tables = self._runner.input_batch.block_table.block_tables
        return min(int(t.num_blocks_per_row[place]) * int(t.block_size) for t in tables)

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row]) -> list[list[int]]:
        """The drafts of each row."""
        drafts: list[list[int]] = [[] for _ in rows]
        with self._requests.drafting():
            for step in range(max(row.drafts for row in rows)):
                going = [n for n, row in enumerate(rows) if row.drafts > step]
                now = [rows[n] for n in going]
                last = [drafts[n][-1] if step else rows[n].last for n in going]
                for n, token in zip(going, self._step(now, step, last), strict=True):
                    drafts[n].append(token)
            self._requests.set_drafting([row.request for row in rows])
            written = np.array([row.length - 1 for row in rows])
            for records in self._drafted:
                records.note(self._requests.seats, written)
        return drafts

    def _step(self, rows: Sequence[Row], step: int, tokens: Sequence[int]) -> list[int]:
        """The next token of each row.

        Args:
            rows: The rows.
            step: How many tokens each has drafted before.
            tokens: The last token of each, whose keys and values are computed now.
        """
        runner, count = self._runner, len(rows)
        self._requests.set_drafting([row.request for row in rows])
        places = [row.place for row in rows]
        positions = torch.tensor([row.length - 1 + step for row in rows])
        lens = (positions + 1).int()
        starts = torch.arange(count + 1, dtype=torch.int32)
        metadata, slots = dict[str, Any](), dict[str, torch.Tensor]()
        for group, kinds in enumerate(runner.attn_groups):
            table = runner.input_batch.block_table[group]
            blocks = table.get_device_tensor(runner.input_batch.num_reqs)[places]
            inside = positions % table.block_size
            block = blocks[torch.arange(count), positions // table.block_size]
            slot_mapping = block.long() * table.block_size + inside
            common = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=lens,
                num_reqs=count,
                num_actual_tokens=count,
                max_query_len=1,
                max_seq_len=int(lens.max()),
                block_table_tensor=blocks,
                slot_mapping=slot_mapping,
                is_prefilling=torch.zeros(count, dtype=torch.bool),
                seq_lens_cpu_upper_bound=lens,
                positions=positions,
            )
            for kind in kinds:
                built = kind.build_metadata(common)
                metadata |= dict.fromkeys(kind.layer_names, built)
                slots |= dict.fromkeys(kind.layer_names, slot_mapping)
        with set_forward_context(
            metadata, runner.vllm_config, num_tokens=count, slot_mapping=slots
        ):
            hidden = runner.model(
                input_ids=torch.tensor(tokens, dtype=torch.int32),
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        self._storage.end_step(count)
        logits = runner.model.compute_logits(hidden)
        return np.asarray(logits.argmax(-1)).tolist()
