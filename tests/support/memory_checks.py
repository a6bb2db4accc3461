"""Every memory access of interpreted kernels, checked as a GPU's threads would make it.

Triton's interpreter runs the programs of a launch one after another, and operations on whole
tensors at once. A GPU does neither: programs run side by side, and the elements of a tensor belong
to threads that wait for each other at barriers only. `install` makes a process check every launch:

- Bounds: each access lies in an element of the tensor whose pointer it was computed from. So no
  canary is needed behind tensors: what would reach one, or a neighbour, is refused before it is
  done.
- Races within a program: two accesses of an address, one of them a store, by threads that may
  differ, and no barrier between them. Accesses of one thread are those of tensors of equal
  pointers, which Triton lays out alike, and stores and atomics of scalars, which thread 0 makes.
- Races between programs: such accesses that no atomic orders. What comes before a barrier and then
  a release in one program comes before what follows the acquire that reads it in another.
- Order: programs run in random order, and one gives way to another at random before and after its
  atomics.
- Memory that nobody has written: `torch.empty` is full of NaN, and of the largest whole numbers.
"""

import itertools
import os
import random
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.deterministic
import triton
from triton.runtime import interpreter

from tests.support import interpreter_speed
from tests.support.passed import Passed

_TAG = 56
"""Bits of a pointer; the number of the tensor that it is of lies above them."""
_ADDRESS = np.uint64((1 << _TAG) - 1)
_OTHERS = str(Path(triton.__file__).parent), interpreter_speed.__file__, __file__
_LOAD, _STORE, _ATOMIC = "load", "store", "atomic"

_numbers = itertools.count()
_launch: Any = None


class AccessError(AssertionError):
    """A launch reads or writes what it must not, or depends on the order of its threads."""


def install() -> None:
    """Check every launch of this process from now on."""
    torch.use_deterministic_algorithms(True)  # which fills what is empty
    builder = interpreter.InterpreterBuilder
    interpreter.GridExecutor.__call__ = _run
    for name, wrap in (
        ("create_masked_load", _checked_load),
        ("create_masked_store", _checked_store),
        ("create_atomic_rmw", _checked_rmw),
        ("create_atomic_cas", _checked_cas),
        ("create_barrier", _checked_barrier),
    ):
        setattr(builder, name, wrap(getattr(builder, name)))


