"""Files of a store: private, locked, read and written whole, and erased."""

import contextlib
import errno
import fcntl
import logging
import os
import shlex
import shutil
import stat
import struct
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from vllm_kvretrieval.disk_space import fallocate
from vllm_kvretrieval.errors import RetrievalConfigError

GROUP = 0o070
"""Rights that a volume may give to a group at every start, as Kubernetes does with ``fsGroup``."""
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
POLL_S = 0.05
OPEN = os.O_NOFOLLOW | os.O_CLOEXEC
WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""The system's ``struct flock``: type, whence, start, length (0: all), and no process."""
PIECE = 4096
"""Bytes of a piece of a file, as the system reads and writes them from and to a disk."""
ZERO_RANGE = 0x10
"""``FALLOC_FL_ZERO_RANGE``: space is reserved at once, as what has not been written to yet."""
ZEROS = 1 << 20
REFUSED = errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOSPC, errno.EDQUOT
"""Errors of file systems that have no such call, or no space to note what they have erased."""

logger = logging.getLogger("vllm.kvretrieval.store")
_told = set[Path]()


def keep_private(fd: int, path: Path, top: Path, closed: int = 0o077) -> None:
    """Refuse a file or directory that others have rights to, but take those of a group away.

    The log says once for each directory of stores that rights were taken away.

    Args:
        fd: The descriptor of the file or directory.
        path: The path of the file or directory, for messages.
        top: The directory of all stores.
        closed: Bits of the mode that have to be clear.

    Raises:
        RetrievalConfigError: It belongs to another user, or everybody has rights to it, or a group
            has and they cannot be taken away.
    """
    found = os.fstat(fd)
    user, mode = os.geteuid(), stat.S_IMODE(found.st_mode)
    if found.st_uid != user:
        own = "name a directory of the server's user"
        if not mode & stat.S_IWOTH:
            own = f"as root, run chown -R {user} {shlex.quote(str(top))}, or {own}"
        raise RetrievalConfigError(
            f"store: {path} belongs to user {found.st_uid}, and the server runs as {user}; {own}."
        )
    if mode & closed and not mode & closed & ~GROUP:
        with contextlib.suppress(OSError):
            os.fchmod(fd, mode & ~closed)
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if not mode & closed and top not in _told:
            _told.add(top)
            logger.warning(
                "store: a group had rights to %s or files below it; they are taken away. Of a "
                "volume of Kubernetes, fsGroupChangePolicy: OnRootMismatch leaves modes alone.",
                top,
            )
    if mode & closed:
        close = f"close it: chmod -R go= {shlex.quote(str(top))}/kv-*"
        if path == top:
            close = f"name a new one below it ({top / 'store'}), which the server makes"
        raise RetrievalConfigError(
            f"store: {path} is open to other users (mode {mode:o}), and prompts can be recovered "
            f"from a KV cache; {close}."
        )


class Folder:
    """A directory that is held open; what it contains is opened relative to it.

    Directories and files have to belong to the user and be closed to others, see
    :func:`keep_private`. Symbolic links inside of it are never followed.

    Args:
        fd: Descriptor of the directory; closed by :meth:`close`.
        path: The directory's path, for messages.
        closed: Bits of the mode that have to be clear.
        top: The directory of all stores; None: it is this one.

    Raises:
        RetrievalConfigError: It is open to others, or belongs to another user.
    """

    def __init__(self, fd: int, path: Path, closed: int = 0o077, top: Path | None = None) -> None:
        self.fd, self.path, self._top = fd, path, top or path
        try:
            keep_private(fd, path, self._top, closed)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def at(cls, path: str, make: bool = False) -> "Folder":
        """Open the directory of a path, or make it; others may look at it, but not write to it.

        Args:
            path: The directory's path; the one above it has to exist.
            make: Whether to make it where it does not exist.

        Raises:
            RetrievalConfigError: See the class.
            OSError: It cannot be opened or made.
        """
        if make:
            with contextlib.suppress(FileExistsError):
                Path(path).mkdir(PRIVATE_FOLDER)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return cls(fd, Path(path), 0o022)

    def folder(self, name: str, make: bool = False) -> "Folder":
        """Open a directory inside of this one, or make it; raises as :meth:`at`."""
        if make:
            os.mkdir(name, PRIVATE_FOLDER, dir_fd=self.fd)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | OPEN, dir_fd=self.fd)
        if make:
            os.fchmod(fd, PRIVATE_FOLDER)
        return Folder(fd, self.path / name, top=self._top)

    def make(self, name: str) -> int:
        """Make a file that must not exist yet; its descriptor, for reading and writing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN
        fd = os.open(name, flags, PRIVATE_FILE, dir_fd=self.fd)
        os.fchmod(fd, PRIVATE_FILE)
        return fd

    def open(self, name: str, size: int | None = None, write: bool = False) -> int:
        """Open a file that exists.

        Args:
            name: The file's name in this directory.
            size: Bytes that it has to have; None: any number.
            write: Whether it is written, too.

        Returns:
            The descriptor.

        Raises:
            RetrievalConfigError: It is no file of the user's alone, or has another size.
            OSError: It cannot be opened.
        """
        # A pipe that nobody writes to is opened at once, too.
        mode = (os.O_RDWR if write else os.O_RDONLY) | os.O_NONBLOCK
        fd = os.open(name, mode | OPEN, dir_fd=self.fd)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise RetrievalConfigError(f"store: {self.path / name} is no regular file.")
            keep_private(fd, self.path / name, self._top)
            if size is not None and found.st_size != size:
                raise RetrievalConfigError(
                    f"store: {self.path / name} has {found.st_size} bytes in place of {size}: it "
                    f"was cut off, or is of another store. Remove {self.path}."
                )
        except BaseException:
            os.close(fd)
            raise
        return fd

    def replace(self, name: str, contents: bytes) -> None:
        """Write a small file anew, so that readers find the old or the new contents."""
        new = f".{name}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=self.fd)
        fd = self.make(new)
        try:
            write_at(fd, contents, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(new, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def read(self, name: str) -> bytes:
        """The contents of a small file; raises as :meth:`open`."""
        fd = self.open(name)
        try:
            return bytes(read_at(fd, os.fstat(fd).st_size, 0))
        finally:
            os.close(fd)

    def names(self) -> list[str]:
        """Names of what is inside, sorted."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208 - of a descriptor

    def stat(self, name: str) -> os.stat_result:
        """What the system knows of a file inside."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def rename(self, name: str, new: str) -> None:
        """Give something inside another name, for good."""
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self.sync()

    def unlink(self, name: str) -> None:
        """Remove a file inside of this directory."""
        os.unlink(name, dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Remove a directory inside of this one, with all that it contains."""
        shutil.rmtree(name, dir_fd=self.fd)

    def sync(self) -> None:
        """Wait until the names inside are on the disk."""
        os.fsync(self.fd)

    def close(self) -> None:
        """Close the directory; what was opened in it stays open."""
        os.close(self.fd)


