"""Files of llama.cpp's saved slots: longer ones out of short ones."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self.data, self.place)
        self.place += struct.calcsize(layout)
        return values

    def bytes(self, count: int) -> bytes:
        found = self.data[self.place : self.place + count]
        if len(found) != count:
            raise ValueError("the saved slot ends early: its form is not known")
        self.place += count
        return found


def widened(data: bytes, tokens: Sequence[int]) -> bytes:
    """A saved slot of other tokens, whose cells are the saved ones, repeated in their order.

    Args:
        data: A file that llama.cpp's server has saved, of one sequence whose cells have the
            positions 0, 1, and so on.
        tokens: More than the saved ones.

    Raises:
        ValueError: the file has another form than that of the pinned release.
    """
    reader = _Reader(data)
    magic, version, length = reader.take("<III")
    own = reader.take(f"<{length}i")
    streams, cells = reader.take("<II")
    head = own[: length - cells - 1]  # what the server keeps beside the tokens, and a 0 behind them
    if head != (-1, 1, cells) or own[-1] != 0 or streams != 1:
        raise ValueError(f"a saved slot begins by {own[:4]}, of {cells} cells: not a known form")
    for position in range(cells):
        if reader.take("<iII") != (position, 1, 0):
            raise ValueError("a cell of the saved slot has another position than its place")
    transposed, layers, *widths = reader.take("<4I")
    count = len(tokens)
    kept = [head[0], head[1], count, *tokens, 0]
    out = [struct.pack(f"<III{len(kept)}i", magic, version, len(kept), *kept)]
    out.append(struct.pack("<II", streams, count))
    out += [struct.pack("<iII", position, 1, 0) for position in range(count)]
    out.append(struct.pack("<4I", transposed, layers, *widths))
    for by_channel in [False] * layers + [bool(transposed)] * layers:
        if by_channel:  # kind, bytes of an element, channels; then all cells of each channel
            kind, size, channels = reader.take("<iII")
            rows = np.frombuffer(reader.bytes(size * channels * cells), np.uint8)
            rows = rows.reshape(channels, cells, size)
            out.append(struct.pack("<iII", kind, size, channels))
            out.append(np.take(rows, np.arange(count) % cells, axis=1).tobytes())
        else:  # kind, bytes of a cell; then the cells
            kind, size = reader.take("<iQ")
            rows = np.frombuffer(reader.bytes(size * cells), np.uint8).reshape(cells, size)
            out.append(struct.pack("<iQ", kind, size))
            out.append(rows[np.arange(count) % cells].tobytes())
    return b"".join([*out, data[reader.place :]])
