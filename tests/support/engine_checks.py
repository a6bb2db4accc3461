"""Checks of a whole engine on a device: on a GPU (tests/gpu/test_engine.py), and in an emulation,
where faults are planted that each of them has to find (tests/device/test_gpu_checks.py).

Answers are held against stock vLLM's where whole contexts are attended to. Where selections are,
one layer is held against the specification step by step, and answers against those that the
specification gives in the kernels' place. Kernels of other shapes round otherwise, so tokens may
differ from where two of them are almost equally likely.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pytest

from tests.support import layer_watch
from tests.support.engine import Answer, Request

TIE = 0.1
"""Log-probs that differ by less may change places."""
LIKELIEST = 8
"""Tokens at each place whose log-probs are compared where answers part."""
AGREED = 0.5
"""Least share of tokens up to where answers part. Two of the likeliest are within TIE at about one
place in twelve; after it answers go on from other tokens."""
TIED = 0.02
"""Share of lists in which pages of almost equal scores may have changed places."""

THRESHOLDS = {"correction_threshold": 1.0}, {"correction_threshold": -1.0}


class Engine(Protocol):
    """An engine, wherever it is."""

    def drive(self, requests: Sequence[Request]) -> list[Answer]:
        """See :func:`tests.support.engine.drive`."""
        ...

    def in_worker(self, function: Callable[[Any], Any]) -> Any:
        """What a function of a module returns that the worker has called with itself."""
        ...


@dataclass(frozen=True)
class Case:
    """What an engine is asked.

    Attributes:
        prompts: Of several lengths, at least one within the budget of ``sparse``.
        within: Which of them are.
        tokens: Of answers.
        sparse: Options of requests that attend to a part of their contexts; the engine's own
            budget holds every context.
    """

    prompts: Sequence[list[int]]
    within: Sequence[int]
    tokens: int
    sparse: dict[str, Any]

    def asked(
        self, prompt: list[int], options: dict[str, Any] | None = None, **more: Any
    ) -> Request:
        """A request, as all checks make it."""
        return Request(prompt, self.tokens, options, likeliest=LIKELIEST, **more)

    @property
    def requests(self) -> list[Request]:
        """Sparse ones. Of the first all heads select anew at every step, of the second none does
        after its first step, and of others those whose queries have turned do."""
        rest = len(self.prompts) - len(THRESHOLDS)
        options = [self.sparse | own for own in (*THRESHOLDS, *[{}] * rest)]
        return [self.asked(p, o) for p, o in zip(self.prompts, options, strict=True)]


@dataclass
class Outcome:
    """The answers to a case's requests, and what was seen of a layer's steps.

    Attributes:
        alone: Each request has the engine for itself.
        together: All at once.
        layer: See :meth:`tests.support.layer_watch.Watch.take`.
    """

    alone: list[Answer]
    together: list[Answer]
    layer: Counter[str]


def alone(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    """The answers to requests each of which has the engine for itself."""
    by_itself = (replace(r, arrives=0, aborts=None, cache=False) for r in requests)
    return [engine.drive([request])[0] for request in by_itself]


def whole_contexts(engine: Engine, case: Case, stock: Sequence[Answer]) -> None:
    """A budget that holds the context, or an exact request, gives what stock vLLM gives."""
    for options in ({}, {**case.sparse, "exact": True}):
        mostly_agree(alone(engine, [case.asked(p, options) for p in case.prompts]), stock)
    mostly_agree(engine.drive([case.asked(p, {}) for p in case.prompts]), stock)


def run(engine: Engine, case: Case) -> Outcome:
    """Drive the requests of a case."""
    layer: Counter[str] = Counter()

    def watched(requests: Sequence[Request]) -> list[Answer]:
        answers = engine.drive(requests)
        layer.update(engine.in_worker(layer_watch.take))  # before others write over its context
        return answers

    with placed(engine, layer_watch.watch):
        by_itself = [watched([request])[0] for request in case.requests]
        return Outcome(by_itself, watched(case.requests), layer)


def specified(engine: Engine, case: Case) -> list[Answer]:
    """The answers to the same requests where plain torch attends to selections."""
    with placed(engine, layer_watch.specify):
        return alone(engine, case.requests)


def check_layer(outcome: Outcome) -> None:
    """A layer lists the pages that it should, remembers and holds what it should, and attends to
    it."""
    seen = outcome.layer
    assert min(seen["lists"], seen["attention"]) > 0, seen
    allowed = {"lists": TIED * seen["lists"]}
    names = [name for name in seen if f"wrong {name}" in seen]
    wrong = [
        f"{seen[f'wrong {name}']} of {seen[name]} {name}"
        for name in names
        if seen[f"wrong {name}"] > allowed.get(name, 0)
    ]
    assert not wrong, f"not as specified: {', '.join(wrong)}"


def check_answers(
    outcome: Outcome, case: Case, expected: Sequence[Answer], stock: Sequence[Answer]
) -> None:
    """Answers are those of the specification, by themselves or together, and something is left
    out.

    Args:
        outcome: Of the case.
        case: What was asked.
        expected: See :func:`specified`.
        stock: Answers of stock vLLM, to the same prompts.
    """
    for answers in (outcome.alone, outcome.together):
        mostly_agree(answers, expected)
        for place in case.within:
            agree(answers[place], stock[place])
    beyond = [i for i in range(len(stock)) if i not in case.within]
    assert any(
        outcome.alone[i].logprobs != pytest.approx(stock[i].logprobs, abs=1e-3) for i in beyond
    ), "something is left out"


@contextmanager
def placed(engine: Engine, function: Callable[[Any], Any]) -> Iterator[None]:
    """Something of tests/support/layer_watch.py is in place for a while."""
    engine.in_worker(function)
    try:
        yield
    finally:
        engine.in_worker(layer_watch.leave)


def agree(answer: Answer, expected: Answer) -> int:
    """The number of equal tokens, up to a place where two are almost equally likely to both."""
    assert len(answer.tokens) == len(expected.tokens)
    for i, (token, other) in enumerate(zip(answer.tokens, expected.tokens, strict=True)):
        assert answer.logprobs[i] == pytest.approx(expected.logprobs[i], abs=TIE), f"token {i}"
        if token != other:
            for one in (answer, expected):
                to_one = [one.choices[i].get(t, -math.inf) for t in (token, other)]
                assert to_one[0] == pytest.approx(to_one[1], abs=TIE), f"token {i}"
            return i
    return len(answer.tokens)


def mostly_agree(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Answers agree up to such places, and these come late."""
    agreed = [agree(a, e) for a, e in zip(answers, expected, strict=True)]
    assert sum(agreed) > AGREED * sum(len(a.tokens) for a in answers), agreed
