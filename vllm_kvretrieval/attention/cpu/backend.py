"""The attention backends that vLLM selects by name: one per preset, all alike."""

from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType, MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_kvretrieval.attention.cpu.impl import RetrievalAttentionImpl
from vllm_kvretrieval.attention.cpu.metadata import RetrievalMetadataBuilder
from vllm_kvretrieval.attention.cpu.refusals import DTYPES, HEAD_SIZES
from vllm_kvretrieval.attention.refusals import KV_CACHE_DTYPES, page_size
from vllm_kvretrieval.retrieval.presets import backend_names


class RetrievalBackend(CPUAttentionBackend):
    """vLLM's CPU attention; decode over selected pages where the context exceeds the budget."""

    forward_includes_kv_cache_update = True  # one op of vLLM's less per layer
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Our page size, so that vLLM hands out block tables in pages."""
        return [page_size()]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Reasons why vLLM cannot use the backend here; asked on GPU platforms only."""
        reasons = super().validate_configuration(*args, **kwargs)
        if not current_platform.is_cpu():
            reasons.append("KV retrieval runs on CPUs and NVIDIA GPUs only")
        return reasons

    @staticmethod
    def get_impl_cls() -> type[RetrievalAttentionImpl]:
        return RetrievalAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RetrievalMetadataBuilder]:
        return RetrievalMetadataBuilder


def __getattr__(name: str) -> type[RetrievalBackend]:
    """The backend whose name this is in capitals, as ``plugin.py`` registers it."""
    if name.lower() not in backend_names() or not name.isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    backend = type(name, (RetrievalBackend,), {"get_name": staticmethod(lambda: name)})
    globals()[name] = backend
    return backend
