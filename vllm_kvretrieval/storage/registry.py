"""The choice of the storage that serves an engine."""

from collections.abc import Callable

from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.base import Storage
from vllm_kvretrieval.storage.encoded import Encoded
from vllm_kvretrieval.storage.file import FileFacts
from vllm_kvretrieval.storage.file_pages import FilePages
from vllm_kvretrieval.storage.file_tokens import FileTokens
from vllm_kvretrieval.storage.memory import Memory

__all__ = ["STORAGES", "FileFacts"]


def _in_memory(config: RetrievalConfig, facts: FileFacts | None) -> Storage:
    return Memory(config.rows)


def _in_file(config: RetrievalConfig, facts: FileFacts | None) -> Storage:
    assert facts is not None
    if config.rows:
        return FileTokens(facts)
    streams = bool(config.streaming_attention)
    if config.encoding is not None:
        return Encoded(facts, streams, config.encoding, config.open_pages)
    return FilePages(facts, streams)


STORAGES: dict[str, Callable[[RetrievalConfig, FileFacts | None], Storage]] = {
    "memory": _in_memory,
    "file": _in_file,
}
"""What makes the storage, by where the KV cache has been allocated.

Each takes the options of the engine and, of a file, the home with the fast memory in front of it.
"""
