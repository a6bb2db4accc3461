"""What a process says when it ends: nothing, whatever of the extension is still alive."""

import subprocess
import sys

import pytest

from benchmarks.common import ROOT

USE = """
import sys, tempfile, types
from tests.kernels.test_recall_cache import *
from vllm_kvretrieval.kernels import DecodeLayer
from vllm_kvretrieval.kernels.cpu.binding import chooser_handle, rows_handle, store_handle
from vllm_kvretrieval.kernels.cpu.decoding import layer_handle
from vllm_kvretrieval.storage.mapped import DiskHome

home = Home()
(cache, _), _ = caches(home, UNITS)
chooser = make_chooser(PAGES, REQUESTS, HEADS, 1, HEAD_SIZE, torch.float32, SELECT)
rows = make_rows([PAGE * 10], chooser, BUDGET)
rows.block_table[0] = torch.arange(10)
query = torch.zeros(1, HEADS, HEAD_SIZE)
cpu.plan_decode(query, rows, chooser)
cache.resolve(rows, TokenLists.empty(rows, PAGE, HEADS))
file = DiskHome(tempfile.gettempdir(), 1, 1 << 20, cpu.MappingGuard)
file.memory.fill_(1)
objects = [rows_handle(rows), chooser_handle(chooser), store_handle(chooser.store), cache._cache]
layer = DecodeLayer(chooser.store.cache, "vec", 1, [chooser.store], 1.0)
objects += [file._guards[0]._guard, layer_handle(layer)]
assert len({type(x) for x in objects}) == 6

def fail(local):
    raise ValueError("kept, with what its frames hold")
try:
    fail(objects)
except ValueError as error:
    kept = error
objects.append(objects)  # a cycle
sys.modules["keeps"] = types.ModuleType("keeps")
sys.modules["keeps"].objects = objects
"""


def run(program):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_objects_that_live_to_the_end():
    ended = run(USE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "hidden",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["without it", "with it"],
)
def test_triton(hidden):
    """Neither vLLM nor torch has anything to say of it on a CPU; at the end it has, itself."""
    ended = run(f"""
import sys
if {hidden}:
    sys.modules["triton"] = None
import vllm.triton_utils
from torch._library.triton import get_inner_triton_kernels
get_inner_triton_kernels(lambda x: x)
""")
    assert ended.returncode == 0, ended.stderr
    said = ended.stderr.partition("nanobind:")[0] if not hidden else ended.stderr
    assert (ended.stdout, said) == ("", "")


def test_what_would_be_said_of_one_that_outlives_it():
    """So silence means that no object outlives the extension."""
    ended = run("""
import ctypes
from vllm_kvretrieval import _cpu
memory = ctypes.create_string_buffer(4096)
guard = _cpu.MappingGuard(ctypes.addressof(memory), 4096, -1, False)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(guard))
""")
    assert "nanobind: leaked 1 instances" in ended.stderr
