"""Checks of interpreted kernels' memory accesses find what is left out of a kernel."""

import re

import pytest
import torch

from benchmarks.common import ROOT
from tests.support import (
    broken_kernels,
    device_checks,
    encoded_checks,
    interpreter,
    slot_checks,
    triton_checks,
)
from vllm_kvretrieval.retrieval.index.landmark import Landmark
from vllm_kvretrieval.retrieval.index.mean import Mean
from vllm_kvretrieval.retrieval.index.min_max import MinMax
from vllm_kvretrieval.retrieval.pooling import Pooling

BARRIER = "tl.debug_barrier()"
DECODE = {
    "check": triton_checks.decode,
    "lengths": [200, 33, 0],
    "kv_heads": 1,
    "group": 2,
    "head_size": 16,
    "splits": 4,
}
RESOLVE = {"check": slot_checks.resolve, "capacity": 18, "select": 6, "steps": 6, "least_hits": 0.0}
STEPS = {
    "check": device_checks.decode_steps,
    "methods": [(MinMax(), 8, Pooling.SUM)],
    "head_size": 16,
    "group": 2,
    "steps": 1,
}
MEANS = STEPS | {"methods": [(Mean(), 8, Pooling.SUM)], "head_size": 48}
IN_TILES = {
    "check": device_checks.long_contexts,
    "lengths": [8 * 140],
    "tile_pages": 64,
    "index": Mean(),
    "entry": 8,
    "pooling": Pooling.MAX,
    "head_size": 16,
}
OUTLIERS = IN_TILES | {"index": Landmark(), "pooling": Pooling.MAX_SOFTMAX, "outliers": 0.4}
ENCODED = {
    "check": encoded_checks.life,
    "codec": "k2v2_sparse",
    "kept": 0,
    "page": 16,
    "kv_heads": 1,
    "head_size": 16,
    "dtype": torch.float16,
}
TOKENS = {"check": device_checks.token_steps, "head_size": 16, "group": 2}
RECALL = {
    "check": triton_checks.recall,
    "head_size": 16,
    "page": 16,
    "kv_heads": 2,
    "counts": (5,),
    "programs": 3,
}
DROPS = {"check": device_checks.dropped_tokens, "rule": "pages", "steps": 1}
RACING = {
    "decode": (DECODE, ["partial_out"]),
    "dropping": (DROPS, ["(chosen|ratings|counts)", "chosen"]),
    "encoded": (ENCODED, ["buffer"]),
    "outliers": (OUTLIERS, ["cosines"]),
    "resolve": (
        RESOLVE | {"in_place": True},
        ["slot_lists", "slot_lists", "targets", "targets"],
    ),
    "select": (IN_TILES, ["previous", "scores", "scores", "chosen"]),
}
"""What races without each of the barriers of a kernel, in their order."""


@pytest.fixture(scope="module")
def find():
    """Says what checks find where a kernel is changed."""
    with interpreter.start(checked=True) as pool:
        yield lambda **kwargs: pool.submit(broken_kernels.find, "cpu", **kwargs).result()


@pytest.mark.parametrize(
    ("module", "number"),
    [(module, number) for module, (_, found) in RACING.items() for number in range(len(found))],
)
def test_every_barrier_is_needed(find, module, number):
    check, racing = RACING[module]
    found = find(module=module, old=BARRIER, new="pass", number=number, **check)
    assert re.search(rf"race for {racing[number]}: .* at {module}.py:\d+", found or ""), found


def test_every_barrier_is_tried():
    for path in (ROOT / "vllm_kvretrieval/kernels/triton").glob("*.py"):
        _, racing = RACING.get(path.stem, ({}, []))
        assert path.read_text().count(BARRIER) == len(racing), path


CHANGES = {
    "no release": ("decode", 'sem="acq_rel"', 'sem="acquire"', DECODE, "programs race for partial"),
    "no acquire": ("decode", 'sem="acq_rel"', 'sem="release"', DECODE, "programs race for partial"),
    "no atomic": (
        "resolve",
        'first = tl.atomic_add(recall_count, missing, sem="relaxed")',
        "first = tl.load(recall_count); tl.store(recall_count, first + missing)",
        RESOLVE,
        "programs race for recall_count",
    ),
    "a count that is no atomic": (
        "select",
        'tl.atomic_add(counts + seat, anew, sem="relaxed")',
        "tl.store(counts + seat, tl.load(counts + seat) + anew)",
        IN_TILES | {"group": 1},
        "threads race for counts",
    ),
    "a selection before all have scored": (
        "select",
        'sem="acq_rel"',
        'sem="relaxed"',
        STEPS,
        "programs race for (stats|scores|previous)",
    ),
    "a length that every program writes": (
        "select",
        "mask=program == 0",
        "mask=program >= 0",
        STEPS,
        "programs race for lengths",
    ),
    "two writers": (
        "write",
        "if (offset != 0) & (before == slot - 1):",
        "if False:",
        STEPS,
        "programs race for records",
    ),
    "programs with the same work": (
        "recall",
        "tl.num_programs(0)",
        "1",
        RECALL,
        "programs race for slots: store at recall.py",
    ),
    "two values for a place": (
        "stats",
        "members[:, None] * score_stride",
        "(members // 2)[:, None] * score_stride",
        STEPS,
        "different values to a place",
    ),
    "a sum that does not fit": (
        "resolve",
        'first = tl.atomic_add(recall_count, missing, sem="relaxed")',
        'first = tl.atomic_add(recall_count, missing, sem="relaxed") + 2147483647 + 1',
        RESOLVE,
        "int32 overflows in add",
    ),
    "products that do not fit": (
        "stats",
        "members[:, None] * score_stride",
        "members[:, None] * 2147483647",
        STEPS,
        "int32 overflows in mul",
    ),
    "two tokens for a place": (
        "tokens",
        "place = found + tl.cumsum(best.to(tl.int32), 0) - 1",
        "place = found + tl.cumsum(best.to(tl.int32), 0) // 2",
        TOKENS,
        "different values to a place",
    ),
    "a store before a tensor": (
        "resolve",
        "if found >= 0:",
        "if True:",
        RESOLVE,
        "a store outside of slots",
    ),
    "a load behind a tensor": (
        "resolve",
        "value_stride + read, mask=dims < HEAD_SIZE",
        "value_stride + read",
        RESOLVE,
        "a load outside of value",
    ),
    "records that reach into the next one": (
        "index",
        "mask = dims < HEAD_SIZE",
        "mask = dims < DIMS",
        MEANS,
        "programs race for records",
    ),
    "what lies between the rows of a tensor": (
        "write",
        "(dims < HEAD_SIZE)[None, :]",
        "(dims < DIMS)[None, :]",
        MEANS,
        "a load outside of (key|value)",
    ),
}


@pytest.mark.parametrize(
    ("module", "old", "new", "check", "message"), CHANGES.values(), ids=CHANGES.keys()
)
def test_changes_are_found(find, module, old, new, check, message):
    found = find(module=module, old=old, new=new, **check)
    assert re.search(message, found or ""), found


def test_kernels_are_only_broken_for_a_check(find):
    nothing = {"module": "decode", "old": BARRIER, "new": BARRIER}
    assert find(**nothing, **DECODE) is None
