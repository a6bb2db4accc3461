"""Schedules: when pages are selected, and which selection a step attends to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """One schedule. ``dense_layers``, or the filters, say which layers are dense.

    Attributes:
        selects: Whether queries select pages beyond sink and window.
        speculates: Whether a step attends to the selection of the previous step's query, except in
            KV heads whose query has turned too far since (FreeKV, sections 3.2 and 3.3). Otherwise
            it attends to the selection of its own query.
        meaning: One line for ``vllm serve --help``.
        shares: Whether some layers, the *filters*, select tokens for the layers after them
            (:mod:`vllm_kvretrieval.retrieval.roles`). Otherwise each layer selects for itself.
        keeps: Whether tokens are selected when a prompt has been read, and the others dropped for
            good (:mod:`vllm_kvretrieval.retrieval.keeping`).
        drops: Whether each step then drops a token for the one that it adds: the worst rated one.
        slides: Whether it drops the earliest of the recent tokens instead, so that what was kept
            for its attention stays.
        by_head: Whether the model's *retrieval heads* (:mod:`vllm_kvretrieval.retrieval.heads`)
            attend to whole contexts, and its other KV heads to sink and window.
        whole: Whether each step attends to the whole context.
    """

    selects: bool
    speculates: bool
    meaning: str
    shares: bool = False
    keeps: bool = False
    drops: bool = False
    slides: bool = False
    by_head: bool = False
    whole: bool = False


SCHEDULES = {
    "speculative": Schedule(True, True, "the previous step's selection, corrected per KV head"),
    "every_step": Schedule(True, False, "each step's own selection"),
    "shared_layers": Schedule(True, False, "filter layers select for others", shares=True),
    "once": Schedule(True, False, "once a prompt has been read, by its attention", keeps=True),
    "running": Schedule(
        True, False, "the same, then each step drops a token", keeps=True, drops=True
    ),
    "sliding": Schedule(
        True,
        False,
        "once, then recent tokens slide: the earliest of them goes at each step",
        keeps=True,
        drops=True,
        slides=True,
    ),
    "by_head": Schedule(
        False,
        False,
        "retrieval heads attend to everything, others to sink and window",
        by_head=True,
    ),
    "never": Schedule(False, False, "no selection: sink and window only"),
    "whole": Schedule(False, False, "no retrieval: full attention at each step", whole=True),
}
