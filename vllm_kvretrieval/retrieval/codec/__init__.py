"""Codecs for the pages of a slow home: one file per codec."""

from vllm_kvretrieval.retrieval.codec.base import Codec
from vllm_kvretrieval.retrieval.codec.k2v2 import K2V2
from vllm_kvretrieval.retrieval.codec.k4v4 import K4V4
from vllm_kvretrieval.retrieval.codec.k8v4 import K8V4
from vllm_kvretrieval.retrieval.codec.raw import Raw

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw(), K8V4(), K4V4(), K2V2())}
"""All codecs by name."""

RAW = Raw.name

__all__ = ["CODECS", "RAW", "Codec"]
