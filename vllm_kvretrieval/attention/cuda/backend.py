"""The attention backends that vLLM selects by name: one per preset, all alike."""

import functools
from typing import Any, ClassVar

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.attention.backends.fa_utils import (
    get_flash_attn_version,
    is_flash_attn_varlen_func_available,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvretrieval.attention.cuda.impl import RetrievalAttentionImpl
from vllm_kvretrieval.attention.cuda.metadata import RetrievalMetadataBuilder
from vllm_kvretrieval.attention.cuda.refusals import CAPABILITY, DTYPES, HEAD_SIZES
from vllm_kvretrieval.attention.refusals import KV_CACHE_DTYPES, page_size
from vllm_kvretrieval.retrieval.presets import backend_names


class RetrievalBackend(AttentionBackend):
    """One of vLLM's backends for whole contexts, and decode over selected pages beside it.

    Attributes:
        dense: That backend, the dense half.
    """

    dense: ClassVar[Any]
    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(KV_CACHE_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Our page size, so that vLLM hands out block tables in pages."""
        return [page_size()]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The one where a page's part of each KV head is contiguous."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_SIZES)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= DeviceCapability(*CAPABILITY)

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """Reasons why vLLM cannot use the backend here, or its dense half."""
        reasons = super().validate_configuration(*args, **kwargs)
        if not cls.dense.supports_block_size(size := page_size()):
            reasons.append(f"page_size={size} not supported by {cls.dense.get_name()}")
        return reasons or cls.dense.validate_configuration(*args, **kwargs)

    @classmethod
    def get_impl_cls(cls) -> type[RetrievalAttentionImpl]:
        return impl_over(cls.dense)

    @classmethod
    def get_builder_cls(cls) -> type[RetrievalMetadataBuilder]:
        return builder_over(cls.dense)


@functools.cache
def impl_over(dense: type[AttentionBackend]) -> type[RetrievalAttentionImpl]:
    """The implementation whose dense half is that of a backend."""
    return type("RetrievalAttentionImpl", (RetrievalAttentionImpl,), {"dense": dense})


@functools.cache
def builder_over(dense: type[AttentionBackend]) -> type[RetrievalMetadataBuilder]:
    """The metadata builder whose dense half is that of a backend."""
    return type("RetrievalMetadataBuilder", (RetrievalMetadataBuilder,), {"dense": dense})


def backend_over(
    dense: type[AttentionBackend], name: str, module: str = __name__
) -> type[RetrievalBackend]:
    """The backend of a preset over a backend of vLLM's.

    Args:
        dense: The dense half.
        name: The preset's, in capitals.
        module: Where vLLM finds the class by this name.
    """
    own = {"get_name": staticmethod(lambda: name), "dense": dense, "__module__": module}
    return type(name, (RetrievalBackend,), own)


def dense_half() -> type[AttentionBackend]:
    """vLLM's backend for whole contexts on this GPU: FlashAttention, else Triton's."""
    flash = is_flash_attn_varlen_func_available() and get_flash_attn_version() is not None
    if flash:
        backend = AttentionBackendEnum.FLASH_ATTN.get_class()
        if backend.supports_block_size(page_size()):
            return backend
    return AttentionBackendEnum.TRITON_ATTN.get_class()


def __getattr__(name: str) -> type[RetrievalBackend]:
    """The backend whose name this is in capitals, as ``plugin.py`` registers it."""
    if name.lower() not in backend_names() or not name.isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    backend = globals()[name] = backend_over(dense_half(), name)
    return backend
