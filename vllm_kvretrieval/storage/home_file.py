"""The file of a slow home: its directory, its space there, and the errors of the disk."""

import contextlib
import ctypes
import errno
import io
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib

from vllm_kvretrieval.disk_space import allocate, write_in_place
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.system_limits import available_memory, explained

logger = init_logger("vllm.kvretrieval.home")

DEFAULT_DIRECTORY = "/var/tmp"
"""The Filesystem Hierarchy Standard's place for large temporary files; /tmp is often in memory."""

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
COPYING_FILE_SYSTEMS = ("btrfs", "zfs", "bcachefs")
"""They write to a new place each time, unless :func:`write_in_place` keeps them from it."""
ZEROS = 16 << 20
SYNCED = 256 << 20
"""Zeros that are written before the disk has to have them; others see the file grow meanwhile."""
PROGRESS_S = 10.0
WAIT_BEFORE = 1
"""``SYNC_FILE_RANGE_WAIT_BEFORE``, which Python does not name."""
NO_ANSWER = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EBADF, errno.EPERM)
"""Errors of a system or a file without this call; all other errors are failures of the disk."""


class HomeFile:
    """KV cache of some layers in a file, one layer after the other.

    Unless it is the file of a store, it never has a name that outlives the call that makes it, so
    nothing is left behind when the process ends. Its space is reserved when it is made, so a full
    disk is found at start-up.

    Args:
        directory: The directory of the file.
        layers: Number of layers.
        layer_bytes: Bytes of each layer.
        stored: The file of a store, which has this size and outlives the process; None makes one.

    Attributes:
        fd: The descriptor of the file.

    Raises:
        RetrievalConfigError: There is not enough space, or the system refuses the file; then
            nothing is left of it.
    """

    memory: torch.Tensor
    """int8 [bytes]; what vLLM takes for the cache, and writes to."""

    def __init__(
        self, directory: str, layers: int, layer_bytes: int, stored: io.FileIO | None = None
    ) -> None:
        self.layers, self.layer_bytes, size = layers, layer_bytes, layers * layer_bytes
        self._file = make_file(directory, size) if stored is None else stored
        self._outlives = stored is not None
        self._size = size
        self._named = f"a file of {format_gib(size)} GiB in {directory}"
        self.fd = self._file.fileno()
        self._sync = ctypes.CDLL(None, use_errno=True).sync_file_range
        self._sync.argtypes = ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint

    @contextlib.contextmanager
    def needed(self) -> Iterator[None]:
        """Run a step that the file cannot do without; give its space back if the step fails.

        Raises:
            RetrievalConfigError: The system has refused the step.
        """
        try:
            with explained(f"kv_retrieval.home=disk: {self._named} cannot be used"):
                yield
        except BaseException:
            if not self._outlives:
                os.ftruncate(self.fd, 0)  # whatever still has it open, or mapped
            self._file.close()
            raise

    def begin(self, layer: int) -> int:
        """First byte of a layer, by its number."""
        return layer * self.layer_bytes

    def stage(self, layer: int, runs: np.ndarray, following: np.ndarray | None) -> None:
        """Begin to read parts of the next layer while this one computes; no more than a hint.

        Args:
            layer: This layer's number.
            runs: Parts of this layer, see :func:`~vllm_kvretrieval.storage.mapped.page_runs`.
            following: Parts of the next layer; None if it is not read in place.
        """
        if following is not None and layer + 1 < self.layers:
            start = self.begin(layer + 1)
            with contextlib.suppress(OSError):
                for first, size in following.tolist():
                    os.posix_fadvise(self.fd, start + first, size, os.POSIX_FADV_WILLNEED)

    def unmap(self, layer: int) -> None:
        """Release what :meth:`stage` has mapped of a layer."""

    def note_written(self, size: int) -> None:
        """Count bytes written to ``memory``."""

    def take_lost(self, page_bytes: int) -> set[int]:
        """Ids of pages that could not be read in ``memory``, in some layer.

        Args:
            page_bytes: Bytes of a layer's page.
        """
        return set()

    def take_write_error(self) -> int:
        """The error that has kept the system from writing to the disk since the last call.

        A write call returns when the data is in the system's memory; the system writes it to the
        disk later. If that fails, the system drops the data, and the next read returns the old
        contents of the disk. The system reports this once, when asked, and does not say where.

        Returns:
            The number of the error; 0 if there was none, or if the system cannot say.
        """
        # Behind the end, where there is nothing to wait for.
        if self._sync(self.fd, self._size, 1, WAIT_BEFORE) == 0:
            return 0
        code = ctypes.get_errno()
        return 0 if code in NO_ANSWER else code


def directory_for(home_path: str | None) -> str:
    """The directory of the home's file.

    Args:
        home_path: The directory that the user has named, if any; it is returned as it is.

    Raises:
        RetrievalConfigError: The default directory lies in memory, where the file would be of no
            use, or the system has no directory for temporary files.
    """
    if home_path is not None:
        return home_path
    usable = os.access(DEFAULT_DIRECTORY, os.W_OK | os.X_OK)
    with explained("kv_retrieval.home=disk: there is no directory for temporary files"):
        directory = DEFAULT_DIRECTORY if usable else tempfile.gettempdir()
    if not usable:
        logger.warning_once(
            "home=disk: %s is missing, or this user may not write to it, so the file lies in %s. "
            "Name a directory with kv_retrieval.home_path.",
            DEFAULT_DIRECTORY,
            directory,
        )
    kind = file_system(directory)
    if kind in MEMORY_FILE_SYSTEMS:
        raise RetrievalConfigError(
            f"kv_retrieval.home=disk: {directory} lies in memory ({kind}), where a file takes the "
            "room that it is to save. Name a directory on a disk with kv_retrieval.home_path; one "
            "in memory is taken if it is named there."
        )
    return directory


