"""Limits of the system: the memory that it grants, and the remedies when it refuses."""

import contextlib
import errno
import os
import resource
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from vllm_kvretrieval.errors import RetrievalConfigError

ELSEWHERE = "name another directory with kv_retrieval.home_path (or kv_retrieval.store)"
SMALLER = "lower kv_retrieval.home_bytes"
NO_DIRECTORY = f"The directory has to exist: make it, or {ELSEWHERE}"
REMEDIES = {
    errno.ENOSPC: f"The disk has no space (or no inodes) left: {SMALLER}, or {ELSEWHERE}",
    errno.EDQUOT: f"A quota on that disk is used up: raise it, {SMALLER}, or {ELSEWHERE}",
    errno.EFBIG: "A file may have {fsize} (ulimit -f), or what its file system allows: raise the "
    f"limit, {SMALLER}, or {ELSEWHERE}",
    errno.EACCES: f"The server's user may not make files there: allow it, or {ELSEWHERE}",
    errno.EPERM: f"The server's user may not make files there: allow it, or {ELSEWHERE}",
    errno.EROFS: f"The file system is mounted read-only: {ELSEWHERE}",
    errno.ENOENT: NO_DIRECTORY,
    errno.ENOTDIR: NO_DIRECTORY,
    errno.ELOOP: NO_DIRECTORY,
    errno.ENAMETOOLONG: NO_DIRECTORY,
    errno.EIO: f"The disk fails; the system's log (dmesg) says how: mend it, or {ELSEWHERE}",
    errno.ENODEV: f"Files of that file system cannot be mapped: {ELSEWHERE}",
    errno.EMFILE: "The process may have {nofile} files open: raise that limit (ulimit -n)",
    errno.ENFILE: "The whole system has no more files to open: raise fs.file-max",
    errno.ENOMEM: "The process may have {as} of addresses (ulimit -v) and {data} of data "
    "(ulimit -d), the system as many mappings as vm.max_map_count says, and with "
    "vm.overcommit_memory=2 no more memory than it has: raise what is too low, give the KV cache "
    f"less memory (--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE), or {SMALLER}",
    errno.EAGAIN: "The user may have {nproc} threads (ulimit -u), a container or service fewer "
    "(pids.max), and each needs addresses for its stack (ulimit -v); locked memory is limited to "
    "{memlock} (ulimit -l): raise what is too low",
}
"""Remedies by the number of the error. In braces: the process's limits, by their names."""
SCARCE = errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE
"""Errors of a process that has too little of a resource, or may have too little."""
SIZES = "fsize", "as", "data", "memlock"
COUNTS = "nofile", "nproc"
NO_MEMORY = "can't allocate memory"
"""Words of torch's plain RuntimeError when the system refuses memory."""


@contextlib.contextmanager
def explained(what: str, only: Collection[int] | None = None) -> Iterator[None]:
    """Turn errors of the system within the block into errors that say what to do.

    Args:
        what: The option that is concerned, and what the system refuses.
        only: Numbers of the errors that are turned; None: all.

    Raises:
        RetrievalConfigError: Replaces an OSError or MemoryError, or torch's error when memory is
            refused.
    """
    try:
        yield
    except OSError as error:
        code, said = error.errno or 0, error.strerror or str(error)
        if only is not None and code not in only:
            raise
        raise RetrievalConfigError(f"{what} ({said}). {remedy(code)}.") from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and NO_MEMORY not in str(error):
            raise
        said = os.strerror(errno.ENOMEM)
        raise RetrievalConfigError(f"{what} ({said}). {remedy(errno.ENOMEM)}.") from error


def check_directory(directory: str) -> None:
    """Try to make a file in the directory of a home.

    Raises:
        RetrievalConfigError: No file can be made there; says why, and the remedy.
    """
    with explained(f"home_path={directory!r}: no file can be made there"):
        tempfile.TemporaryFile(dir=directory, buffering=0).close()


def remedy(code: int) -> str:
    """The remedy for an error of the system, by its number."""
    limits = {name: _limit(name) for name in (*SIZES, *COUNTS)}
    return REMEDIES.get(code, f"If it stays, {ELSEWHERE}").format(**limits)


def _limit(name: str) -> str:
    """A limit of this process in words."""
    soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
    if soft == resource.RLIM_INFINITY:
        return "any number of" if name in COUNTS else "any amount"
    return str(soft) if name in COUNTS else f"{soft / 2**30:.4g} GiB"


def available_memory() -> int:
    """Bytes of memory that the system and its control groups leave to this process.

    Memory that holds copies of files on disks counts as available: the system takes it back when it
    needs it. Memory of files in memory (tmpfs) does not.
    """
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    available = next(int(size) * 1024 for name, size, *_ in fields if name == "MemAvailable:")
    return max(min([available, *_available_in_groups()]), 0)


def _available_in_groups(
    membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    """Bytes that each control group of this process leaves it, groups above them included.

    Args:
        membership: The file that names the process's groups.
        mounted: The directory with the hierarchies of groups.
    """
    lines = membership.read_text().splitlines() if membership.exists() else ["0::/"]
    for _, controllers, name in (line.split(":", 2) for line in lines):
        if "memory" in controllers.split(","):
            root, below = mounted / "memory", "total_"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif not controllers:
            root, below, limit, usage = mounted, "", "memory.max", "memory.current"
        else:
            continue
        # A container may see its own group as the root, under a name that it has outside only.
        path = root / name.lstrip("/")
        for group in (path, *path.parents):
            with contextlib.suppress(OSError, ValueError):  # no such group, or no limit ("max")
                most, used = (int((group / file).read_text()) for file in (limit, usage))
                statistics = (group / "memory.stat").read_text().splitlines()
                counts = dict(line.split() for line in statistics)
                files = (int(counts[f"{below}{kind}_file"]) for kind in ("active", "inactive"))
                yield most - used + sum(files)
            if group == root:
                break
