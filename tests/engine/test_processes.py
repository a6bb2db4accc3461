"""The processes of an engine on a CPU, and the cores of their threads."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from tests.support.engine import DTYPE, Request, checkpoint, drive, engine, prompt, shortened
from vllm_kvretrieval.engine.cpu import processes
from vllm_kvretrieval.upstream.defaults import all_cores, cores_of, forked_on_all_cores

PROMPT, TOKENS = 300, 6
CONNECTOR = KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both")
OPTIONS: dict[str, Any] = {
    "attention_backend": "kvretrieval",
    "additional_config": {"kv_retrieval": {"attention": "vllm", "budget": 256}},
    "dtype": DTYPE,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 16 << 20,
    "disable_log_stats": True,
}
PROGRAM = """
import json, os, socket, sys
import psutil, torch
from vllm import LLM, SamplingParams

forks = []
os.register_at_fork(after_in_parent=lambda: forks.append(True))
torch.ones(1 << 24).exp()  # threads, which a child would lack
server = socket.create_server(("127.0.0.1", 0))
later = socket.socket()
later.bind(("127.0.0.1", 0))  # as vLLM's server does before its engine starts
ports = {each.getsockname()[1] for each in (server, later)}
options, prompt, tokens = json.loads(sys.argv[1])
llm = LLM(**options)
sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
(answer,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
(engine,) = psutil.Process().children(recursive=True)
threads = [sorted(os.sched_getaffinity(thread.id)) for thread in engine.threads()]
later.listen()
held = sorted(ports & {each.laddr.port for each in engine.net_connections("tcp")})
tasks = [thread.id for thread in psutil.Process().threads()]
messages = [task for task in tasks if open(f"/proc/self/task/{task}/comm").read().startswith("ZMQ")]
own = [sorted(os.sched_getaffinity(task)) for task in (0, *messages)]
print(json.dumps([list(answer.outputs[0].token_ids), len(forks), own, threads, held]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return shortened(tmp_path_factory.mktemp("model"), "SmolLM2-135M-Instruct", 4)


@pytest.fixture
def configured(monkeypatch):
    """An engine with one of our methods and some options, as it is configured."""

    def configure(settings=None, **options):
        for name, value in (all_cores() | (settings or {})).items():
            monkeypatch.setenv(name, value)
        for name in ("OMP_NUM_THREADS", processes.METHOD, "LD_PRELOAD", "GOMP_CPU_AFFINITY"):
            monkeypatch.setenv(name, "")  # to be undone
            monkeypatch.delenv(name)
        path = checkpoint("SmolLM2-135M-Instruct")
        options = {"attention_backend": "kvretrieval"} | options
        return EngineArgs(model=path, **options).create_engine_config()

    return configure


OURS = "vllm_kvretrieval.engine.cpu.processes.EngineExecutor"


@pytest.mark.model
def test_a_worker_that_is_alone_has_no_process(configured):
    vllm_config = configured()
    before, cores = dict(os.environ), cores_of(os.getpid())
    assert vllm_config.parallel_config.distributed_executor_backend == OURS
    with processes.started_on_cores(vllm_config):
        environment = dict(os.environ)
    assert environment["GOMP_CPU_AFFINITY"].split() == [str(core) for core in cores]
    assert environment["OMP_NUM_THREADS"] == str(len(cores))
    assert environment[processes.METHOD] == "spawn", "threads of this process are not bound"
    assert {*environment} - {*before} == {"GOMP_CPU_AFFINITY", "OMP_NUM_THREADS"}
    assert dict(os.environ) == before, "later processes of the program would be bound, too"


@pytest.mark.model
@pytest.mark.parametrize(
    ("settings", "options", "executor"),
    [
        ({}, {"distributed_executor_backend": "mp"}, "mp"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0|0|0"}, {"tensor_parallel_size": 3}, "mp"),
        ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, {}, "uni"),
        ({}, {"attention_backend": None}, "mp"),
        ({}, {"kv_transfer_config": CONNECTOR}, "mp"),
    ],
    ids=["as asked", "several workers", "one process", "stock", "connector"],
)
def test_other_engines_are_as_vllm_has_them(configured, settings, options, executor):
    parallel = configured(settings, **options).parallel_config
    assert parallel.distributed_executor_backend == executor


@pytest.mark.model
@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ("", "names 0 cores for workers; write a list for each of 1, such as"),
        ("all", "is no list of cores, or several with | between them; write a list"),
        ("0-", "is no list of cores"),
        ("AUTO", "is no list of cores"),
        ("|0", "names 0 cores for workers"),
        ("1-0", "names 0 cores for workers"),
        ("0,4095", r"a process may not run on \[4095\], which this machine or container does not"),
        (str(2**40), "a process may not run on"),
    ],
)
def test_cores_that_a_worker_cannot_have(configured, bound, said):
    """vLLM would end in its engine's process, with an assertion or by a number that is none."""
    own = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match=f"VLLM_CPU_OMP_THREADS_BIND='.*{said}"):
        configured({"VLLM_CPU_OMP_THREADS_BIND": bound})
    assert os.sched_getaffinity(0) == own


@pytest.mark.model
@pytest.mark.parametrize("bound", ["auto", "nobind", "0", "0-0,0", "0|0"])
def test_cores_that_a_worker_can_have(configured, bound):
    """Behind | are those of other engines, as vLLM reads them."""
    configured({"VLLM_CPU_OMP_THREADS_BIND": bound})


@pytest.mark.model
@pytest.mark.engine
def test_a_forked_engine_has_its_cores_and_answers(model):
    """Its first process has a thread on each core, and has computed. Nothing is left of where that
    one takes connections."""
    tokens = prompt(PROMPT, 1)
    settings = {name: v for name, v in os.environ.items() if not name.startswith("VLLM_")}
    given = json.dumps([OPTIONS | {"model": model}, tokens, TOKENS])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given],
        env=settings | forked_on_all_cores() | {"TORCHDYNAMO_DISABLE": "1"},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("[["))
    answer, forks, own, threads, held = json.loads(said)
    cores = cores_of(os.getpid())
    assert forks == 1
    assert held == []
    assert len(own) > 1, "there are threads that pass messages"
    assert all({*each} >= {*cores} for each in own), "the front end is not kept on one core"
    assert all([core] in threads for core in cores)
    with engine(**OPTIONS | {"model": model}) as llm:
        (spawned,) = drive(llm, [Request(tokens, TOKENS)])
    assert answer == spawned.tokens


RELEASED = """
import os
from vllm_kvretrieval.engine.cpu import processes

processes._release_first_core(processes.places())
print(*sorted(os.sched_getaffinity(0)))
"""


def test_a_program_on_fewer_cores_stays_there():
    """Its parent, this process, may run on all."""
    first = min(os.sched_getaffinity(0))
    done = subprocess.run(
        ["taskset", "-c", str(first), sys.executable, "-c", RELEASED],
        env=dict(os.environ) | {"GOMP_CPU_AFFINITY": str(first)},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1] == str(first)


def test_threads_that_are_not_bound_have_no_places():
    assert torch.get_num_threads() >= 1
    assert processes.places() == []
