"""Retrieval heads of models (RazorAttention, arXiv 2407.15891, section 3).

They follow from files of scores: files that ``vllm-kvretrieval heads`` writes, and those of this
package.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.values import shortened
from vllm_kvretrieval.retrieval.files import FILE, HOLDS, has_file, path_of
from vllm_kvretrieval.retrieval.model_files import Kind, ModelFile

SHIPPED = Path(__file__).parent
FORMAT = "vllm-kvretrieval heads 1"
MEASURE = "vllm-kvretrieval heads MODEL"
OTHERWISE = "a list per retrieval layer of 0 or 1 per KV head"
KIND = Kind("heads", OTHERWISE, FORMAT, MEASURE)

SHARE = 0.15
"""Share of KV heads that are retrieval heads: the paper's 14 % by induction and 1 % by echo."""
ECHO_PART = 15
"""One in this many retrieval heads is chosen by echo."""
EVERYTHING = 1 << 20
"""Pages that a head with a whole context selects: more than any context has."""

Flags = tuple[tuple[bool, ...], ...]


@dataclass(frozen=True)
class HeadFile(ModelFile):
    """The scores of one model's KV heads.

    Attributes:
        layers: Layers with full attention, rising.
        induction, echo: Per layer, a score per KV head.
    """

    layers: tuple[int, ...]
    induction: tuple[tuple[float, ...], ...]
    echo: tuple[tuple[float, ...], ...]


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


def read_heads(given: Any) -> HeadFile:
    """Read a file that ``vllm-kvretrieval heads`` wrote.

    Args:
        given: Path of the file, or the option whose file has been read.

    Raises:
        RetrievalConfigError: There is no such file, or it is of another kind.
    """
    path, data = path_of(given), KIND.read(given)
    layers = data.get("layers")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise KIND.refuse(path, "has no list of layers")
    induction, echo = (_scores(data.get(name), len(layers)) for name in ("induction", "echo"))
    if not induction or not echo or [*map(len, induction)] != [*map(len, echo)]:
        raise KIND.refuse(path, "has no scores of induction and echo per layer and KV head")
    return HeadFile(data["model"], data["shape"], path, tuple(layers), induction, echo)


def _scores(rows: Any, layers: int) -> tuple[tuple[float, ...], ...]:
    """Empty: these are none."""
    if not isinstance(rows, list) or len(rows) != layers:
        return ()
    if not all(isinstance(row, list) and row for row in rows):
        return ()
    if not all(type(score) in (int, float) and 0 <= score <= 1 for row in rows for score in row):
        return ()
    return tuple(tuple(row) for row in rows)


@functools.cache
def shipped() -> tuple[HeadFile, ...]:
    """The files of this package, by their names."""
    return tuple(read_heads(path) for path in sorted(SHIPPED.glob("*.json")))


@dataclass(frozen=True)
class RetrievalHeads:
    """The value of the option ``heads``.

    Attributes:
        given: The option as the user wrote it, for messages.
        flags: For each retrieval layer, which KV heads are retrieval heads; None: by scores.
        file: The scores; None: those of this package.
        share: Share of the model's KV heads in layers with full attention.
    """

    given: str
    flags: Flags | None = None
    file: HeadFile | None = None
    share: float = SHARE

    def of(self, model_config: Any, layers: Sequence[int]) -> np.ndarray:
        """bool [len(layers), KV heads]; which heads are retrieval heads.

        Args:
            model_config: vLLM's model configuration.
            layers: The layers that retrieve, rising.

        Raises:
            RetrievalConfigError: The heads of the model are not known, or the option has another
                shape.
        """
        by_layer = self._by_layer(model_config, layers)
        count = model_config.get_total_num_kv_heads()
        for layer in layers:
            if layer not in by_layer:
                raise RetrievalConfigError(
                    f"kv_retrieval.heads={self.given} has no scores of layer {layer}, which "
                    f"retrieves; measure them by '{MEASURE}'."
                )
            if len(by_layer[layer]) != count:
                raise RetrievalConfigError(
                    f"kv_retrieval.heads={self.given}: {len(by_layer[layer])} KV heads for layer "
                    f"{layer}, which has {count}; give as many."
                )
        return np.array([by_layer[layer] for layer in layers], dtype=bool).reshape(-1, count)

    def _by_layer(self, model_config: Any, layers: Sequence[int]) -> dict[int, tuple[bool, ...]]:
        if self.flags is not None:
            if len(self.flags) != len(layers):
                raise RetrievalConfigError(
                    f"kv_retrieval.heads={self.given}: {len(self.flags)} layers, but {len(layers)} "
                    "retrieve (dense ones attend to everything as they are); give as many."
                )
            return dict(zip(layers, self.flags, strict=True))
        model, config = model_config.model, model_config.hf_text_config
        file = self.file
        if file is None:
            file = KIND.of_model(shipped(), model, config, "retrieval heads")
        else:
            KIND.check_model(file, model, config)
        chosen = choose_heads(file.induction, file.echo, self.share)
        return dict(zip(file.layers, chosen, strict=True))


def make_heads(value: Any) -> RetrievalHeads:
    """Read the option ``heads``; None: the package's scores.

    Raises:
        RetrievalConfigError: The option is not valid; says why.
    """
    read = has_file(value)
    given = shortened(value[FILE] if read else value)
    if isinstance(value, list | tuple):
        return RetrievalHeads(given, flags=_flags(value, given))
    options: Any = {} if value is None else value
    if isinstance(value, str):
        options = {FILE: value}
    names = {FILE, "share"} | ({HOLDS} if read else set())
    known = isinstance(options, Mapping) and not options.keys() - names
    if not known or not isinstance(options.get(FILE, ""), str):
        raise RetrievalConfigError(
            f"heads={given} must be the path of a file that {MEASURE} wrote, {OTHERWISE}, or "
            "{'file': path, 'share': 0.2}, either of which may be left out."
        )
    share = options.get("share", SHARE)
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise RetrievalConfigError(
            f"heads={given}: share must be a number above 0 and up to 1, such as {SHARE}."
        )
    file = read_heads(options if read else options[FILE]) if FILE in options else None
    return RetrievalHeads(given, file=file, share=float(share))


def _flags(rows: Sequence[Any], given: str) -> Flags:
    if not rows or not all(isinstance(row, list | tuple) for row in rows):
        raise RetrievalConfigError(f"heads={given} must be {OTHERWISE}.")
    if not all(type(flag) in (int, bool) and flag in (0, 1) for row in rows for flag in row):
        raise RetrievalConfigError(
            f"heads={given} must hold 1 for a retrieval head, and 0 for any other."
        )
    return tuple(tuple(bool(flag) for flag in row) for row in rows)