def without_filling(device: str, *, of: Any, **options: Any) -> None:
    """Run a check whose `torch.empty` is larger than what may be touched."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        of(device, **options)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True


def _checked_load(load: Any) -> Any:
    def checked(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return load(self, _launch.access(_LOAD, pointers, mask), mask, *rest)

    return checked


def _checked_store(store: Any) -> Any:
    def checked(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        stripped = _launch.access(_STORE, pointers, mask, value)
        return store(self, stripped, value, mask, *rest)

    return checked


def _checked_rmw(update: Any) -> Any:
    def checked(self: Any, op: Any, pointers: Any, value: Any, mask: Any, sem: Any, *rest: Any):
        with _launch.atomic(pointers, mask, sem) as stripped:
            return update(self, op, stripped, value, mask, sem, *rest)

    return checked


def _checked_cas(swap: Any) -> Any:
    def checked(self: Any, pointers: Any, expected: Any, value: Any, sem: Any, *rest: Any) -> Any:
        with _launch.atomic(pointers, None, sem) as stripped:
            return swap(self, stripped, expected, value, sem, *rest)

    return checked


def _checked_barrier(barrier: Any) -> Any:
    def checked(self: Any, *rest: Any) -> Any:
        _launch.program.barriers += 1
        return barrier(self, *rest)

    return checked


def _run(executor: Any, *args: Any, num_warps: int = 4, **options: Any) -> None:
    """Launch a kernel; in place of ``GridExecutor.__call__``."""
    global _launch
    given = interpreter_speed.arguments(executor.fn, args, options)
    launch = Launch(num_warps)
    values = {
        name: value if name in executor.constexprs else launch.convert(name, value)
        for name, value in given.items()
    }
    grid = executor.grid(values) if callable(executor.grid) else executor.grid
    grid = (*grid, *(1,) * (3 - len(grid)))
    interpreter.interpreter_builder.set_grid_dim(*grid)
    scope, outer, _launch = interpreter._patch_lang(executor.fn), _launch, launch
    try:
        launch.run(lambda: executor.fn(**values), list(np.ndindex(grid)))
    finally:
        _launch = outer
        scope.restore()
    launch.check()


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass
class Program:
    """One program of a launch, while it runs.

    Attributes:
        turn: What it waits for where it has given way to another.
        known: int [programs, 2]; what of others comes before what this one does from now on: all
            before so many barriers, and so many events of thread 0.
    """

    number: int
    index: tuple[int, ...]
    known: np.ndarray
    turn: threading.Lock = field(default_factory=_taken)
    started: bool = False
    barriers: int = 0
    events: int = 0


@dataclass
class Access:
    """One operation of a program on memory.

    Attributes:
        pointers: Of all elements, masked ones too.
        addresses: Of those that are not masked.
        alone: Whether thread 0 makes it.
    """

    kind: str
    program: int
    where: str
    passed: Passed
    pointers: np.ndarray
    addresses: np.ndarray
    size: int
    alone: bool
    barriers: int
    event: int
    known: np.ndarray


class Launch:
    """The accesses of a launch to memory."""

    def __init__(self, warps: int) -> None:
        self._warps = warps
        self._passed: list[Passed] = []
        self._accesses: list[Access] = []
        self._released: dict[int, np.ndarray] = {}
        self._draw = random.Random(next(_numbers))
        self._waiting: list[Program] = []
        self._live: Any = None
        self._faults: set[str] = set()
        self.program: Any = None

    def convert(self, name: str, value: Any) -> Any:
        """An argument as the interpreter takes it; pointers say which tensor they are of."""
        converted = interpreter._implicit_cvt(value)
        if isinstance(value, torch.Tensor):
            self._passed.append(Passed(name, value))
            converted.handle.data = converted.handle.data | np.uint64(len(self._passed) << _TAG)
        return converted

    def access(self, kind: str, pointers: Any, mask: Any, value: Any = None) -> Any:
        """Check an access and remember it; returns pointers that can be followed."""
        data = pointers.data
        stripped = interpreter.TensorHandle(data & _ADDRESS, pointers.dtype)
        chosen = np.broadcast_to(mask.data, data.shape).astype(bool) if mask is not None else ...
        tagged = np.atleast_1d(data[chosen]).ravel()
        if not len(tagged):
            return stripped
        size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        where, tags, addresses = _where(), tagged >> np.uint64(_TAG), tagged & _ADDRESS
        different = np.unique(tags) if (tags != tags[0]).any() else tags[:1]
        of_tensors = [(self._passed[int(t) - 1], addresses[tags == t]) for t in different]
        for passed, own in of_tensors:
            if not passed.holds(own, size):
                raise AccessError(f"{where}: a {kind} outside of {passed.name}")
        if value is not None and len(np.unique(addresses)) < len(addresses):
            stored = np.broadcast_to(value.data, data.shape)[chosen].ravel()
            _, first, of = np.unique(addresses, return_index=True, return_inverse=True)
            if (stored != stored[first][of]).any():
                self._faults.add(f"{where}: elements of a store write different values to a place")
        program, alone = self.program, data.size == 1 and kind != _LOAD
        for passed, own in of_tensors:
            self._accesses.append(
                Access(
                    kind, program.number, where, passed, data, own, size, alone,
                    program.barriers, program.events, program.known,
                )
            )  # fmt: skip
        program.events += alone
        return stripped

    def atomic(self, pointers: Any, mask: Any, sem: Any) -> Any:
        """A context around an atomic operation. Other programs may run before and after it."""
        return _Atomic(self, pointers, mask, sem)

    def acquire(self, address: int) -> None:
        """Order what was released at an address before the next accesses of the program."""
        released = self._released.get(address)
        if released is not None:
            self.program.known = np.maximum(self.program.known, released)

    def release(self, address: int) -> None:
        """Release the accesses of the program before its last barrier, and all accesses of thread
        0."""
        program = self.program
        released = program.known.copy()
        released[program.number] = program.barriers, program.events
        before = self._released.get(address)
        self._released[address] = released if before is None else np.maximum(before, released)

    def run(self, body: Any, indices: list[tuple[int, ...]]) -> None:
        """Run all programs, in random order, one at a time.

        One that gives way to another keeps its thread, and waits there; where none does, all of
        them run in this thread.
        """
        nothing = np.zeros((len(indices), 2), np.int64)
        failures: list[BaseException] = []
        ended = threading.Lock()
        ended.acquire()

        def live(program: Program | None) -> None:
            while program and not program.started:
                program.started = True
                try:
                    if not failures:
                        self._enter(program)
                        body()
                except BaseException as failure:
                    failures.append(failure)
                self._waiting.remove(program)
                program = self._draw.choice(self._waiting) if self._waiting else None
            (program.turn if program else ended).release()

        self._live = live
        self._waiting = [Program(n, index, nothing) for n, index in enumerate(indices)]
        if self._waiting:
            live(self._draw.choice(self._waiting))
            ended.acquire()
        if failures:
            raise failures[0]

    def give_way(self) -> None:
        """Let some program go on, perhaps this one."""
        program, chosen = self.program, self._draw.choice(self._waiting)
        if chosen is program:
            return
        if chosen.started:
            chosen.turn.release()
        else:
            threading.Thread(target=self._live, args=(chosen,), daemon=True).start()
        program.turn.acquire()
        self._enter(program)

    def _enter(self, program: Program) -> None:
        self.program = program
        interpreter.interpreter_builder.set_grid_idx(*program.index)

    def check(self) -> None:
        """Refuse a launch whose result may depend on the order of threads.

        Raises:
            AccessError: It does; names the lines.
        """
        for first, second in self._pairs():
            if first.program != second.program:
                theirs = second.known[first.program]
                ordered = first.barriers < theirs[0] or (first.alone and first.event < theirs[1])
                what = "programs"
            else:
                ordered = first.barriers < second.barriers or self._one_thread(first, second)
                what = "threads"
            if not ordered:
                self._faults.add(
                    f"{what} race for {first.passed.name}: {first.kind} at {first.where}, "
                    f"{second.kind} at {second.where}"
                )
        if self._faults:
            raise AccessError("; ".join(sorted(self._faults)))

    def _one_thread(self, first: Access, second: Access) -> bool:
        """Whether accesses of a program to one address are made by one thread."""
        if self._warps == 1 or (first.alone and second.alone):
            return True
        return first.pointers.size > 1 and np.array_equal(first.pointers, second.pointers)

    def _pairs(self) -> list[tuple[Access, Access]]:
        """Accesses to the same bytes, one of them a store, the earlier one first."""
        written = {
            access.passed.tensor.untyped_storage().data_ptr()
            for access in self._accesses
            if access.kind != _LOAD
        }
        kept = [
            access
            for access in self._accesses
            if access.passed.tensor.untyped_storage().data_ptr() in written
        ]
        if not kept:
            return []
        grain = min(access.size for access in kept)
        places = [
            (
                access.addresses[:, None] // np.uint64(grain)
                + np.arange(access.size // grain, dtype=np.uint64)
            ).ravel()
            for access in kept
        ]
        numbers = np.repeat(np.arange(len(kept)), [len(place) for place in places])
        place = np.concatenate(places)
        order = np.argsort(place, kind="stable")
        place, numbers = place[order], numbers[order]
        kinds = np.array([(_LOAD, _STORE, _ATOMIC).index(access.kind) for access in kept])
        pairs: set[int] = set()
        at = np.arange(len(place))
        for distance in range(1, len(place)):
            at = at[at + distance < len(place)]
            at = at[place[at] == place[at + distance]]
            if not len(at):
                break
            first, second = numbers[at], numbers[at + distance]
            conflict = (first != second) & ((kinds[first] != kinds[second]) | (kinds[first] == 1))
            pairs.update(np.unique(first[conflict] * len(kept) + second[conflict]).tolist())
        return [(kept[pair // len(kept)], kept[pair % len(kept)]) for pair in sorted(pairs)]


class _Atomic:
    def __init__(self, launch: Launch, pointers: Any, mask: Any, sem: Any) -> None:
        self._launch, self._pointers, self._mask = launch, pointers, mask
        name = str(sem).rpartition(".")[2]
        self._acquires = name in ("ACQUIRE", "ACQUIRE_RELEASE")
        self._releases = name in ("RELEASE", "ACQUIRE_RELEASE")

    def __enter__(self) -> Any:
        self._launch.give_way()
        self._addresses = [int(address) for address in self._pointers.data.ravel() & _ADDRESS]
        for address in self._addresses if self._acquires else ():
            self._launch.acquire(address)
        return self._launch.access(_ATOMIC, self._pointers, self._mask)

    def __exit__(self, *_: Any) -> None:
        for address in self._addresses if self._releases else ():
            self._launch.release(address)
        self._launch.give_way()


def _where() -> str:
    """The line of the kernel that is being interpreted."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OTHERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}"
