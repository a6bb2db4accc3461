"""The benchmarks' command lines, and what the programs make of measurements."""

import argparse
import re
import shlex
from dataclasses import asdict, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import common
from benchmarks.ops import __main__ as ops_driver
from benchmarks.quality import __main__ as quality_driver
from benchmarks.quality import recall
from benchmarks.serving import __main__ as serving_driver
from benchmarks.serving import bench, capacity, decode, disk, report
from tests.support.seen import seen
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig

DRIVERS = {"serving": serving_driver, "ops": ops_driver, "quality": quality_driver}


@pytest.mark.parametrize(
    ("driver", "command"),
    [(name, command) for name, driver in DRIVERS.items() for command in driver.COMMANDS],
)
def test_help_of_every_command(driver, command, capsys):
    """Every option says what it does, and the examples of the description can be typed."""
    with pytest.raises(SystemExit) as ended:
        DRIVERS[driver].main([command, "--help"])
    assert ended.value.code == 0
    module = import_module(f"benchmarks.{driver}.{command.replace('-', '_')}")
    about = module.__doc__ or ""
    assert capsys.readouterr().out.split("\n\n")[1] == about.partition("\n")[0]
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    actions = {option: action for action in parser._actions for option in action.option_strings}
    assert not [option for option, action in actions.items() if not action.help]
    assert "--output" in actions
    examples = re.findall(rf"^ +python -m benchmarks\.{driver} {command}(.*)", about, re.M)
    assert examples
    for example in examples:
        parser.parse_args(shlex.split(example, comments=True))


@pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
def test_a_driver_lists_its_commands(driver, capsys):
    with pytest.raises(SystemExit):
        driver.main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in driver.COMMANDS)
    with pytest.raises(SystemExit):
        driver.main(["nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def noted(recalled: int, missed: int, corrected: int, waited_s: float) -> dict[str, float]:
    """The counts of a worker at the beginning of a step."""
    return {
        "looked_up": 0,
        "sparse_heads": 0,
        "missed": missed,
        "corrected": corrected,
        "recalled": recalled,
        "recalled_bytes": recalled << 20,
        "waited_s": waited_s,
        "minor_faults": 0,
        "major_faults": 0,
    }


def test_steady_counts_from_the_first_decode_step():
    prompt, first, second, end = (
        noted(7, 7, 7, 7.0),
        noted(7, 7, 7, 7.0),
        noted(1007, 1007, 57, 7.010),
        noted(1010, 1009, 67, 7.012),
    )
    for step, note in enumerate((first, second, end)):
        note |= {"looked_up": 1000 * step, "sparse_heads": 50 * step}
    figures = disk.summarise([0.030, 0.020], [prompt, first, second, end])
    assert figures["first_ms"] == pytest.approx(30)
    assert figures["first_units"] == 1000
    assert figures["first_waited_ms"] == pytest.approx(10)
    assert figures["first_hit_rate"] == 0
    assert figures["step_ms"] == pytest.approx(20)
    assert figures["rest_recalled_mib"] == pytest.approx(3)
    assert figures["rest_hit_rate"] == pytest.approx(0.998)
    assert figures["recalled_mib"] == pytest.approx(1003 / 2)
    assert figures["hit_rate"] == pytest.approx(1 - 1002 / 2000)
    assert figures["waited_ms"] == pytest.approx(6)
    assert figures["corrected_share"] == pytest.approx(60 / 100)


def test_steady_rows_show_what_reading_ahead_hides():
    figures = disk.summarise([0.03, 0.02], [noted(0, 0, 0, t) for t in (0, 0.01, 0.02)])
    by_name = {
        name: {"context": 16384, "batch": 4, "variant": name, **figures, "waited_ms": waited}
        for name, waited in ((disk.DEVICE, 0), (disk.DISK, 3), ("other", 3))
    }
    by_name[disk.UNAIDED] = by_name["other"] | {"waited_ms": 4.0}
    assert "25%" in disk.line(by_name[disk.DISK], by_name)
    assert "25%" not in disk.line(by_name["other"], by_name)


MODEL = SimpleNamespace(
    num_hidden_layers=24,
    num_key_value_heads=2,
    num_attention_heads=14,
    hidden_size=896,
    max_position_embeddings=32768,
)


def served(method="freekv", dense=1):
    return capacity.Served(RetrievalConfig(method, budget=512, home="disk"), MODEL, dense)


@pytest.mark.parametrize("mib", [8, 64, 256])
@pytest.mark.parametrize(("method", "dense"), [("freekv", 1), ("omnikv", 6)])
def test_capacity_is_the_most_that_the_plan_takes(mib, method, dense):
    of, memory = served(method, dense), mib * capacity.MIB
    most = capacity.largest(of, memory)
    assert most is not None
    assert most.tiers.fast <= memory
    assert most.tiers.blocks * capacity.BLOCK > most.tokens
    limit = MODEL.max_position_embeddings
    assert most.context <= limit
    if most.context < limit:
        longer = most.context + capacity.BLOCK
        with pytest.raises(RetrievalConfigError):
            capacity.plan(of, memory, most.requests, longer)


def test_capacity_without_room_for_a_block():
    assert capacity.largest(served(), capacity.MIB) is None


def capacity_row(**changes: Any) -> dict[str, Any]:
    """A row that `capacity` stores for a run that meets the goal."""
    parts = dict.fromkeys(capacity.PARTS, 10 * capacity.MIB)
    return {
        "fast_memory": 64 * capacity.MIB,
        "stock_tokens": 5461,
        "tokens": 65536,
        "requests": 2,
        "context": 32768,
        "ratio": 12.0,
        "planned": {**parts, "home": 800 << 20, "streams_dense": True},
        "allocated": parts,
        "stock_says": "To serve at least one request ...",
        "stock_blocks_tokens": 5376,
        "found": 2,
        "samples": 2,
        "at_once": 2,
        "home_memory": {
            "file": 800 << 20,
            "page_cache": 700 << 20,
            "mapped": 0,
            "request_state": 9,
        },
        "memory": {"own": 1 << 30},
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({}, True),
        ({"ratio": 7.9}, False),
        ({"found": 1}, False),
        ({"allocated": dict.fromkeys(capacity.PARTS, 11 * capacity.MIB)}, False),
        ({"fast_memory": 8 * capacity.MIB}, None),
    ],
)
def test_capacity_verdict(changes, passed):
    row = capacity_row(**changes)
    assert capacity.verdict(row) is passed
    shown = capacity.report(row)
    assert ("PASS" in shown, "FAIL" in shown) == (passed is True, passed is False)
    assert "700 MiB of page cache" in shown
    assert "12,800 bytes per token" in shown


def decode_cell(context: int, prefill: list[float], **changes: Any) -> dict[str, Any]:
    """A cell of `benchmarks.serving decode`, in which freekv takes half as long."""
    times = {"prefill_s": prefill, "first_token_s": prefill}
    engines: dict[str, Any] = {
        name: {"step_ms": [{"mean": ms}, {"mean": ms}], **times}
        for name, ms in (("stock", 40.0), ("freekv", 20.0))
    }
    engines["freekv"]["retrieval"] = {"corrected_share": 0.72}
    size = {"context": context, "batch": 1, "engines": engines, "one_by_one": False}
    return {**size, "started_first": "stock", "build": MINE, **changes}


MINE = {"version": "0.1.0", "code": "a", "commit": "mine", "dirty": False}
OTHER = {"version": "0.1.0", "code": "b", "commit": "other", "dirty": False}


def decode_summary(cells: list[dict[str, Any]], **changes: Any) -> str:
    """The text that `benchmarks.serving decode` prints of these cells."""
    store = {"build": MINE, "settings": {"budget": 1024}, "cells": cells, **changes}
    return report.summary(store | {"acceptance": report.acceptance(store)})


def test_decode_rows_show_the_corrected_share_and_what_is_of_another_build():
    shown = decode_summary([decode_cell(16384, [9.0]), decode_cell(32768, [9.0], build=OTHER)])
    first, second = (line for line in shown.splitlines() if "2.00x" in line)
    assert "72%" in first
    assert not first.endswith("\N{DAGGER}")
    assert second.endswith("\N{DAGGER}")
    assert "of another build: 0.1.0 (other)" in shown
    assert "random" not in shown


def test_decode_without_prefill_says_so_and_judges_none():
    shown = decode_summary([decode_cell(32768, [])], settings={"budget": 1024, "fill": True})
    assert "for timing only" in shown
    assert "PASS 2.000  decode at 32,768, batch 1" in shown
    assert "not measured  prefill beyond the budget" in shown


def test_decode_resumes_its_own_settings_alone(tmp_path):
    settings = bench.Settings("m", {}, "freekv", 1024, {}, 48, 5, 10, 120.0, False)
    path = tmp_path / "decode.json"
    stored = asdict(settings)
    del stored["fill"]  # written before there was this option
    common.write_json(path, {"settings": stored, "cells": [], "build": OTHER})
    assert decode.earlier(path, settings) == []
    with pytest.raises(SystemExit, match="other settings"):
        decode.earlier(path, replace(settings, fill=True))


def test_recall_is_of_the_tokens_with_the_most_attention():
    """Keys of two values per channel are what an index of one bit holds."""
    torch.manual_seed(0)
    keys = torch.randint(0, 2, (2, 1536, 64)) * 2.0 - 1
    queries, contexts = torch.randn(6, 2, 64), torch.tensor([1100, 1536])
    found = recall.Recall()
    found.observe(seen(1, queries, keys, contexts, 0.125))
    assert found.count == 0  # a layer that stays dense
    found.observe(seen(2, queries, keys, contexts, 0.125))
    assert found.count == 4
    shares = {case.name: share for case, share in zip(recall.CASES, found.found / 4, strict=True)}
    assert (shares["one_bit, tokens"] > 0.99).all()
    by_pages = shares["exact, pages of 16"]
    assert by_pages[0] < 0.5
    assert (by_pages.diff() > 0).all()
    assert (shares["min_max, pages of 32"] < by_pages + 0.05).all()


def test_indexes_are_compared_at_the_same_bytes():
    bytes_of = {case.name: case.bytes_per_token(64) for case in recall.CASES}
    assert bytes_of["one_bit, tokens"] == bytes_of["min_max, pages of 16"] == 16
