"""Levels in a store: a record has the number of its block's level, and a file has the level."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.exactness_levels import ANYHOW, EXACT, UNKNOWN, Kind, Level, Reading
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.records import KINDS
from vllm_kvretrieval.store.serving.halves import Fault

FILE = "levels.json"
MOST = 1000
"""Levels that the file has at most."""
BARE: dict[int, Level] = {
    Kind.EXACT: EXACT,
    Kind.DECODED: Level(decoded=ANYHOW),
    Kind.PREFILLED: UNKNOWN,
}
"""The least exact level of each kind: that of a number without a hash."""


class StoredLevels:
    """The levels that a store's records have, by their numbers.

    A number is a :class:`Kind`, and ``KINDS`` times a hash of the level. So a file that is lost,
    older than the records, or of other records, names no wrong level. A number that it does not
    explain stands for the least exact level of its kind, as in records without a hash, which
    earlier versions have written.

    Args:
        folder: The store's directory.
        used: The numbers that records have.
    """

    def __init__(self, folder: Folder, used: Callable[[], Collection[int]]) -> None:
        self._folder, self._used = folder, used
        self._fault = Fault("how exact blocks are cannot be written, so fewer will be shared")
        self._levels: dict[int, Level] = {}
        self._numbers: dict[Level, int] = {}
        self._learn(dict(_read(folder)))

    def level(self, number: int) -> Level:
        """The level that a number stands for."""
        if (known := self._levels.get(number)) is not None:
            return known
        return BARE.get(number % KINDS or number, UNKNOWN)

    def number(self, level: Level) -> int:
        """The number of a level, which is on the disk before a record has it."""
        if (known := self._numbers.get(level)) is not None:
            return known
        number = _number(level)
        if level == BARE[level.kind] or number in self._levels:  # or another one has its hash
            return int(level.kind)
        if len(self._levels) >= MOST:
            used = {*self._used()}
            self._learn({n: known for n, known in self._levels.items() if n in used})
        if len(self._levels) >= MOST:
            self._numbers[level] = int(level.kind)  # other blocks of the request ask, too
            return int(level.kind)
        levels = self._levels | {number: level}
        with self._fault.noted():
            self._folder.replace(FILE, json.dumps(levels).encode())
            self._learn(levels)
        return self._numbers.get(level, int(level.kind))

    def _learn(self, levels: dict[int, Level]) -> None:
        self._levels = levels
        self._numbers = {level: number for number, level in levels.items()}


def _number(level: Level) -> int:
    """The number of a level, of 32 bits."""
    digest = hashlib.sha256(json.dumps(level).encode()).digest()
    return (int.from_bytes(digest[:4], "little") // KINDS or 1) * KINDS + level.kind


def _read(folder: Folder) -> Iterator[tuple[int, Level]]:
    """The levels of the file by their numbers, without damaged ones."""
    try:
        found = json.loads(folder.read(FILE))
        entries = [*found.values()][:MOST] if isinstance(found, dict) else []
    except (OSError, ValueError, RetrievalConfigError):
        entries = []
    for entry in entries:
        try:
            level = Level(*map(_reading, entry))
        except (TypeError, ValueError):
            continue
        yield _number(level), level


def _reading(entry: Any) -> Reading | None:
    if entry is None:
        return None
    rule, measures = entry
    return Reading(str(rule), tuple(map(float, measures)))
