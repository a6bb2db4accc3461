"""A dense half in plain torch, in place of FlashAttention."""

from dataclasses import dataclass

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)

from tests.spec.attend import write_cache


@dataclass
class Metadata:
    starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class Builder(AttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, *args):
        super().__init__(*args)
        get_current_vllm_config()  # as FlashAttention's does, to know its version

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        c = common_attn_metadata
        return Metadata(c.query_start_loc, c.seq_lens, c.block_table_tensor)


class Impl(AttentionImpl):
    alibi_slopes = kv_sharing_target_layer_name = None

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
        kv_cache_dtype, logits_soft_cap=None, *_, sinks=None, **__,
    ):  # fmt: skip
        self.scale, self.kv_heads, self.window = scale, num_kv_heads, sliding_window
        self.logits_soft_cap, self.sinks = logits_soft_cap, sinks

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        write_cache(key, value, slot_mapping, kv_cache, "token_major")

    def forward(self, layer, query, key, value, kv_cache, metadata, output, *_, **__):
        if metadata is None:  # a step that only shows what memory it takes
            return output.fill_(0)
        starts, lens = metadata.starts.tolist(), metadata.seq_lens.tolist()
        output.fill_(float("nan"))  # as FlashAttention, this writes what it is to leave out, too
        for row, length in enumerate(lens):
            q = query[starts[row] : starts[row + 1]].float()
            if not length or not len(q):
                continue
            pages = metadata.block_table[row, : -(-length // kv_cache.shape[2])].long()
            context = kv_cache[pages].transpose(0, 1).flatten(1, 2)[:, :length].float()
            k, v = context.chunk(2, dim=-1)
            q = q.unflatten(1, (self.kv_heads, -1)).permute(1, 2, 0, 3)
            scores = q @ k[:, None].transpose(2, 3) * self.scale
            if self.logits_soft_cap:
                scores = self.logits_soft_cap * (scores / self.logits_soft_cap).tanh()
            every = torch.ones(scores.shape[2:], dtype=torch.bool)
            before = length - scores.shape[2]
            masked = every.triu(before + 1)
            if self.window is not None:
                masked |= every.tril(before - self.window)
            scores = scores.masked_fill(masked, float("-inf"))
            total = scores.logsumexp(-1)
            if self.sinks is not None:
                total = total.logaddexp(self.sinks.float().view(*total.shape[:2], 1))
            weights = (scores - total[..., None]).exp()
            attended = (weights @ v[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
            output[starts[row] : starts[row + 1]] = attended.to(output.dtype)
        return output


class Dense(AttentionBackend):
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name():
        return "CUSTOM"  # one of the names that vLLM knows

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]

    @classmethod
    def supports_sink(cls):
        return True

    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return Builder
