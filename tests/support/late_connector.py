"""vLLM's example of a KV connector, whose loads may come a step after they were asked for, and may
end within a block."""

from typing import Any

import safetensors.torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ReqMeta,
)


class LateConnector(ExampleConnector):
    """What is late is asked for in one step, loaded at its end, and said to be there after it.

    Attributes:
        late: Of the scheduler's part: whether loads are.
        short: Of the scheduler's part: how many of the last tokens do not count as loaded.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.late, self.short = False, 0
        self._asked: list[tuple[str, ReqMeta]] = []
        self._there: set[str] = set()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        tokens = max(tokens - self.short, 0)
        return tokens, self.late and bool(tokens)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if not (self.late and num_external_tokens):
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        tokens, (blocks,) = list(request.prompt_token_ids), blocks.get_block_ids()
        meta = ReqMeta.make_meta(tokens, blocks, self._block_size, False, [])
        self._asked.append((request.request_id, meta))

    def build_connector_meta(self, scheduler_output):
        meta = super().build_connector_meta(scheduler_output)
        meta.late, self._asked = self._asked, []
        return meta

    def start_load_kv(self, forward_context, **kwargs):
        super().start_load_kv(forward_context, **kwargs)
        for request_id, asked in self._get_connector_metadata().late:
            for name, layer in forward_context.no_compile_layers.items():
                file = self._generate_filename_debug(name, asked.token_ids, [])
                slots = asked.slot_mapping
                pages, offsets = slots // self._block_size, slots % self._block_size
                layer.kv_cache[pages, :, offsets] = safetensors.torch.load_file(file)["kv_cache"]
            self._there.add(request_id)

    def get_finished(self, finished_req_ids):
        there, self._there = self._there, set()
        return None, there
