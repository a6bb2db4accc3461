"""A run as a whole: the instruction sets that its kernels were tested on, and its workers' cores.

With pytest-xdist every worker keeps to cores of its own, and so does what it starts: engines whose
OpenMP threads are bound to the same cores crawl.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.support import interpreter
from tests.support import isas as isas_of_run
from tests.support.isas import ISAS, absent, missing, tested

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
MOST_WORKERS = 4
ALL_CPUS = os.sched_getaffinity(0)
WORKER_BYTES = 5 << 30
"""The memory that a worker and its engine may take. Most of them take less."""


LONGEST = """
    test_methods test_device_drafts test_slow_home test_serving test_device_parallel test_lossless
    test_speculation test_batching test_mixed_home test_device_engine test_device_codec
    test_device_home test_device_kernels test_gpu_checks test_compiled test_retrieving_prompts
    test_serving_store test_hybrid test_plugin test_slow_tokens test_device_kept
    test_device_dropping test_own_attention test_encoded test_dropping test_store_mixed
    test_store_engine test_sparse_prefill test_processes test_device_tokens test_exactness
    test_scheduler test_prompt_attention test_sampling test_runners
""".split()
"""Modules that take longest, first: what is left to the end is short, and no worker waits long."""


def pytest_collection_modifyitems(items):
    """Modules in that order; the others follow as they come."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session", autouse=True)
def code_of_models():
    """VLLM looks at a model's code in a process of its own, in ten seconds; here in this one."""
    if "vllm" not in sys.modules:
        return
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda run: run()


@pytest.fixture(autouse=True)
def threads(request):
    """A test with this mark has threads on all cores, also in a worker that is bound to some."""
    bound = os.sched_getaffinity(0)
    if not request.node.get_closest_marker("threads") or bound == ALL_CPUS:
        yield
        return
    import torch

    before = torch.get_num_threads()
    os.sched_setaffinity(0, ALL_CPUS)
    torch.set_num_threads(len(_cores()))
    yield
    torch.set_num_threads(before)
    os.sched_setaffinity(0, bound)


@pytest.fixture(params=ISAS)
def isa(request):
    """Runs a test once per instruction set of the kernels, with this one in use."""
    from vllm_kvretrieval.kernels import cpu

    best = cpu.isa()
    if why := isas_of_run.use(request.param):
        pytest.skip(why)
    isas_of_run.only(request.param)
    yield request.param
    isas_of_run.only(None)
    cpu.use_isa(best)


@pytest.fixture(scope="module")
def interpreted():
    """Runs a check on "cpu" in a process where Triton interprets, and every launch is checked."""
    with interpreter.start(checked=True) as pool:
        yield lambda check, **kwargs: pool.submit(check, "cpu", **kwargs).result()


@pytest.fixture(scope="module")
def emulated():
    """Calls functions of support/runners.py in its process, where vLLM's V2 model runner runs."""
    from tests.support import runners

    with runners.start() as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


@pytest.fixture
def isas():
    """Visits the instruction sets that run here, each in use meanwhile: for one test of all."""
    return isas_of_run.visited


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A failure names the instruction set that the test was visiting."""
    isas_of_run.failed_in()
    try:
        return (yield)
    except Exception as error:
        if name := isas_of_run.failed_in():
            error.add_note(f"by the kernels of {name}")
        raise


def pytest_terminal_summary(terminalreporter):
    """A green run has proved no more than what it says here."""
    others = set(ISAS) - tested - absent - missing
    parts = [f"kernels tested: {_listed(tested)}", f"not on this machine: {_listed(absent)}"]
    parts += [f"not compiled in: {_listed(missing)}"] if missing else []
    parts += [f"not in this run: {_listed(others)}"] if others else []
    terminalreporter.write_line("; ".join(parts))


def _listed(names):
    return ", ".join(name for name in ISAS if name in names) or "none"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """The number of workers for ``-n auto``: one per core, as far as memory allows."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(_cores()), MOST_WORKERS, memory // WORKER_BYTES))


def pytest_configure(config):
    """Bind a worker to its cores, before torch is imported: OpenMP counts its CPUs then."""
    config.option.loadscopereorder = False  # pytest-xdist would begin with many short tests
    if worker := getattr(config, "workerinput", None):
        cores = _cores()
        first = int(worker["workerid"].removeprefix("gw")) % min(worker["workercount"], len(cores))
        os.sched_setaffinity(0, set().union(*cores[first :: worker["workercount"]]))


def pytest_sessionfinish(session):
    """In a worker, tell the main process which kernels were tested."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["isas"] = (tested, absent, missing)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """In the main process, collect what a worker reports. A worker that crashed reports nothing."""
    told = getattr(node, "workeroutput", {}).get("isas", ())
    for ours, theirs in zip((tested, absent, missing), told, strict=False):
        ours |= theirs


def _cores():
    """The CPUs that this process may run on, by core: hyper-threads stay together."""
    cores: dict[str, set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(SIBLINGS.format(cpu))
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), set()).add(cpu)
    return list(cores.values())
