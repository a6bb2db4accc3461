"""File systems of a test's own, where the system lets a test mount some."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")


@contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    """Mount a file system at a directory that is made; the test is skipped where that is refused.

    Args:
        place: The directory.
        arguments: Those of ``mount`` in front of it.
    """
    place.mkdir()
    command = ["mount", *arguments, str(place)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        pytest.skip(f"nothing can be mounted here: {ended.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@contextmanager
def ext4(place: Path, size: int, image: Path) -> Iterator[Path]:
    """Mount a new file system of so many bytes at a directory that is made.

    Args:
        place: The directory.
        size: Of the file system; what holds it may have less.
        image: The file that holds it, which is made.
    """
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("there is no mkfs.ext4")
    with image.open("wb") as made:
        made.truncate(size)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=True)
    with mounted(place, "-o", "loop", str(image)):
        yield place
