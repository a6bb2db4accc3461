"""Retrieval heads of models (RazorAttention, arXiv 2407.15891, section 3).

They follow from files of scores: files that ``vllm-kvretrieval heads`` writes, and those of this
package.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvretrieval.retrieval.files import path_of
from vllm_kvretrieval.retrieval.head_sets import (
    OTHERWISE,
    Flags,
    HeadFile,
    HeadOption,
    layers_of,
    scores_of,
)
from vllm_kvretrieval.retrieval.model_files import Kind

SHIPPED = Path(__file__).parent
FORMAT = "vllm-kvretrieval heads 1"
MEASURE = "vllm-kvretrieval heads MODEL"
KIND = Kind("heads", OTHERWISE, FORMAT, MEASURE)

SHARE = 0.15
"""Share of KV heads that are retrieval heads: the paper's 14 % by induction and 1 % by echo."""
ECHO_PART = 15
"""One in this many retrieval heads is chosen by echo."""
EVERYTHING = 1 << 20
"""Pages that a head with a whole context selects: more than any context has."""


@dataclass(frozen=True)
class RetrievalHeadFile(HeadFile):
    """The scores of one model's KV heads.

    Attributes:
        induction, echo: Per layer, a score per KV head.
    """

    induction: tuple[tuple[float, ...], ...]
    echo: tuple[tuple[float, ...], ...]

    def choose(self, share: float) -> Flags:
        """The retrieval heads, a share of the heads of all layers with full attention."""
        return choose_heads(self.induction, self.echo, share)


def choose_heads(
    induction: Sequence[Sequence[float]], echo: Sequence[Sequence[float]], share: float
) -> Flags:
    """The retrieval heads: the heads with the highest induction scores, and by echo among the rest.

    Args:
        induction, echo: Per layer, a score per KV head.
        share: Share of all heads; one at least is chosen.
    """
    places = [(layer, head) for layer, row in enumerate(induction) for head in range(len(row))]
    count = max(round(share * len(places)), 1)
    by_echo = round(share * len(places) / ECHO_PART)
    ranked = sorted(places, key=lambda place: -induction[place[0]][place[1]])
    rest = sorted(ranked[count - by_echo :], key=lambda place: -echo[place[0]][place[1]])
    chosen = {*ranked[: count - by_echo], *rest[:by_echo]}
    return tuple(
        tuple((layer, head) in chosen for head in range(len(row)))
        for layer, row in enumerate(induction)
    )


def read_heads(given: Any) -> RetrievalHeadFile:
    """Read a file that ``vllm-kvretrieval heads`` wrote.

    Args:
        given: Path of the file, or the option whose file has been read.

    Raises:
        RetrievalConfigError: There is no such file, or it is of another kind.
    """
    path, data = path_of(given), KIND.read(given)
    layers = layers_of(KIND, path, data)
    induction, echo = (scores_of(data.get(name), len(layers), 1) for name in ("induction", "echo"))
    if not induction or not echo or [*map(len, induction)] != [*map(len, echo)]:
        raise KIND.refuse(path, "has no scores of induction and echo per layer and KV head")
    made = data["model"], data["shape"], path, tuple(layers)
    return RetrievalHeadFile(*made, induction, echo)


@functools.cache
def shipped() -> tuple[RetrievalHeadFile, ...]:
    """The files of this package, by their names."""
    return tuple(read_heads(path) for path in sorted(SHIPPED.glob("*.json")))


OPTION = HeadOption(KIND, "retrieval heads", "a retrieval head", SHARE, read_heads, shipped)
