"""Shares of KV heads in the budget of prompts that retrieve.

A head that looks at much of a prompt at once loses more by reading a part of it than one that looks
nearby, and the loss matters more, the more layers follow. Shares that lose least follow from files
of measurements: files that ``vllm-kvretrieval prompt-shares`` writes, and those of this package.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.files import as_written, has_file, path_of
from vllm_kvretrieval.retrieval.head_sets import layers_of, scores_of
from vllm_kvretrieval.retrieval.model_files import Kind, ModelFile
from vllm_kvretrieval.retrieval.shares import UNIFORM, Shares, numbers_of
from vllm_kvretrieval.values import shortened

SHIPPED = Path(__file__).parent
FORMAT = "vllm-kvretrieval prompt-shares 1"
MEASURE = "vllm-kvretrieval prompt-shares MODEL TEXT..."
NAME = "prefill_budget_shares"
OTHERWISE = "uniform, or a list with a number per retrieval layer, or a list of them per KV head"
KIND = Kind(NAME, OTHERWISE, FORMAT, MEASURE)

ONE_IN = (1.5, 2, 3, 4, 6, 8, 12, 16)
"""Heads have shares for each of these: those that lose least where heads select one in so many
tokens on average."""


def nearest(between: np.ndarray, select: np.ndarray) -> np.ndarray:
    """int64 [C]; the place in ``ONE_IN`` of the shares by which each chunk of a prompt selects.

    Args:
        between: int [C]; pages that a chunk selects from.
        select: int [C]; pages that a head selects on average; 0: it does not matter.
    """
    ratios = np.log(np.maximum(between, 1) / np.maximum(select, 1))
    return np.abs(ratios[:, None] - np.log(ONE_IN)).argmin(1)


@dataclass(frozen=True)
class PromptShareFile(ModelFile):
    """How much the selection of one model's KV heads changes.

    Attributes:
        layers: Layers with full attention, rising.
        tokens: Tokens of each text.
        selected: Numbers of tokens that a head selects of them, rising.
        change: Per layer, KV head and such number, the mean square by which the layer's output
            changes if this head alone selects, as a part of the square of the layer's input.
    """

    layers: tuple[int, ...]
    tokens: int
    selected: tuple[int, ...]
    change: tuple[tuple[tuple[float, ...], ...], ...]

    def choose(self, among: Collection[int], one_in: float) -> list[np.ndarray]:
        """The shares that lose least, float64 [KV heads] per layer of the file, 1 on average.

        The loss of a head is its change, once for its own layer and each that follows. Between two
        numbers of tokens it is taken to fall evenly; a head that selects all loses nothing. Tokens
        go to the head that gains most by each, until as many are given away as heads select.

        Args:
            among: Numbers of the layers that share. In others all heads have a share of 1.
            one_in: Heads select one in so many tokens on average.
        """
        count, mean = self.shape["num_hidden_layers"], self.tokens / one_in
        taken = [np.full(len(row), 0.0 if n in among else mean) for n, row in self._rows()]
        steps = [
            (gain, place, head, tokens)
            for place, (number, row) in enumerate(self._rows())
            if number in among
            for head, losses in enumerate(row)
            for gain, tokens in _steps([*self.selected, self.tokens], losses, count - number)
        ]
        left = mean * sum(len(row) for number, row in self._rows() if number in among)
        for _, place, head, tokens in sorted(steps, key=lambda step: -step[0]):
            given = min(tokens, left)
            taken[place][head] += given
            left -= given
        return [row / mean for row in taken]

    def _rows(self) -> list[tuple[int, tuple[tuple[float, ...], ...]]]:
        return [*zip(self.layers, self.change, strict=True)]


def _steps(tokens: Sequence[int], losses: Sequence[float], weight: int) -> list[tuple[float, int]]:
    """A head's loss as steps of its lower convex hull: how much a token gains, and their number."""
    hull: list[tuple[int, float]] = []
    for point in zip(tokens, [*losses, 0.0], strict=True):
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], point):
            hull.pop()
        hull.append(point)
    return [(weight * _gain(one, other), other[0] - one[0]) for one, other in pairwise(hull)]


