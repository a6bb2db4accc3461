"""Zeros in the place of what a file has, whose space stays reserved."""

import errno

from vllm_kvretrieval.disk_space import fallocate
from vllm_kvretrieval.store.files import write_at

ZERO_RANGE = 0x10
"""``FALLOC_FL_ZERO_RANGE``: space is reserved at once, as what has not been written to yet."""
ZEROS = 1 << 20
REFUSED = errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOSPC, errno.EDQUOT
"""Errors of file systems that have no such call, or no space to note what they have erased."""


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
