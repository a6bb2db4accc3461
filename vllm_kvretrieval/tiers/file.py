"""The file of a slow home."""

import contextlib
import ctypes
import errno
import io
import os
from collections.abc import Iterator

import numpy as np
from vllm.utils.mem_utils import format_gib

from vllm_kvretrieval.limits import explained
from vllm_kvretrieval.tiers.place import make_file

WAIT_BEFORE = 1
"""``SYNC_FILE_RANGE_WAIT_BEFORE``, which Python does not name."""
NO_ANSWER = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EBADF, errno.EPERM)
"""Errors of a system or a file without this call; all other errors are failures of the disk."""


class HomeFile:
    """A file whose space is reserved; without a name, it is gone when the process ends.

    Args:
        directory: The directory of the file.
        size: Bytes.
        stored: The file of a store, which has this size and outlives the process; None makes one
            without a name.

    Attributes:
        fd: The descriptor of the file.

    Raises:
        RetrievalConfigError: There is not enough space, or the system refuses the file.
    """

    def __init__(self, directory: str, size: int, stored: io.FileIO | None = None) -> None:
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

    def read_ahead(self, start: int, runs: np.ndarray) -> None:
        """Ask the system to read parts of the file behind ``start`` soon; no more than a hint."""
        with contextlib.suppress(OSError):
            for first, size in runs.tolist():
                os.posix_fadvise(self.fd, start + first, size, os.POSIX_FADV_WILLNEED)

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
