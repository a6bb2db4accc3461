"""When pages are selected, and which selection a step attends to."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """One schedule. Dense are the layers that ``dense_layers`` names, or the filters say.

    Attributes:
        selects: Whether queries select pages beyond sink and window.
        speculates: Whether a step attends to what the previous step's query selected, except for KV
            heads whose query has turned too far since (FreeKV, sections 3.3 and 3.4). Otherwise it
            attends to what its own query selects.
        meaning: One line.
        shares: Whether some layers, the *filters*, select tokens for the layers after them
            (:mod:`vllm_kvretrieval.retrieval.roles`). Otherwise each layer selects for itself.
        keeps: Whether tokens are selected when a prompt has been read, and the others dropped
            (:mod:`vllm_kvretrieval.retrieval.keeping`): none comes back.
        drops: Whether each step then drops a token for the one that it adds.
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
    "by_head": Schedule(
        False,
        False,
        "retrieval heads attend to everything, others to sink and window",
        by_head=True,
    ),
    "never": Schedule(False, False, "no selection: sink and window only"),
    "whole": Schedule(False, False, "no retrieval: full attention at each step", whole=True),
}
