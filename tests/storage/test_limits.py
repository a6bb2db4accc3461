"""Limits of the system: each is an error that says what to do, and nothing is left behind."""

import contextlib
import errno
import mmap
import os
import re
import resource
import tempfile
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from tests.support import programs
from tests.support.mounts import ROOT_ONLY, ext4, mounted
from tests.support.server import Server
from vllm_kvretrieval import system_limits
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels.cpu import MappingGuard
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage import home_file
from vllm_kvretrieval.storage.home_file import HomeFile
from vllm_kvretrieval.storage.mapped import DiskHome
from vllm_kvretrieval.system_limits import available_memory, explained

MIB, GIB = 1 << 20, 1 << 30
NOBODY = 65534


@pytest.fixture
def mount(tmp_path):
    """Mounts file systems below the test's directory; they are gone after it."""
    with contextlib.ExitStack() as stack:
        yield lambda name, *options: stack.enter_context(mounted(tmp_path / name, *options))


def disk_home(directory, size=MIB):
    return DiskHome(str(directory), 1, size, MappingGuard)


def config(directory):
    return RetrievalConfig.from_options("freekv", {"home": "disk", "home_path": str(directory)})


# --------------------------------------------------------------------------- what a directory is


@ROOT_ONLY
def test_a_file_system_that_is_read_only(mount):
    directory = mount("read-only", "-t", "tmpfs", "-o", "ro,size=1M", "none")
    for call in (lambda: config(directory), lambda: disk_home(directory)):
        with pytest.raises(
            RetrievalConfigError,
            match=r"\(Read-only file system\)\. .* mounted read-only: name another directory with",
        ):
            call()


@ROOT_ONLY
@pytest.mark.parametrize("mode", [0o755, 0o700], ids=["looked at", "not even that"])
def test_a_directory_of_somebody_else(mode):
    with tempfile.TemporaryDirectory() as outer:
        Path(outer).chmod(mode)
        theirs = Path(outer) / "theirs"
        theirs.mkdir(mode=0o755)
        os.seteuid(NOBODY)
        try:
            refused_to_nobody(theirs)
        finally:
            os.seteuid(0)


def refused_to_nobody(theirs):
    with pytest.raises(
        RetrievalConfigError,
        match=r"home_path='.*theirs': no file .* \(Permission denied\)\. .* user may not make",
    ):
        config(theirs)
    with pytest.raises(RetrievalConfigError, match=r"\(Permission denied\)"):
        disk_home(theirs)


def test_a_directory_that_is_gone(tmp_path):
    """It is gone when the worker starts. If it is gone before, the option is refused."""
    with pytest.raises(RetrievalConfigError, match=r"No such file or directory\)\. .* make it, or"):
        disk_home(tmp_path / "gone")
    with pytest.raises(RetrievalConfigError, match=r"No such file or directory\)\. .* make it, or"):
        home_file.check_room(str(tmp_path / "gone"), 1)
    (tmp_path / "file").touch()
    with pytest.raises(RetrievalConfigError, match=r"Not a directory\)\. .* make it, or"):
        disk_home(tmp_path / "file")


