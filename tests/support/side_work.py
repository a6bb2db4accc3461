"""Side work that runs when the fewest, or the most, have come before it; or in between."""

import random
from functools import partial
from typing import Any


class AtOnce:
    """Runs everything when it is submitted."""

    idle = True

    def submit(self, work):
        work()

    def wait(self):
        pass


class Delayed:
    """Runs nothing before it is waited for."""

    def __init__(self):
        self._submitted = []

    @property
    def idle(self):
        """Whether everything has been waited for."""
        return not self._submitted

    def submit(self, work):
        self._submitted.append(work)

    def wait(self):
        submitted, self._submitted = self._submitted, []
        for work in submitted:
            work()


_launching: Any = None
"""Who takes the launches of interpreted kernels."""
_intercepted = False


def _intercept():
    """Let launches of kernels be taken, from now on in this process."""
    global _intercepted
    if _intercepted:
        return
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def taken(self, *args, **options):
        launch = partial(run, self, *args, **options)
        return launch() if _launching is None else _launching.take(launch)

    InterpretedFunction.run, _intercepted = taken, True


class Interleaved:
    """A stream as a GPU has it: work is Python now, and its launches run between the main ones.

    An op of the kernels is as many launches as it has kernels, other ops are one.

    Args:
        ops: An implementation; side work and main work have to use the attribute of that name.
        seed: Of the draws how many launches of side work run before one of the main work. In half
            of the cases none does, until it is waited for.
    """

    def __init__(self, ops, seed=0):
        self.ops = _Launches(ops, self)
        self._draw = random.Random(seed)
        self._launched = []
        self._submitting = self._late = False

    @property
    def idle(self):
        """Whether everything has been waited for."""
        return not self._launched

    def submit(self, work):
        self._submitting, self._late = True, self._draw.random() < 0.5
        try:
            work()
        finally:
            self._submitting = False

    def wait(self):
        self._run(len(self._launched))

    def launch(self, op, args, options):
        """Run an op of the main work, or take the launches of one of the side work down."""
        global _launching
        if not op.__module__.startswith("vllm_kvretrieval.kernels.triton."):
            self.take(partial(op, *args, **options))
            return
        _intercept()
        _launching = self
        try:
            op(*args, **options)
        finally:
            _launching = None

    def take(self, launch):
        """Run a launch of the main work, or take one of the side work down."""
        if self._submitting:
            self._launched.append(launch)
            return
        if not self._late:
            self._run(self._draw.randint(0, len(self._launched)))
        launch()

    def _run(self, count):
        """Run the next launches of side work; those that they make in turn are a part of them."""
        global _launching
        before, _launching = _launching, None
        try:
            for _ in range(count):
                self._launched.pop(0)()
        finally:
            _launching = before


class _Launches:
    def __init__(self, ops, side):
        self._ops, self._side = ops, side

    def __getattr__(self, name):
        op = getattr(self._ops, name)
        return lambda *args, **options: self._side.launch(op, args, options)
