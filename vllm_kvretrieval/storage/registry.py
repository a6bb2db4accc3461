"""The choice of the storage that serves an engine."""

from collections.abc import Callable
from typing import NamedTuple

from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.base import Storage, StorageFacts
from vllm_kvretrieval.storage.encoded import Encoded
from vllm_kvretrieval.storage.file import plan_file
from vllm_kvretrieval.storage.file_pages import FilePages
from vllm_kvretrieval.storage.file_tokens import FileTokens
from vllm_kvretrieval.storage.memory import Memory
from vllm_kvretrieval.storage.tier_sizes import Tiers


class Kind(NamedTuple):
    """A kind of storage.

    Attributes:
        make: Makes the storage of an engine.
        plan: Divides memory before, as :func:`plan_file` does; None: vLLM does.
    """

    make: Callable[[RetrievalConfig, StorageFacts], Storage]
    plan: Callable[..., Tiers] | None = None


def _in_memory(config: RetrievalConfig, facts: StorageFacts) -> Storage:
    return Memory(config.token_major)


def _in_file(config: RetrievalConfig, facts: StorageFacts) -> Storage:
    if config.token_major:
        return FileTokens(config, facts)
    kind = FilePages if config.encoding is None else Encoded
    return kind(config, facts)


STORAGES = {"device": Kind(_in_memory), "disk": Kind(_in_file, plan_file)}
"""Kinds of storage, by the value of the option ``home``."""
SLOW = "disk"
"""The kind that ``home=auto`` takes where fast memory does not suffice."""


def slow_kind(config: RetrievalConfig) -> Kind:
    """The kind of storage where not all KV is in fast memory."""
    return STORAGES[SLOW if config.home == "auto" else config.home]


def make_storage(config: RetrievalConfig, facts: StorageFacts) -> Storage:
    """Make the storage of an engine.

    Args:
        config: Options of the engine.
        facts: The engine.
    """
    kind = STORAGES["device"] if facts.tiers is None else slow_kind(config)
    return kind.make(config, facts)