def test_a_system_without_temporary_directories(monkeypatch, tmp_path):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(home_file, "DEFAULT_DIRECTORY", str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(RetrievalConfigError, match=r"No usable .*\)\. .* name another directory"):
        home_file.directory_for(None)


# ------------------------------------------------------------------------ what the system refuses

LIMITED = """
import os, resource, sys
from contextlib import contextmanager
from pathlib import Path
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels.cpu import MappingGuard
from vllm_kvretrieval.storage.encoded import EncodedHome
from vllm_kvretrieval.storage.mapped import DiskHome

where, SIZE = sys.argv[1], 256 << 20

@contextmanager
def limited(which, most):
    kept = resource.getrlimit(which)
    resource.setrlimit(which, (most, kept[1]))
    yield
    resource.setrlimit(which, kept)

def free():
    disk = os.statvfs(where)
    return disk.f_bavail * disk.f_frsize

def addresses():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

def refused(make):
    before = free()
    try:
        make()
    except RetrievalConfigError as error:
        # The error lives, and what it holds on to; the file does not.
        assert before - free() < 64 << 20, "what has been reserved is free again"
        assert where not in Path("/proc/self/maps").read_text()
        assert os.listdir(where) == []
        print(error)
    else:
        print("not refused")

def raw():
    return DiskHome(where, 2, SIZE, MappingGuard)

def encoded():
    return EncodedHome(where, 2, SIZE, SIZE // 8)
"""


def refused_by(program, where):
    """The messages of a process that is short of something, in the order of its calls."""
    ended = programs.run(LIMITED + program, str(where))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_limits_of_a_process(tmp_path):
    """Limits of files' sizes (with its signal), of addresses, of data, and of open files."""
    messages = refused_by(
        """
with limited(resource.RLIMIT_FSIZE, SIZE):
    refused(raw)
with limited(resource.RLIMIT_AS, addresses() + SIZE):
    refused(raw)
    refused(encoded)
with limited(resource.RLIMIT_DATA, SIZE):
    refused(encoded)
for left in range(2):  # for the file, and to map it
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(left + 1)]
    for fd in descriptors:
        os.close(fd)
    with limited(resource.RLIMIT_NOFILE, descriptors[-1]):
        try:
            raw()
        except RetrievalConfigError as error:
            said = error
    print(said)
raw().memory.fill_(1)
print("works")
""",
        tmp_path,
    )
    file = rf"kv_retrieval\.home=disk: a file of 0\.5 GiB in {tmp_path} cannot be "
    expected = [
        file + r"made \(File too large\)\. A file may have 0\.25 GiB \(ulimit -f\), .* raise the",
        file + r"used \(Cannot allocate memory\)\. The process may have .* GiB of addresses",
        r"kv_retrieval\.codec: no addresses .*\(Cannot allocate memory\).*\(ulimit -v\)",
        r"kv_retrieval\.codec: no addresses .*and 0\.25 GiB of data \(ulimit -d\)",
        r".*cannot be made \(Too many open files\)\. The process may have \d+ files open: raise",
        r".*cannot be used \(Too many open files\)\. The process may have \d+ files open: raise",
        "works",
    ]
    assert len(messages) == len(expected), messages
    for message, pattern in zip(messages, expected, strict=True):
        assert re.match(pattern, message), message


@pytest.mark.engine
def test_a_server_says_so_and_leaves_nothing(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    options = ["disk", "--kv-retrieval.home_path", str(home), "--kv-retrieval.home_bytes", "1GiB"]
    command = "--enforce-eager", "--kv-retrieval.home", *options
    server = Server(tmp_path / "log", *command, forked=True)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (256 * MIB, most))
    processes = set()
    while server.process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.update(psutil.Process(server.process.pid).children(recursive=True))
        time.sleep(0.2)
    assert server.process.poll() == 1, server.text()[-5000:]
    assert processes, "an engine"
    _, left = psutil.wait_procs(processes, timeout=10)
    assert not left
    assert list(home.iterdir()) == []
    said = rf"home=disk: a file of 1\.0 GiB in {home} cannot be made \(File too large\)\. A file "
    assert re.search(f"RetrievalConfigError: kv_retrieval.{said}may have 0.25 GiB", server.text())


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EDQUOT, "A quota on that disk is used up: raise it, lower kv_retrieval.home_bytes"),
        (errno.EIO, r"The disk fails; the system's log \(dmesg\)"),
        (errno.EPERM, "The server's user may not make files there"),
        (errno.ENFILE, r"The whole system .* raise fs\.file-max"),
        (errno.ESTALE, "If it stays, name another directory with kv_retrieval.home_path"),
    ],
    ids=lambda value: errno.errorcode.get(value, ""),
)
@pytest.mark.parametrize("call", ["allocate", "_write_zeros"])
def test_what_cannot_be_had_in_a_test(code, remedy, call, monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(home_file, "allocate", lambda *_: False)
    monkeypatch.setattr(home_file, call, refuse)
    said = rf"a file of 0\.0 GiB in .* cannot be made \({os.strerror(code)}\)\. {remedy}"
    with pytest.raises(RetrievalConfigError, match=said):
        disk_home(tmp_path)


def test_a_disk_that_is_full_says_so_when_zeros_have_got_there(monkeypatch, tmp_path):
    """NFS takes what is written, and tells at the end."""

    def full(fd):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(home_file, "allocate", lambda *_: False)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RetrievalConfigError, match="A quota on that disk is used up"):
        disk_home(tmp_path)