def file_system(directory: str) -> str:
    """Kind of the file system that holds the directory, such as ``ext4``; empty if unknown.

    Raises:
        RetrievalConfigError: There is no such directory, or it may not be read.
    """
    with explained(_refused(directory)):
        device = Path(directory).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    mounts, table = Path("/proc/self/mountinfo"), ""
    with contextlib.suppress(OSError):
        table = mounts.read_text() if mounts.exists() else ""
    for line in table.splitlines():
        mount, _, details = line.partition(" - ")
        if mount.split()[2] == wanted:
            return details.split()[0]
    return ""


def free_space(directory: str) -> int:
    """Bytes that files in the directory may take; in memory, no more than is free there.

    Files in memory can end a server like any memory that it cannot have: by a signal, without an
    error. Memory for files on disks is lent: the system takes it back when it needs it.
    """
    with explained(_refused(directory)):
        disk = os.statvfs(directory)
        free = disk.f_bavail * disk.f_frsize
        in_memory = file_system(directory) in MEMORY_FILE_SYSTEMS
        return min(free, available_memory()) if in_memory else free


def check_room(directory: str, size: int, workers: int = 1, memory: int = 0) -> None:
    """Find out whether the files of all workers on this machine fit, before any is made.

    Args:
        directory: The directory of the files.
        size: Bytes of each file.
        workers: Number of workers.
        memory: Bytes of memory that each worker has yet to take; they count if the directory lies
            in memory, too.

    Raises:
        RetrievalConfigError: The files do not fit; says by how much, and the remedy.
    """
    free = free_space(directory)
    if file_system(directory) in MEMORY_FILE_SYSTEMS:
        free = max(0, free - workers * memory)
    if workers * size > free:
        raise _too_small(directory, size, workers, free)


def make_file(directory: str, size: int) -> io.FileIO:
    """Make a file without a name and reserve its space.

    Raises:
        RetrievalConfigError: See :func:`check_room` and :func:`reserve`.
    """
    check_room(directory, size)
    with explained(_refused(directory)):
        file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
    try:
        reserve(file.fileno(), size, directory)
    except BaseException:
        file.close()  # what has been reserved is free again
        raise
    return file


def reserve(fd: int, size: int, directory: str) -> None:
    """Give a new file, which is empty, its size and its space on the disk.

    If the file system has no call for that, zeros are written, with a line in the log now and then.

    A limit of the size of files (``ulimit -f``) is an error like the others, since Python ignores
    SIGXFSZ from its start on; otherwise that signal would end the process.

    Args:
        fd: Descriptor of the file.
        size: Bytes.
        directory: The home's directory, for messages.

    Raises:
        RetrievalConfigError: The disk is full, or the system refuses it for another reason.
    """
    with explained(_refused(directory, size)):
        if not write_in_place(fd) and file_system(directory) in COPYING_FILE_SYSTEMS:
            logger.warning(
                "home=disk: the file system of %s writes to a new place each time, so space that "
                "is reserved there does not stay: others who fill the disk end requests.",
                directory,
            )
        try:
            if not allocate(fd, size):
                _write_zeros(fd, size, directory)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise _too_small(directory, size, 1, free_space(directory)) from error


def keeps_space(directory: str) -> bool:
    """Whether files in the directory keep the space that is reserved when they are written again.

    Raises:
        OSError: No file can be made there.
    """
    if file_system(directory) not in COPYING_FILE_SYSTEMS:
        return True
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        return write_in_place(file.fileno())


def can_reserve(directory: str, size: int) -> bool:
    """Whether space for a file is reserved at once, for a moment; False: the system writes zeros.

    Raises:
        OSError: There is not so much space, or a quota or limit is in the way.
    """
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        return allocate(file.fileno(), size)


def _write_zeros(fd: int, size: int, directory: str) -> None:
    zeros = bytes(min(ZEROS, size))
    noted = time.monotonic()
    logger.info(
        "home=disk: the file system of %s cannot reserve space, so %s GiB of zeros are written.",
        directory,
        format_gib(size),
    )
    done = synced = 0
    while done < size:
        if done - synced >= SYNCED:
            os.fdatasync(fd)
            synced = done
        done += os.pwrite(fd, memoryview(zeros)[: size - done], done)
        if time.monotonic() - noted > PROGRESS_S:
            noted = time.monotonic()
            logger.info("home=disk: %s of %s GiB written.", format_gib(done), format_gib(size))
    os.fsync(fd)  # a disk of another machine (NFS) says only now that it is full


def _refused(directory: str, size: int | None = None) -> str:
    """The message for a file that the system refuses."""
    of = "" if size is None else f" of {format_gib(size)} GiB"
    return f"kv_retrieval.home=disk: a file{of} in {directory} cannot be made"


def _too_small(directory: str, size: int, workers: int, free: int) -> RetrievalConfigError:
    each = "" if workers == 1 else f" for each of {workers} workers"
    kind = file_system(directory)
    lies = f" (it lies in memory, {kind})" if kind in MEMORY_FILE_SYSTEMS else ""
    return RetrievalConfigError(
        f"kv_retrieval.home_bytes: the home needs {format_gib(size)} GiB{each}, but {directory}"
        f"{lies} has {format_gib(free)} GiB free. Lower home_bytes (or --num-gpu-blocks-override), "
        "or name another disk with home_path."
    )
