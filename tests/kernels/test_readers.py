"""The threads that read ahead: where they run, what a fork leaves of them, and doing without."""

import os
import subprocess
import sys
import weakref

import pytest
import torch

from benchmarks.common import ROOT
from tests.support.open_pages import OpenPages
from tests.support.recall_life import PAGE, UNITS, Home, caches
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.retrieval.codec import CODECS

pytestmark = pytest.mark.threads

START = """
import ctypes, os, pytest, resource, sys, torch
from pathlib import Path
from tests.support.kernel_checks import make_chooser, make_rows
from tests.support.recall_life import *

def readers():
    tasks = [path.parent for path in Path("/proc/self/task").glob("*/comm")]
    return [int(t.name) for t in tasks if (t / "comm").read_text() == "kvr-reader\\n"]

# Made here: its index is built by OpenMP's threads, which a forked child does not have.
chooser = make_chooser(PAGES, REQUESTS, HEADS, 1, HEAD_SIZE, torch.float32, SELECT)

def read_ahead(cache, first):
    chooser.selection.chosen[:] = torch.arange(3, 3 + SELECT)
    rows = make_rows([PAGE * 10], chooser, BUDGET)
    rows.seats.zero_()
    rows.block_table[0] = torch.arange(first, first + 10)
    cache.prefetch(rows, chooser)
    return {HEADS * page + head for page in range(first + 3, first + 6) for head in range(HEADS)}

def limit_threads(stack):
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_attr_init(attributes)
    libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(stack))
    libc.pthread_setattr_default_np(attributes)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + stack // 2
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

home = Home()
"""


def run(program, allowed=None, **env):
    """The output of a program in a process that is bound to some CPUs from its start."""
    keep = (lambda: os.sched_setaffinity(0, allowed)) if allowed else None
    ended = subprocess.run(
        [sys.executable, "-c", START + program],
        preexec_fn=keep,
        env=os.environ | env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


WHERE = """
caches(home, UNITS)
masks = {tuple(sorted(os.sched_getaffinity(reader))) for reader in readers()}
print(len(readers()), os.sched_getaffinity(0), *map(set, masks))
"""


@pytest.fixture
def ends():
    """The first and the last CPU of those that a test has."""
    cpus = sorted(os.sched_getaffinity(0))
    return cpus[0], cpus[-1]


def test_kept_to_the_cpus_of_the_process(ends):
    _, last = ends
    assert run(WHERE, allowed={last}) == f"4 {{{last}}} {{{last}}}"


@pytest.mark.parametrize(
    "binding",
    [
        pytest.param({"GOMP_CPU_AFFINITY": "{0} {1}"}, marks=pytest.mark.slow),
        {"OMP_PLACES": "{{{0}}},{{{1}}}", "OMP_PROC_BIND": "true"},
    ],
    ids=lambda binding: next(iter(binding)),
)
def test_on_all_cores_of_a_model_that_is_bound(binding, ends):
    """The thread that starts them is bound to one core, as vLLM's is."""
    first, last = ends
    if first == last:
        pytest.skip("binding needs two CPUs")
    bound = {name: value.format(*ends) for name, value in binding.items()}
    printed = run(WHERE, OMP_NUM_THREADS="2", **bound)
    assert printed == f"4 {{{first}}} {{{first}, {last}}}"


def test_forked_child():
    """Jobs that were submitted are not lost, and the child reads ahead with threads of its own."""
    printed = run("""
import signal
(cache, _), _ = caches(home, UNITS)
for _ in range(20):
    expected = read_ahead(cache, 20)
    child = os.fork()
    if child == 0:
        signal.alarm(120)
        assert not readers()
        cache.write(torch.tensor([-1]))  # waits
        assert set(cache.resident()) == expected
        assert cache.check() == ""
        expected |= read_ahead(cache, 40)
        cache.write(torch.tensor([-1]))
        assert set(cache.resident()) == expected
        assert cache.check() == ""
        assert len(readers()) == 4
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    cache.drop_pages(list(range(PAGES)))
print(len(readers()))
""")
    assert printed == "4"


def test_no_threads_to_be_had():
    """It is told where the cache is made; a child that has none reads by itself."""
    printed = run("""
torch.set_num_threads(1)
kept = resource.getrlimit(resource.RLIMIT_AS)
limit_threads(1 << 30)
with pytest.raises(OSError, match="temporarily unavailable"):
    caches(home, UNITS)
assert not readers()
resource.setrlimit(resource.RLIMIT_AS, kept)
(cache, _), _ = caches(home, UNITS)
child = os.fork()
if child == 0:
    import signal
    signal.alarm(120)
    limit_threads(1 << 31)  # more than the stacks that the parent's threads left
    expected = read_ahead(cache, 20)
    cache.write(torch.tensor([-1]))
    assert set(cache.resident()) == expected
    assert cache.check() == ""
    assert not readers()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(len(readers()))
""")
    assert printed == "4"


def test_memory_stays_until_the_last_read_has_ended():
    """A cache waits for its readers when it goes: slots and home go after it."""
    memory, counts = torch.zeros(1, 1, 8, 16), torch.zeros(1, 3, dtype=torch.int64)
    tokens = cpu.TokenRecall([torch.zeros(4, 1, PAGE, 16)], [memory], counts, shared=False)
    bound, memories = [tokens._recall], [weakref.ref(memory)]
    for place in (Home(), OpenPages(CODECS["k8v4"])):
        (cache, _), _ = caches(place, UNITS)
        bound.append(cache._cache)
        memories.append(weakref.ref(cache.slots))
    del memory, tokens, cache
    assert all(kept() is not None for kept in memories)
    bound.clear()
    assert not any(kept() is not None for kept in memories)
