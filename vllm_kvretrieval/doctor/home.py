"""Checks of the disk that a home or a store would lie on."""

import os
import random
import tempfile
import time
from collections.abc import Iterator

from vllm_kvretrieval.doctor.findings import Finding, advice, error
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.storage.home_file import (
    MEMORY_FILE_SYSTEMS,
    can_reserve,
    directory_for,
    file_system,
    free_space,
    keeps_space,
)
from vllm_kvretrieval.system_limits import explained

MIB, GIB = 1 << 20, 1 << 30
SAMPLE = 64 * MIB
"""Bytes that are written and read to see how fast the disk is."""
UNIT = 16 << 10
"""Bytes of a scattered read, about those of a page of a KV head."""
READS = 256
SLOW_READS = 2000
"""Reads of units in a second below which steps often wait for the disk."""


def check_home(path: str | None = None, size: int | None = None) -> Iterator[Finding]:
    """Kind, space and speed of the disk of ``home=disk``.

    Args:
        path: ``home_path`` or ``store``; None: the default place.
        size: Bytes that the home would have, which are reserved for a moment; None: not known.
    """
    try:
        directory = directory_for(path)
        kind, free = file_system(directory), free_space(directory)
        with explained(f"no file of {(size or SAMPLE) / GIB:.2f} GiB can be made in {directory}"):
            reserves, keeps = can_reserve(directory, size or SAMPLE), keeps_space(directory)
            written, units = _speed(directory)
    except RetrievalConfigError as e:
        found, _, remedy = str(e).rstrip(".").partition(". ")
        yield error("home", found, remedy or "name a directory on a disk with --home-path")
        return
    text = f"{directory} on {kind or 'an unknown file system'}, {free / GIB:.1f} GiB free"
    if kind in MEMORY_FILE_SYSTEMS:
        yield advice(
            "home",
            f"{text}; it lies in memory, where a file takes the room that it is to save",
            "name a directory on a disk with kv_retrieval.home_path",
        )
    elif not keeps:
        yield advice(
            "home",
            f"{text}; it copies on write, so space that is reserved is lost when others fill the "
            "disk, and requests end",
            "take ext4 or xfs, or reserve space for the directory (zfs set refreservation)",
        )
    elif not reserves:
        yield advice(
            "home",
            f"{text}; the file system cannot reserve space, so a start writes zeros",
            "take ext4 or xfs for a faster start",
        )
    else:
        yield Finding("home", text)
    speed = f"{written / MIB:.0f} MiB/s written, {units:.0f} scattered reads/s of 16 KiB"
    if units < SLOW_READS:
        yield advice("disk", speed, "take a local SSD: steps wait for pages that they recall")
    else:
        yield Finding("disk", speed)


def _speed(directory: str) -> tuple[float, float]:
    """Bytes that are written in a second, and scattered units that are read from the disk."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        block, began = os.urandom(MIB), time.perf_counter()
        for _ in range(SAMPLE // MIB):
            file.write(block)
        os.fsync(file.fileno())
        written = SAMPLE / (time.perf_counter() - began)
        # What is clean now is dropped from memory, so that it has to be read.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        places = random.Random(0).sample(range(SAMPLE // UNIT), READS)
        began = time.perf_counter()
        for place in places:
            os.pread(file.fileno(), UNIT, place * UNIT)
        return written, READS / (time.perf_counter() - began)
