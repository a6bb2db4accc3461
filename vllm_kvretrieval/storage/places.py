"""Which kind of storage an engine's options ask for."""

from vllm_kvretrieval.config import RetrievalConfig
from vllm_kvretrieval.storage.base import Storage
from vllm_kvretrieval.storage.encoded import Encoded
from vllm_kvretrieval.storage.file import FileFacts
from vllm_kvretrieval.storage.file_pages import FilePages
from vllm_kvretrieval.storage.file_tokens import FileTokens

__all__ = ["FileFacts", "file_storage"]


def file_storage(facts: FileFacts, config: RetrievalConfig) -> Storage:
    """The storage of an engine whose KV cache is in a file.

    Args:
        facts: The home, and the fast memory in front of it.
        config: Options of the engine.
    """
    if config.rows:
        return FileTokens(facts)
    if config.encoding is not None:
        return Encoded(facts, config.encoding, config.open_pages)
    return FilePages(facts)
