"""Certificates: what a model loses by retrieval, measured before it is served by ``certified``.

They are files that ``vllm-kvretrieval certify`` writes, and those of this package. A certificate
holds figures; whether they pass the gates is decided when it is read.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from vllm_kvretrieval.retrieval.model_files import Kind, ModelFile, name_of, shape_of

SHIPPED = Path(__file__).parent
FORMAT = "vllm-kvretrieval certificate 1"
CERTIFY = "vllm-kvretrieval certify MODEL"
KIND = Kind("certificate", "remove it", FORMAT, CERTIFY)

LEAST_FOUND = 0.5
"""The share of pass keys that full attention has to find for them to tell anything, ..."""
PERPLEXITY = 1.005
"""... the most that the perplexity of a text may grow by, ..."""
DIVERGENCE = 0.01
"""... the largest mean KL to full attention, in nats a token, ..."""
STEP = 1.03
"""... and the longest step, in steps with full attention; times of shared cores differ by 3 %."""

DRAFTS = ("drafts", "lossless")
"""Options that no certificate covers: a step with drafts selects once for several tokens."""

WEIGHTS = "weights"
"""The fact that certificates of this package do not have: they are for a name and a shape."""


@dataclass(frozen=True)
class Quality:
    """Answers to contexts of one length.

    Attributes:
        tokens: Tokens of these contexts.
        keys, found, missed: Pass keys that were asked for, that full attention found, and of these
            those that retrieval did not find.
        whole, perplexity: Perplexity of a text with full attention, and by retrieval.
        divergence: Mean KL to full attention over that text, in nats a token.
    """

    tokens: int
    keys: int
    found: int
    missed: int
    whole: float
    perplexity: float
    divergence: float

    def failures(self) -> list[str]:
        """Gates that these figures do not pass, in words."""
        found, at = [], f"at {self.tokens:,} tokens"
        if not self.found >= LEAST_FOUND * self.keys > 0:
            found.append(
                f"full attention finds {self.found} of {self.keys} pass keys {at}, too few to tell"
            )
        if self.missed:
            found.append(f"{self.missed} of {self.found} pass keys are missed {at}")
        if not 0 < self.perplexity <= PERPLEXITY * self.whole:
            found.append(
                f"perplexity {self.perplexity:.3f} is more than {100 * (PERPLEXITY - 1):g} % above "
                f"{self.whole:.3f} {at}"
            )
        if not self.divergence <= DIVERGENCE:
            found.append(f"KL {self.divergence:.4f} is above {DIVERGENCE:g} {at}")
        return found


@dataclass(frozen=True)
class Steps:
    """Times of decode steps of one context.

    Attributes:
        tokens: Tokens of the context.
        whole_ms, ms: Milliseconds of a step with full attention, and by retrieval.
        ratio: The median of the second over the first, of neighbouring measurements.
    """

    tokens: int
    whole_ms: float
    ms: float
    ratio: float

    def failures(self) -> list[str]:
        """The gate, if these figures do not pass it, in words."""
        if self.ratio <= STEP:
            return []
        return [f"a step takes {self.ratio:.2f} of full attention's time at {self.tokens:,} tokens"]


@dataclass(frozen=True)
class Certificate(ModelFile):
    """The figures of one model by one method.

    Attributes:
        method: Name of the preset.
        options: Options of the engine, as they were written.
        longest: Tokens of the longest context that was measured.
        facts: What the figures depend on beside these, by name.
        quality: Answers, a length each.
        steps: Times, a length each.
        date: The day.
    """

    method: str
    options: Mapping[str, Any]
    longest: int
    facts: Mapping[str, Any]
    quality: tuple[Quality, ...]
    steps: tuple[Steps, ...]
    date: str

    def failures(self) -> list[str]:
        """Gates that the figures do not pass, in words."""
        for measured in (self.quality, self.steps):
            if max((figures.tokens for figures in measured), default=0) < self.longest:
                return [f"answers, or times, were not measured at {self.longest:,} tokens"]
        answers = [why for figures in self.quality for why in figures.failures()]
        return [*answers, *(why for figures in self.steps for why in figures.failures())]

    def differences(self, facts: Mapping[str, Any]) -> list[str]:
        """In what an engine differs from the measured one, in words.

        Args:
            facts: Those of the engine.
        """
        told = dict(facts)
        if self.path.parent == SHIPPED:
            del told[WEIGHTS]
        elif told[WEIGHTS] is None:
            return ["no files with the weights of this model are found"]
        return [
            f"{name} {self.facts.get(name)}, not {value}"
            for name, value in told.items()
            if self.facts.get(name) != value
        ]

    def summary(self) -> str:
        """The figures in a line."""
        kept = sum(q.found - q.missed for q in self.quality)
        growth = max(q.perplexity / q.whole - 1 for q in self.quality)
        ratios = [steps.ratio for steps in self.steps]
        return (
            f"{kept} of {sum(q.found for q in self.quality)} pass keys, perplexity "
            f"{100 * growth:+.2f} %, KL {max(q.divergence for q in self.quality):.4f}, steps "
            f"{min(ratios):.2f} to {max(ratios):.2f} of full attention's time"
        )


def path_for(cache: Path, model: str) -> Path:
    """Where the user's certificate of a model lies.

    Args:
        cache: vLLM's directory of caches.
        model: The model's path, or its place on a hub.
    """
    return cache / "kvretrieval" / "certificates" / f"{name_of(model)}.json"


def read_certificate(path: Path) -> Certificate:
    """Read a file that ``certify`` wrote.

    Raises:
        RetrievalConfigError: It cannot be read, or is of another kind.
    """
    data = KIND.read(path)
    try:
        return Certificate(
            data["model"],
            data["shape"],
            path,
            method=str(data["method"]),
            options=dict(data["options"]),
            longest=_number(data["longest"], int),
            facts=dict(data["facts"]),
            quality=tuple(_figures(Quality, each) for each in data["quality"]),
            steps=tuple(_figures(Steps, each) for each in data["steps"]),
            date=str(data["date"]),
        )
    except (KeyError, TypeError, ValueError):
        raise KIND.refuse(path, "is not whole") from None


Figures = TypeVar("Figures", Quality, Steps)


def _figures(kind: type[Figures], given: Mapping[str, Any]) -> Figures:
    """Figures of one length. Raises `TypeError` if some are missing, or are no numbers."""
    return kind(**{each.name: _number(given[each.name], each.type) for each in fields(kind)})


def _number(value: Any, kind: Any) -> Any:
    """A whole number, or any number. Raises `TypeError` for something else, such as true."""
    if type(value) is not int and type(value) is not kind:
        raise TypeError(f"{value!r} is of another type")
    return value


@functools.cache
def shipped() -> tuple[Certificate, ...]:
    """The files of this package, by their names."""
    return tuple(read_certificate(path) for path in sorted(SHIPPED.glob("*.json")))


def shipped_for(model: str, config: Any) -> Certificate | None:
    """The certificate of this package for a model's name and shape; None: there is none.

    Args:
        model: The model's path, or its place on a hub.
        config: The model's (text) configuration.
    """
    name, shape = name_of(model).lower(), shape_of(config)
    alike = (c for c in shipped() if c.model.lower() == name and c.shape == shape)
    return next(alike, None)
