"""Codecs for the pages of a slow home."""

from vllm_kvretrieval.retrieval.codec.base import Codec
from vllm_kvretrieval.retrieval.codec.quantised import K2V2, K4V4, K8V4
from vllm_kvretrieval.retrieval.codec.raw import Raw
from vllm_kvretrieval.retrieval.codec.sparse import K2V2Sparse, K4V4Sparse

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Raw(), K8V4(), K4V4(), K2V2(), K4V4Sparse(), K2V2Sparse())
}
"""All codecs by name."""

RAW = Raw.name

__all__ = ["CODECS", "RAW", "Codec"]