class Lock:
    """A lock that the system drops when the process ends, however it ends.

    It holds against others of this process, too. A process that is forked meanwhile, and starts no
    other program, has it as long as it runs.

    Args:
        folder: Where its file is; made where it is missing.
        name: The file's name.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        try:
            self._fd = folder.open(name, write=True)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.close(folder.make(name))
            self._fd = folder.open(name, write=True)
        self._close = weakref.finalize(self, os.close, self._fd)

    def take(self, patience: float = 0.0, progress: Callable[[], object] = lambda: None) -> bool:
        """Take the lock and note the process in its file; False where somebody else has it.

        Args:
            patience: Seconds to wait for the other one.
            progress: What changes as long as the other one gets on; the wait begins anew then.
        """
        end, before = time.monotonic() + patience, progress()
        while not self._try():
            if (now := progress()) != before:
                end, before = time.monotonic() + patience, now
            if time.monotonic() >= end:
                return False
            time.sleep(POLL_S)
        os.ftruncate(self._fd, 0)
        write_at(self._fd, str(os.getpid()).encode(), 0)
        return True

    def _try(self) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, WHOLE_FILE)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    @property
    def owner(self) -> str:
        """Number of the process that took it last, as that process sees itself."""
        return os.pread(self._fd, 20, 0).decode(errors="replace") or "unknown"

    def close(self) -> None:
        """Drop the lock, as is done when nobody refers to this any more."""
        self._close()


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data, in as many calls as the system takes for it."""
    left = memoryview(data).cast("B")
    while left:
        done = os.pwrite(fd, left, offset)
        if done == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        left, offset = left[done:], offset + done


def read_at(fd: int, size: int, offset: int) -> bytearray:
    """Read so many bytes.

    Raises:
        OSError: They cannot be read, or the file ends before.
    """
    data = bytearray(size)
    read_into(fd, memoryview(data), offset)
    return data


def read_into(fd: int, target: memoryview, offset: int) -> None:
    """Fill memory with what a file has from an offset on; raises as :func:`read_at`."""
    while target:
        done = os.preadv(fd, [target], offset)
        if done == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        target, offset = target[done:], offset + done


def read_pieces(fd: int, size: int) -> bytearray:
    """Read a file from its start on; pieces that cannot be read are zeros."""
    try:
        return read_at(fd, size, 0)
    except OSError:
        pass
    data = bytearray(size)
    for begin in range(0, size, PIECE):
        with contextlib.suppress(OSError):
            piece = read_at(fd, min(PIECE, size - begin), begin)
            data[begin : begin + PIECE] = piece
    return data


def zero(fd: int, offset: int, size: int, slowly: bool = True) -> bool:
    """Replace a part of a file by zeros.

    Args:
        fd: Descriptor of the file, open for writing.
        offset: Where the part begins, in bytes.
        size: Bytes of the part.
        slowly: Whether to write zeros where the file system cannot do it at once.

    Returns:
        Whether that has been done.

    Raises:
        OSError: The system refuses it; a part may have been replaced.
    """
    if _zero_at_once(fd, offset, size):
        return True
    if slowly:
        zeros = memoryview(bytes(min(ZEROS, size)))
        for begin in range(0, size, ZEROS):
            write_at(fd, zeros[: size - begin], offset + begin)
    return slowly


def _zero_at_once(fd: int, offset: int, size: int) -> bool:
    """Do it by a call that writes nothing; False where the file system cannot."""
    return fallocate(fd, ZERO_RANGE, offset, size, REFUSED)
