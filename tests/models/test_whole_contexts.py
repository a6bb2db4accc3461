"""Whose kernel attends to whole contexts on a CPU, and what a step is told for it."""

import json

import pytest
import torch
from vllm.v1.attention.backends import cpu_attn

from benchmarks.common import RESULTS
from tests.support.bare_engine import BareEngine
from vllm_kvretrieval.attention.cpu import refusals
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig


@pytest.fixture
def machine(monkeypatch):
    """Pretends: the instruction set of our kernels, and how vLLM lays out keys."""

    def pretend(isa, layout="vec"):
        monkeypatch.setattr(cpu, "isa", lambda: isa)
        monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: layout)

    return pretend


def choice(dtype, **options):
    return refusals.choose_attention(RetrievalConfig.from_options("freekv", options), dtype, 64)


@pytest.mark.parametrize(
    ("isa", "layout", "dtype", "own"),
    [
        ("avx2", "vec", torch.float32, True),
        ("avx2", "vec", torch.bfloat16, True),
        ("avx2", "vec16", torch.float16, True),
        ("avx512", "vec", torch.float32, False),
        ("avx512", "vec", torch.bfloat16, True),
        ("avx512_bf16", "vec", torch.float32, False),
        ("avx512_bf16", "vec", torch.bfloat16, True),
        ("avx512_amx", "amx", torch.bfloat16, True),
        ("avx512_bf16", "amx", torch.bfloat16, False),
        ("avx512_amx", "vec", torch.bfloat16, True),
        ("avx512_amx", "vec", torch.float32, False),
        ("portable", "vec", torch.float32, False),
        ("portable", "neon", torch.bfloat16, False),
    ],
)
def test_the_faster_kernel_is_the_default(machine, isa, layout, dtype, own):
    machine(isa, layout)
    chosen = choice(dtype)
    assert chosen.own == own
    measured = isa != "portable" and (layout != "amx" or isa == "avx512_amx")
    assert (
        "times the speed of vLLM's" if measured else f"not measured here ({layout}"
    ) in chosen.why
    assert f"{isa}, {str(dtype).removeprefix('torch.')})" in chosen.why


def test_the_option_decides(machine):
    machine("avx2")
    assert choice(torch.float32, attention="vllm") == (False, "attention=vllm")
    machine("avx512", "amx")
    assert choice(torch.bfloat16, attention="own") == (True, "attention=own")


def test_the_table_is_what_was_measured():
    """An entry is the least ratio of all prompts, by instruction set and dtype; to vLLM's kernel
    over the same pages where that was measured."""
    least: dict[str, dict[str, float]] = {}
    for path in RESULTS.glob("prompt-attention-*.json"):
        result = json.loads(path.read_text())
        found = least.setdefault(result["settings"]["isa"], {})
        for row in result["rows"]:
            if row["chunk"] > 1:
                ratio = row.get("ratio_in_pages", row["ratio"])
                found[row["dtype"]] = min(ratio, found.get(row["dtype"], ratio))
    assert least == refusals.RATIOS


@pytest.mark.parametrize("options", [{}, {"also": ["fier"]}], ids=["pages", "rows"])
def test_our_kernels_ask_for_no_schedule(monkeypatch, options):
    """None of prompts, whole contexts and dense layers needs it; only vLLM's kernel reads it."""

    def schedule(*_, **__):
        raise AssertionError("nobody reads it")

    monkeypatch.setattr(cpu_attn.ops, "cpu_attn_get_scheduler_metadata", schedule)
    engine = BareEngine("kvretrieval", {"budget": 128, "attention": "own", **options})
    for prompt, own in ((300, {}), (90, {}), (200, {"exact": True}), (1, {})):
        engine.add(own, prompt, 12)
    while engine.step():
        pass
    assert engine.finished == 4
