"""The table of what fits: it is the doctor's arithmetic, and that of the weights' own files."""

import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoConfig

from benchmarks.common import RESULTS, ROOT
from benchmarks.serving import fits
from tests.support.engine import checkpoint
from vllm_kvretrieval.command import main
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.table import DEFAULT_METHOD
from vllm_kvretrieval.quantization import rounding
from vllm_kvretrieval.retrieval.model_files import shape_of
from vllm_kvretrieval.storage import tier_sizes

SMOLLM2 = "SmolLM2-135M"
PARAMETERS = {
    SMOLLM2: 134_515_008,
    "Qwen2.5-Coder-0.5B": 494_032_768,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Llama-3.2-3B": 3_212_749_824,
    "Gemma-3-4B": 3_880_263_168,
    "Qwen3-4B": 4_022_468_096,
    "Qwen2.5-7B": 7_615_616_512,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-8B": 8_190_735_360,
}
"""Those of the published checkpoints; of Gemma without the part that sees."""
CONTEXT, MACHINE = 8192, 1


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """vLLM's groups of processes, without which it builds no model."""
    with fits.alone():
        yield


@pytest.fixture
def examine(world):
    """What the command finds of the smallest model."""
    sizes = DEFAULT_METHOD, [CONTEXT], [MACHINE], fits.GIB // 4
    return functools.partial(fits.examine, fits.MODELS[SMOLLM2], *sizes)


@pytest.fixture(scope="module")
def stored():
    """The result file of the committed tables."""
    return json.loads((RESULTS / "fits.json").read_text())


@pytest.mark.model
def test_sizes_are_the_doctors(examine, stored, capsys):
    """Of the checkpoint on this machine; and its own weights'."""
    model = checkpoint("SmolLM2-135M-Instruct")
    ours = AutoConfig.from_pretrained(fits.MODELS[SMOLLM2])
    assert shape_of(ours) == shape_of(AutoConfig.from_pretrained(model))
    options = f"--attention-backend kvretrieval --dtype bfloat16 --max-model-len {CONTEXT}"
    main(["doctor", "--serve", model, *options.split()])
    said = capsys.readouterr().out
    found = re.search(r"takes ([\d.]+) KiB of KV cache and (\d+) bytes of page index", said)
    assert found is not None, said
    row = examine()
    (size,) = row["contexts"]
    assert size["kv"] == float(found[1]) * 1024 * CONTEXT
    assert round(size["index"] / CONTEXT) == int(found[2])
    with safe_open(Path(model) / "model.safetensors", "pt") as file:
        loaded = sum(math.prod(file.get_slice(name).get_shape()) * 2 for name in file.keys())  # noqa: SIM118
    assert row["weights"]["16 bits"]["weights"] == loaded
    committed = stored["models"][SMOLLM2]
    assert committed["weights"] == row["weights"]
    assert committed["longest"] == row["longest"] == CONTEXT
    if committed["page_size"] == row["page_size"]:  # CPUs with AMX have larger pages
        assert committed["contexts"] == row["contexts"]


def test_the_longest_context_is_the_longest(world):
    """Of a model with windows, too; a block more does not fit."""
    for name in (SMOLLM2, "Gemma-3-4B"):
        for home in fits.HOMES:
            served = fits.Served(fits.MODELS[name], DEFAULT_METHOD, home)
            memory = served.needed(CONTEXT // 2)
            most = served.most(memory)
            assert CONTEXT // 2 <= most < served.longest
            assert served.fits(most, memory)
            assert not served.fits(most + 128, memory)
            assert not served.fits(CONTEXT // 2, memory - 1)


def test_a_worker_plans_the_same(world):
    """What it divides has room for one request, and none for a block more."""
    for home in fits.HOMES:
        served = fits.Served(fits.MODELS[SMOLLM2], DEFAULT_METHOD, home)
        memory = served.needed(CONTEXT)
        planner, cache = served.planner(CONTEXT), served.planned(CONTEXT)[0]
        block = cache.block_bytes * (cache.retrieval_layers + cache.dense_layers)
        assert planner.divide(memory) == cache.blocks_for(1) * block
        if home == "disk":
            assert planner.tiers == served.tiers(CONTEXT, memory)


def test_a_changed_formula_changes_it(examine, monkeypatch):
    """Nothing is computed by a copy."""
    before = examine()
    index_bytes = RetrievalConfig.index_bytes
    changes = {
        ("contexts", "disk"): (tier_sizes, "BOOKS_PER_UNIT", tier_sizes.BOOKS_PER_UNIT + 1),
        ("contexts", "index"): (RetrievalConfig, "index_bytes", lambda *a: 2 * index_bytes(*a)),
        ("weights", "kvr_int4"): (rounding, "GROUP", 2 * rounding.GROUP),
        ("weights", "kvr_int8"): (rounding, "GROUP_OF_8", rounding.GROUP_OF_8 // 2),
    }
    for (part, name), change in changes.items():
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            after = examine()
        old, new = (row[part][0] if part == "contexts" else row[part] for row in (before, after))
        assert old[name] != new[name], name
    assert examine() == before


def test_the_configurations_are_those_of_the_checkpoints(stored):
    taken = {name: row["weights"]["16 bits"]["weights"] for name, row in stored["models"].items()}
    assert taken == {name: 2 * count for name, count in PARAMETERS.items()}
    assert fits.MODELS.keys() == PARAMETERS.keys()


def test_the_page_names_what_was_measured(stored):
    page = (ROOT / "docs" / "deployment.md").read_text()
    assert f"**: {stored['beside'] / fits.GIB:.2f} GiB" in page


def test_machines_hold_more_with_less_weight_and_more_memory(stored):
    for row in stored["models"].values():
        held = {(each["gib"], each["weights"]): each for each in row["machines"]}
        for (gib, weights), each in held.items():
            assert each["device"] <= each["disk"] <= row["longest"]
            smaller = held.get((gib // 2, weights), each)
            assert smaller["device"] <= each["device"]
            assert smaller["disk"] <= each["disk"]
            wider = held[gib, "16 bits"]
            assert wider["device"] <= each["device"]
            assert wider["disk"] <= each["disk"]