def test_memory_that_the_system_refuses():
    """The system refuses it to Python and to torch. Other errors stay as they are."""

    def refused(match):
        return pytest.raises(RetrievalConfigError, match=match)

    with refused(r"things \(Cannot allocate memory\)\. .*ulimit -v"), explained("things"):
        torch.empty(1 << 60, dtype=torch.uint8)
    with refused(r"\(Cannot allocate memory\)"), explained("things"):
        raise MemoryError
    with refused(r"(\d+|any number of) threads"), explained("things"):
        raise BlockingIOError(errno.EAGAIN, "thread")
    with pytest.raises(RuntimeError, match=r"^other$"), explained("things"):
        raise RuntimeError("other")
    with pytest.raises(ConnectionRefusedError), explained("things", system_limits.SCARCE):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "no")


def test_a_home_in_memory_has_to_fit_there(monkeypatch):
    """The check includes memory that the worker is yet to take. Nothing is reserved there, so a
    lack of memory would end the process."""
    monkeypatch.setattr(home_file, "available_memory", lambda: 3 * GIB)
    home_file.check_room("/dev/shm", GIB, workers=2, memory=GIB // 2)
    with pytest.raises(
        RetrievalConfigError,
        match=r"/dev/shm \(it lies in memory, tmpfs\) has 2\.8 GiB free\. Lower home_bytes",
    ):
        home_file.check_room("/dev/shm", 3 * GIB - 1, memory=GIB // 5)
    with pytest.raises(RetrievalConfigError, match=r"has 3\.0 GiB free"):
        disk_home("/dev/shm", 4 * GIB)


def test_a_home_on_a_disk_does_not(monkeypatch, tmp_path):
    monkeypatch.setattr(home_file, "available_memory", lambda: 0)
    home_file.check_room(str(tmp_path), MIB, memory=GIB)


@ROOT_ONLY
def test_a_small_file_system_in_memory(mount):
    directory = mount("small", "-t", "tmpfs", "-o", "size=8M", "none")
    with pytest.raises(RetrievalConfigError, match=r"\(it lies in memory, tmpfs\) has 0\.01 GiB"):
        disk_home(directory, 16 * MIB)
    disk_home(directory, 4 * MIB).memory.fill_(1)


GROUPS = {
    "v2": ("0::/pod/server\n", "", "memory.max", "memory.current", ""),
    "v1": (
        "8:pids:/\n4:cpuset,memory:/pod/server\n0::/\n",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_",
    ),
}


@pytest.mark.parametrize("version", GROUPS)
def test_memory_that_control_groups_leave(version, tmp_path):
    """The least of them counts; copies of files do not, files in memory do."""
    line, root, limit, usage, below = GROUPS[version]
    (tmp_path / "cgroup").write_text(line)
    root = tmp_path / root

    def group(path, most, used, active, inactive):
        path.mkdir(parents=True, exist_ok=True)
        (path / limit).write_text(f"{most}\n")
        (path / usage).write_text(f"{used}\n")
        (path / "memory.stat").write_text(
            f"shmem 50\n{below}active_file {active}\n{below}inactive_file {inactive}\n"
        )

    def left():
        return sorted(system_limits._available_in_groups(tmp_path / "cgroup", tmp_path))

    assert left() == []
    group(root, 5000, 900, 5, 15)  # as a container sees its own group
    assert left() == [4120]
    group(root / "pod" / "server", 1000, 500, 100, 200)
    assert left() == [800, 4120]
    group(root / "pod", "max", 0, 0, 0)
    assert left() == [800, 4120]


def test_available_memory():
    assert MIB < available_memory() < 1 << 50


@ROOT_ONLY
def test_what_never_gets_to_the_disk_is_told(mount, tmp_path):
    """A disk that has less than it promises: writing is done long before the system finds out."""
    image = mount("outer", "-t", "tmpfs", "-o", "size=6M", "none") / "disk"
    with ext4(tmp_path / "inner", 64 * MIB, image) as directory:
        write_what_is_lost(disk_home(directory, 32 * MIB))


def write_what_is_lost(home):
    assert home.take_write_error() == 0
    home.memory.random_()
    content = home.memory.clone()
    assert home.take_write_error() == 0, "the system has it all, in memory"
    os.sync()
    assert home.take_write_error() in (errno.ENOSPC, errno.EIO)
    assert home.take_write_error() == 0, "it is told once"
    home.unmap(0)
    os.posix_fadvise(home.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    assert not home.memory.equal(content), "it is lost, and reading does not say so"
    assert home.take_lost(mmap.PAGESIZE) == set()


def test_files_that_cannot_tell(tmp_path):
    file = HomeFile(str(tmp_path), 1, MIB)
    assert file.take_write_error() == 0
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), file.fd)
    assert file.take_write_error() == 0
