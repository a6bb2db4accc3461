"""Records: what a store knows of a block, in a form that vouches for itself."""

import struct
import zlib
from typing import NamedTuple

FORMAT = struct.Struct("<32s32sIIQ32s")
CRC = struct.Struct("<I12x")
RECORD_BYTES = 128
"""Records never cross a sector of 512 bytes, so a disk has the old one or the new one."""
assert CRC.size + FORMAT.size == RECORD_BYTES
VOID = bytes(RECORD_BYTES)
KINDS = 4
"""Room for kinds of levels in the numbers of levels."""


class Record(NamedTuple):
    """A block's record.

    Attributes:
        key: 32 bytes; vLLM's hash of the block's tokens, of all tokens before them, of the salt.
        parent: The key of the block before; zeros for the first block of a context.
        number: How many blocks are before it in its context.
        level: The number of its level, see ``vllm_kvretrieval.store.serving.levels``.
        created: Seconds since 1970.
        sum: SHA-256 over the store's id, the rest of the record, and all bytes of the block. So a
            record of one content beside another content is found out, whatever was lost.
    """

    key: bytes
    parent: bytes
    number: int
    level: int
    created: int
    sum: bytes = bytes(32)

    @property
    def kind(self) -> int:
        """The kind of its level (``exactness_levels.Kind``): 0 if it is exact."""
        return self.level % KINDS

    def pack(self) -> bytes:
        """The record as the file has it."""
        body = FORMAT.pack(*self)
        return CRC.pack(zlib.crc32(body)) + body

    def seed(self) -> bytes:
        """What the sum covers beside the store's id and the block."""
        return FORMAT.pack(*self._replace(sum=bytes(32)))


def unpack(data: bytes) -> dict[int, Record]:
    """The records of a file, by block; those that are void or damaged are left out.

    Args:
        data: Bytes of all records.
    """
    found = {}
    view = memoryview(data)
    for block, begin in enumerate(range(0, len(data), RECORD_BYTES)):
        body = view[begin + CRC.size : begin + RECORD_BYTES]
        (crc,) = CRC.unpack_from(view, begin)
        if crc and zlib.crc32(body) == crc:
            found[block] = Record(*FORMAT.unpack(body))
    return found
