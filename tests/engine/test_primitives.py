"""What oneDNN keeps of products of many lengths."""

import pytest

from tests.support import programs

PROGRAM = """
import ctypes, os, sys
import torch
from vllm import _custom_ops as ops
from vllm_kvretrieval.upstream.primitives import keep_few_primitives

class Heap(ctypes.Structure):
    _fields_ = [(f"f{number}", ctypes.c_size_t) for number in range(10)]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Heap

def in_use():
    heap = library.mallinfo2()
    return (heap.f7 + heap.f4) >> 10

for name in sys.argv[1:]:
    os.environ[name] = "1024"
keep_few_primitives()
torch.set_num_threads(1)
weights = torch.ones(64, 64, dtype=torch.bfloat16)
handler = ops.create_onednn_mm(weights.t(), 32)
for tokens in range(1, 801):
    ops.onednn_mm(handler, torch.ones(tokens, 64, dtype=torch.bfloat16), None)
    if tokens in (200, 800):
        print(in_use())
"""


def growth(*named):
    """By how many MiB the heap grows for 600 numbers of tokens more."""
    ended = programs.run(PROGRAM, *named)
    if "NotImplementedError" in ended.stderr or "RuntimeError" in ended.stderr:
        pytest.skip(f"oneDNN has no such product here: {ended.stderr[-300:]}")
    assert ended.returncode == 0, ended.stderr
    before, after = map(int, ended.stdout.split())
    return (after - before) / 1024


def test_they_are_few_unless_the_user_says_how_many():
    assert growth() < 10
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"):
        assert growth(name) > 40