def _gain(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (one[1] - other[1]) / (other[0] - one[0])


def read_prompt_shares(given: Any) -> PromptShareFile:
    """Read a file that ``vllm-kvretrieval prompt-shares`` wrote.

    Args:
        given: Path of the file, or the option whose file has been read.

    Raises:
        RetrievalConfigError: There is no such file, or it is of another kind.
    """
    path, data = path_of(given), KIND.read(given)
    layers = layers_of(KIND, path, data)
    tokens, selected, rows = (data.get(name) for name in ("tokens", "selected", "change"))
    numbers: list[Any] = [*selected, tokens] if isinstance(selected, list) else []
    rising = all(type(n) is int for n in numbers) and [-1, *numbers] == sorted({-1, *numbers})
    if len(numbers) < 2 or not rising:
        raise KIND.refuse(path, "has no rising numbers of selected tokens, and of all tokens")
    heads = rows if isinstance(rows, list) and len(rows) == len(layers) else []
    change = tuple(scores_of(row, len(row)) if isinstance(row, list) else () for row in heads)
    whole = all(len(losses) == len(numbers) - 1 for row in change for losses in row)
    if not change or not all(change) or not whole:
        raise KIND.refuse(path, "has no changes per layer, KV head and number of selected tokens")
    count = data["shape"]["num_hidden_layers"]
    if type(count) is not int or count <= layers[-1]:
        raise KIND.refuse(path, "has no number of layers")
    of_model = data["model"], data["shape"], path
    return PromptShareFile(*of_model, tuple(layers), numbers[-1], tuple(numbers[:-1]), change)


@functools.cache
def shipped() -> tuple[PromptShareFile, ...]:
    """The files of this package, by their names."""
    return tuple(read_prompt_shares(path) for path in sorted(SHIPPED.glob("*.json")))


@dataclass(frozen=True)
class PromptShares:
    """The value of the option ``prefill_budget_shares``.

    Attributes:
        given: The option as the user wrote it, for messages.
        numbers: Shares that the user gave; None: by measurements.
        file: The measurements; None: those of this package, if they know the model. For others all
            shares are equal.
    """

    given: str
    numbers: Shares | None = None
    file: PromptShareFile | None = None

    @property
    def listed(self) -> bool:
        """Whether the user gave a list, of all layers that retrieve."""
        return self.numbers is not None and not self.numbers.uniform

    @property
    def by_number(self) -> bool:
        """Whether the user names heads by the numbers of their layers."""
        return self.listed or self.file is not None

    def of(
        self, model_config: Any, layers: Sequence[int], early: Collection[int] | None = None
    ) -> np.ndarray:
        """float64 [ONE_IN, len(layers), KV heads]; shares, of measurements 1 on average.

        Args:
            model_config: vLLM's model configuration.
            layers: The layers that retrieve, rising.
            early: The layers in which chunks of prompts select; None: all. Measurements divide the
                budget among these. In others all heads have a share of 1.

        Raises:
            RetrievalConfigError: The option has another shape, or its file is of another model.
        """
        count = model_config.get_total_num_kv_heads()
        model, config, file = model_config.model, model_config.hf_text_config, self.file
        if self.numbers is not None:
            shares = self.numbers.of([count] * len(layers)).reshape(-1, count)
            shares[[early is not None and layer not in early for layer in layers]] = 1
            return np.stack([shares] * len(ONE_IN))
        if file is not None:
            KIND.check_model(file, model, config)
        else:
            file = KIND.find(shipped(), model, config)
        if file is None:
            return np.ones((len(ONE_IN), len(layers), count))
        places = {layer: place for place, layer in enumerate(file.layers)}
        for layer in layers:
            if layer not in places or len(file.change[places[layer]]) != count:
                raise RetrievalConfigError(
                    f"kv_retrieval.{NAME}={self.given} has no measurements of {count} KV heads of "
                    f"layer {layer}, which retrieves; measure them by '{MEASURE}'."
                )
        among = layers if early is None else early
        chosen = [file.choose(among, one_in) for one_in in ONE_IN]
        return np.array([[of_each[places[layer]] for layer in layers] for of_each in chosen])


def make_prompt_shares(value: Any) -> PromptShares:
    """Read the option; None: the files of this package.

    Raises:
        RetrievalConfigError: The option is not valid; says why.
    """
    given = shortened(as_written(value))
    if value is None:
        return PromptShares(given)
    if value == "uniform":
        return PromptShares(given, UNIFORM)
    if isinstance(value, str) or has_file(value):
        return PromptShares(given, file=read_prompt_shares(value))
    if not isinstance(value, list | tuple):
        raise RetrievalConfigError(
            f"{NAME}={given} must be the path of a file that {MEASURE} wrote, or {OTHERWISE}."
        )
    return PromptShares(given, Shares(given, numbers=numbers_of(value, given, NAME), option=NAME))
