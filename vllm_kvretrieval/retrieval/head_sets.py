"""Options that name KV heads of a model: by a list, or by a file of measurements of its heads."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite
from typing import Any

import numpy as np

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.files import FILE, HOLDS, as_written, has_file
from vllm_kvretrieval.retrieval.model_files import Kind, ModelFile
from vllm_kvretrieval.values import shortened

OTHERWISE = "a list per retrieval layer of 0 or 1 per KV head"

Flags = tuple[tuple[bool, ...], ...]


def places_of(flags: Flags) -> list[tuple[int, int]]:
    """The place of the layer and the KV head of each flag that is set."""
    return [
        (layer, head) for layer, row in enumerate(flags) for head, flag in enumerate(row) if flag
    ]


@dataclass(frozen=True)
class HeadFile(ModelFile):
    """Measurements of one model's KV heads.

    Attributes:
        layers: Layers with full attention, rising.
    """

    layers: tuple[int, ...]

    @abstractmethod
    def choose(self, share: float) -> Flags:
        """The heads that a share of the KV heads takes, per layer."""


def layers_of(kind: Kind, given: Any, data: Mapping[str, Any]) -> list[int]:
    """The layers of a file, rising.

    Raises:
        RetrievalConfigError: There is no list of them.
    """
    layers = data.get("layers")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise kind.refuse(given, "has no list of layers")
    if layers != sorted({*layers}):
        raise kind.refuse(given, "has no list of layers that rises")
    return layers


def scores_of(rows: Any, layers: int, most: float = float("inf")) -> tuple[tuple[float, ...], ...]:
    """Numbers from 0 to ``most`` per layer and KV head; empty: these are none."""
    if not isinstance(rows, list) or len(rows) != layers:
        return ()
    if not all(isinstance(row, list) and row for row in rows):
        return ()
    if not all(type(x) in (int, float) and 0 <= x <= most and isfinite(x) for x in chain(*rows)):
        return ()
    return tuple(tuple(row) for row in rows)


@dataclass(frozen=True)
class HeadOption:
    """An option that names KV heads.

    Attributes:
        kind: The kind of files that name the heads.
        known: What the files tell of a model, for messages.
        heads: What one of the heads is called, for messages.
        share: The share of the model's heads that is taken by default.
        read: Reads a file.
        shipped: The files of this package.
    """

    kind: Kind
    known: str
    heads: str
    share: float
    read: Callable[[Any], HeadFile]
    shipped: Callable[[], Sequence[HeadFile]]

    @property
    def name(self) -> str:
        """The option's name."""
        return self.kind.option

    def make(self, value: Any) -> "HeadSet":
        """Read the option; None: the files of this package.

        Raises:
            RetrievalConfigError: The option is not valid; says why.
        """
        read = has_file(value)
        given = shortened(as_written(value))
        if isinstance(value, list | tuple):
            return HeadSet(self, given, flags=self._flags(value, given))
        options: Any = {} if value is None else value
        if isinstance(value, str):
            options = {FILE: value}
        names = {FILE, "share"} | ({HOLDS} if read else set())
        known = isinstance(options, Mapping) and not options.keys() - names
        if not known or not isinstance(options.get(FILE, ""), str):
            raise RetrievalConfigError(
                f"{self.name}={given} must be the path of a file that {self.kind.command} wrote, "
                f"{OTHERWISE}, or {{'file': path, 'share': 0.2}}, either of which may be left out."
            )
        share = options.get("share", self.share)
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise RetrievalConfigError(
                f"{self.name}={given}: share must be a number above 0 and up to 1, such as "
                f"{self.share}."
            )
        file = self.read(options if read else options[FILE]) if FILE in options else None
        return HeadSet(self, given, file=file, share=float(share))

    def _flags(self, rows: Sequence[Any], given: str) -> Flags:
        if not rows or not all(isinstance(row, list | tuple) for row in rows):
            raise RetrievalConfigError(f"{self.name}={given} must be {OTHERWISE}.")
        if not all(type(flag) in (int, bool) and flag in (0, 1) for row in rows for flag in row):
            raise RetrievalConfigError(
                f"{self.name}={given} must hold 1 for {self.heads}, and 0 for any other."
            )
        return tuple(tuple(bool(flag) for flag in row) for row in rows)


@dataclass(frozen=True)
class HeadSet:
    """The value of an option that names KV heads.

    Attributes:
        option: The option.
        given: The option's value as the user wrote it, for messages.
        flags: For each retrieval layer, which KV heads are named; None: by measurements.
        file: The measurements; None: those of this package.
        share: The share of the KV heads that is taken.
    """

    option: HeadOption
    given: str
    flags: Flags | None = None
    file: HeadFile | None = None
    share: float = 0.0

    def of(self, model_config: Any, layers: Sequence[int]) -> np.ndarray:
        """bool [len(layers), KV heads]; which heads these are.

        Args:
            model_config: vLLM's model configuration.
            layers: The layers that retrieve, rising.

        Raises:
            RetrievalConfigError: The heads of the model are not known, or the option has another
                shape.
        """
        by_layer, name = self._by_layer(model_config, layers), self.option.name
        count = model_config.get_total_num_kv_heads()
        for layer in layers:
            if layer not in by_layer:
                raise RetrievalConfigError(
                    f"kv_retrieval.{name}={self.given} has no scores of layer {layer}, which "
                    f"retrieves; measure them by '{self.option.kind.command}'."
                )
            if len(by_layer[layer]) != count:
                raise RetrievalConfigError(
                    f"kv_retrieval.{name}={self.given}: {len(by_layer[layer])} KV heads for layer "
                    f"{layer}, which has {count}; give as many."
                )
        return np.array([by_layer[layer] for layer in layers], dtype=bool).reshape(-1, count)

    def _by_layer(self, model_config: Any, layers: Sequence[int]) -> dict[int, tuple[bool, ...]]:
        if self.flags is not None:
            if len(self.flags) != len(layers):
                raise RetrievalConfigError(
                    f"kv_retrieval.{self.option.name}={self.given}: {len(self.flags)} layers, but "
                    f"{len(layers)} retrieve (dense ones attend to everything as they are); give "
                    "as many."
                )
            return dict(zip(layers, self.flags, strict=True))
        model, config, file = model_config.model, model_config.hf_text_config, self.file
        if file is not None:
            self.option.kind.check_model(file, model, config)
        else:
            known = self.option.shipped(), model, config, self.option.known
            file = self.option.kind.of_model(*known)
        return dict(zip(file.layers, file.choose(self.share), strict=True))
