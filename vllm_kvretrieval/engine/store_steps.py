"""What a step of the engine says about the store: the scheduler writes it, and workers read it."""

from dataclasses import dataclass, field

from vllm_kvretrieval.store.records import Record

FIELD = "kv_retrieval_store"
"""Attribute of vLLM's ``SchedulerOutput`` with a :class:`StoreStep`; missing without a store."""


@dataclass
class StoreStep:
    """What becomes of vLLM's blocks, by their numbers.

    Attributes:
        void: Stored blocks that this step overwrites, or that are to be forgotten.
        erase: Blocks that no request of this step or a later one relies on, and whose contents
            nobody may find any more.
        load: Blocks of an earlier run that a request of this step shares for the first time.
        commit: Blocks that are full after this step, with their records, whose sums are missing.
    """

    void: list[int] = field(default_factory=list)
    erase: list[int] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    commit: list[tuple[int, Record]] = field(default_factory=list)
