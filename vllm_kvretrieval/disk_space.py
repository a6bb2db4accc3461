"""Space of files on disks: reserved, and kept where files are written over and over."""

import array
import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Collection

FS_IOC_GETFLAGS, FS_IOC_SETFLAGS = 0x80086601, 0x40086602
FS_NOCOW_FL = 0x00800000


def write_in_place(fd: int) -> bool:
    """Have an empty file written in place where the file system copies on write, such as btrfs.

    Otherwise space is reserved there for the first write of each block alone: later ones need new
    space, which a full disk does not have. Other file systems refuse the flag, and need none.

    Args:
        fd: Descriptor of the file.

    Returns:
        Whether the file has the flag.
    """
    flags = array.array("i", [0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(fd, FS_IOC_GETFLAGS, flags)
        flags[0] |= FS_NOCOW_FL
        fcntl.ioctl(fd, FS_IOC_SETFLAGS, flags)
        fcntl.ioctl(fd, FS_IOC_GETFLAGS, flags)
        return bool(flags[0] & FS_NOCOW_FL)
    return False


def allocate(fd: int, size: int) -> bool:
    """Reserve the space of a file at once, whose contents stay; False: the file system cannot.

    Raises:
        OSError: There is not so much space, or a quota or limit is in the way.
    """
    # posix_fallocate() would write to every block in silence instead.
    return fallocate(fd, 0, 0, size, (errno.EOPNOTSUPP, errno.ENOSYS))


def fallocate(fd: int, mode: int, offset: int, size: int, absent: Collection[int]) -> bool:
    """Linux' call of this name.

    Args:
        fd: Descriptor of the file, open for writing.
        mode: Flags, such as ``FALLOC_FL_ZERO_RANGE``.
        offset, size: The part of the file, in bytes.
        absent: Errors of file systems that cannot do it.

    Returns:
        Whether the file system can.

    Raises:
        OSError: Any other error.
    """
    call = ctypes.CDLL(None, use_errno=True).fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(fd, mode, offset, size) != 0:
        code = ctypes.get_errno()
        if code in absent:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True
