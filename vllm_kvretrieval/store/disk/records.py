"""Records: what a store knows of a block, in a form that vouches for itself."""

import struct
import zlib
from typing import NamedTuple

FORMAT = struct.Struct("<32s32sIIQ32s")
HEAD = struct.Struct("<II8x")
"""A sum of what follows, and the group, without which earlier versions have written records."""
RECORD_BYTES = 128
"""Records never cross a sector of 512 bytes, so a disk has the old one or the new one."""
assert HEAD.size + FORMAT.size == RECORD_BYTES
VOID = bytes(RECORD_BYTES)
KINDS = 4
"""Room for kinds of levels in the numbers of levels."""


class Record(NamedTuple):
    """A block's record.

    Attributes:
        key: 32 bytes; vLLM's hash of the block's tokens, of all tokens before them, of the salt.
        parent: The key of the block before; zeros for the first block of a context. Of a block of
            another group than the first: the key of the first group's block in which it ends.
        number: How many blocks of its group are before it in its context.
        level: The number of its level, see ``vllm_kvretrieval.store.serving.levels``.
        created: Seconds since 1970.
        sum: SHA-256 over the store's id, the rest of the record, and all bytes of the block. So a
            record of one content beside another content is found out, whatever was lost.
        group: The group of layers that the block is of; see
            ``vllm_kvretrieval.store.disk.groups``.
    """

    key: bytes
    parent: bytes
    number: int
    level: int
    created: int
    sum: bytes = bytes(32)
    group: int = 0

    @property
    def owner(self) -> bytes:
        """The key of the first group's block that it belongs to; of that group, its own."""
        return self.parent if self.group else self.key

    @property
    def kind(self) -> int:
        """The kind of its level (``exactness_levels.Kind``): 0 if it is exact."""
        return self.level % KINDS

    def pack(self) -> bytes:
        """The record as the file has it."""
        body = FORMAT.pack(*self[:-1])
        return HEAD.pack(zlib.crc32(body, self.group), self.group) + body

    def seed(self) -> bytes:
        """What the sum covers beside the store's id and the block."""
        body = FORMAT.pack(*self._replace(sum=bytes(32))[:-1])
        return body + self.group.to_bytes(4, "little") if self.group else body


def unpack(data: bytes) -> dict[int, Record]:
    """The records of a file, by block; those that are void or damaged are left out.

    Args:
        data: Bytes of all records.
    """
    found = {}
    view = memoryview(data)
    for block, begin in enumerate(range(0, len(data), RECORD_BYTES)):
        body = view[begin + HEAD.size : begin + RECORD_BYTES]
        crc, group = HEAD.unpack_from(view, begin)
        if crc and zlib.crc32(body, group) == crc:
            found[block] = Record(*FORMAT.unpack(body))._replace(group=group)
    return found
