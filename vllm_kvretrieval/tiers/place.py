"""Where the file of a slow home lies: which directory, on what file system, with how much room."""

import ctypes
import errno
import io
import os
import tempfile
import time
from pathlib import Path

from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib

from vllm_kvretrieval.errors import RetrievalConfigError

logger = init_logger("vllm.kvretrieval.home")

DEFAULT_DIRECTORY = "/var/tmp"
"""For large temporary files by the Filesystem Hierarchy Standard; /tmp often lies in memory."""

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
ZEROS = 16 << 20
PROGRESS_S = 10.0


def directory_for(home_path: str | None) -> str:
    """The directory of the home's file.

    Args:
        home_path: What the user has named; then it is that.

    Raises:
        RetrievalConfigError: The default lies in memory, where the file would be of no use.
    """
    if home_path is not None:
        return home_path
    usable = os.access(DEFAULT_DIRECTORY, os.W_OK | os.X_OK)
    place = DEFAULT_DIRECTORY if usable else tempfile.gettempdir()
    kind = file_system(place)
    if kind in MEMORY_FILE_SYSTEMS:
        raise RetrievalConfigError(
            f"kv_retrieval.home=disk: {place} lies in memory ({kind}), where a file takes the room "
            "that it is to save. Name a directory on a disk with kv_retrieval.home_path; one in "
            "memory is taken if it is named there."
        )
    return place


def file_system(directory: str) -> str:
    """Kind of the file system that holds the directory, such as ``ext4``; empty if unknown."""
    device = Path(directory).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    mounts = Path("/proc/self/mountinfo")
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        mount, _, details = line.partition(" - ")
        if mount.split()[2] == wanted:
            return details.split()[0]
    return ""


def check_room(directory: str, size: int, workers: int = 1) -> None:
    """Find out whether the files of all workers on this machine fit, before any is made.

    Args:
        directory: Where they are to lie.
        size: Bytes of each.
        workers: How many there are.

    Raises:
        RetrievalConfigError: They do not; says by how much, and the remedy.
    """
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if workers * size > free:
        raise _too_small(directory, size, workers, free)


def make_file(directory: str, size: int) -> io.FileIO:
    """A file without a name, its space reserved; raises as :func:`check_room`, :func:`reserve`."""
    check_room(directory, size)
    file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
    reserve(file.fileno(), size, directory)
    return file


def reserve(fd: int, size: int, directory: str) -> None:
    """Give a new file its size and its space on the disk.

    Where the file system has no call for that, zeros are written, with a line in the log now and
    then.

    Args:
        fd: Descriptor of the file.
        size: Bytes.
        directory: Where it lies, for messages.

    Raises:
        RetrievalConfigError: The disk is full.
        OSError: Anything else that goes wrong.
    """
    try:
        if not _allocate(fd, size):
            _write_zeros(fd, size, directory)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        disk = os.statvfs(directory)
        raise _too_small(directory, size, 1, disk.f_bavail * disk.f_frsize) from None


def _allocate(fd: int, size: int) -> bool:
    """Reserve the space at once; False where the file system cannot."""
    # posix_fallocate() would write to every block in silence instead.
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while fallocate(fd, 0, 0, size) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def _write_zeros(fd: int, size: int, directory: str) -> None:
    zeros = bytes(min(ZEROS, size))
    noted = time.monotonic()
    logger.info(
        "home=disk: the file system of %s cannot reserve space, so %s GiB of zeros are written.",
        directory,
        format_gib(size),
    )
    done = 0
    while done < size:
        done += os.pwrite(fd, memoryview(zeros)[: size - done], done)
        if time.monotonic() - noted > PROGRESS_S:
            noted = time.monotonic()
            logger.info("home=disk: %s of %s GiB written.", format_gib(done), format_gib(size))


def _too_small(directory: str, size: int, workers: int, free: int) -> RetrievalConfigError:
    each = "" if workers == 1 else f" for each of {workers} workers"
    return RetrievalConfigError(
        f"kv_retrieval.home_bytes: the home needs {format_gib(size)} GiB{each}, but {directory} "
        f"has {format_gib(free)} GiB free. Lower home_bytes (or --max-model-len or --max-num-seqs, "
        "from which its default comes), or name another disk with home_path."
    )
