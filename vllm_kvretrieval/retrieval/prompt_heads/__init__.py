"""KV heads that read prompts in full where the others select.

A few heads cause most of the loss of prompts that retrieve: heads that look at much of a prompt at
once, early enough that many layers follow. They are found from files of measurements: files that
``vllm-kvretrieval prompt-heads`` writes, and those of this package.
"""

import functools
from collections.abc import Collection
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
FORMAT = "vllm-kvretrieval prompt-heads 1"
MEASURE = "vllm-kvretrieval prompt-heads MODEL TEXT..."
KIND = Kind("prefill_heads", OTHERWISE, FORMAT, MEASURE)

SHARE = 0.125
"""Share of KV heads that read prompts in full."""


@dataclass(frozen=True)
class PromptHeadFile(HeadFile):
    """How much the selection of one model's KV heads changes.

    Attributes:
        change: Per layer and KV head, the mean square by which a layer's output changes if this
            head selects, as a part of the square of the layer's input.
    """

    change: tuple[tuple[float, ...], ...]

    def choose(self, share: float, among: Collection[int]) -> Flags:
        """The heads that change most, counted once for each layer after their own.

        Only later layers see the change: from the last layer it reaches no other token. The share
        is of the heads in the layers that select; above 0 it takes one at least.
        """
        last = self.shape["num_hidden_layers"] - 1
        loss = {
            (place, head): change * (last - layer)
            for place, (layer, row) in enumerate(zip(self.layers, self.change, strict=True))
            for head, change in enumerate(row)
            if layer in among
        }
        ranked = sorted(loss, key=lambda of: -loss[of])
        count = max(round(share * len(ranked)), 1) if share > 0 else 0
        chosen = {*ranked[:count]}
        return tuple(
            tuple((place, head) in chosen for head in range(len(row)))
            for place, row in enumerate(self.change)
        )


def read_prompt_heads(given: Any) -> PromptHeadFile:
    """Read a file that ``vllm-kvretrieval prompt-heads`` wrote.

    Args:
        given: Path of the file, or the option whose file has been read.

    Raises:
        RetrievalConfigError: There is no such file, or it is of another kind.
    """
    path, data = path_of(given), KIND.read(given)
    layers = layers_of(KIND, path, data)
    change = scores_of(data.get("change"), len(layers))
    if not change or type(data["shape"]["num_hidden_layers"]) is not int:
        raise KIND.refuse(path, "has no changes per layer and KV head, or no number of layers")
    return PromptHeadFile(data["model"], data["shape"], path, tuple(layers), change)


@functools.cache
def shipped() -> tuple[PromptHeadFile, ...]:
    """The files of this package, by their names."""
    return tuple(read_prompt_heads(path) for path in sorted(SHIPPED.glob("*.json")))


OPTION = HeadOption(
    KIND,
    "KV heads to read prompts in full",
    "a head that reads prompts in full",
    SHARE,
    read_prompt_heads,
    shipped,
    optional=True,
)
