"""The benchmarks that need a GPU, as far as they run without one: small, interpreted, untimed."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.common import ROOT, read_json
from benchmarks.gpu import (
    common,
    counted,
    decode_layer,
    engine_decode,
    goals,
    layer_parts,
    layer_step,
    predict,
    smoke,
    sparse_decode,
)
from tests.support import byte_counts, interpreter
from tests.support.side_work import AtOnce, Delayed
from vllm_kvretrieval.attention.cuda import far
from vllm_kvretrieval.engine.cuda import tiers

SHAPE = layer_parts.Shape(kv_heads=2, group=2, head_size=16, budget=256)
COPY, BUS = 1e9, 1e8
MOVERS = (
    "_write_kernel", "_select_kernel",
    "_sparse_decode_kernel",
)  # fmt: skip
"""Kernels whose bytes do not depend on what is missing."""
BESIDE = 2048
"""Bytes of queries, tables and lists that a KV head may move beside what it must."""


@pytest.fixture(scope="module")
def interpreted():
    """Runs a function in the interpreter's process."""
    with interpreter.start() as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def stored(path) -> dict[str, Any]:
    """The file that a program has written."""
    found = read_json(path)
    assert found is not None
    return found


def once(calls):
    """Stands in for the timer: every call runs, and takes a microsecond."""
    for call in calls:
        call()
    return 1e-6


def decode_step(context, side=None):
    torch.manual_seed(context)
    memory = torch.zeros(40 * SHAPE.kv_heads * SHAPE.unit_bytes + 100, dtype=torch.uint8)
    pool = layer_parts.Pool(SHAPE, memory, "cpu")
    return layer_step.LayerStep(pool, SHAPE, batch=2, context=context, layers=2, units=2, side=side)


def measured(context, side=None):
    """Run it as the program measures it. Returns the first layer's outputs, before and after."""
    step = decode_step(context, side)
    before = step.layers[0].out.clone()
    result = decode_layer.measure(step, COPY, BUS, once)
    return result, before, step.layers[0].out


@pytest.mark.parametrize("side", [None, AtOnce(), Delayed()])
@pytest.mark.parametrize("context", [200, 500])
def test_layer_step(interpreted, context, side):
    result, before, after = interpreted(measured, context, side)
    sparse, home = context > SHAPE.budget, "device" if side is None else "host"
    assert result["sparse"] == sparse
    ops = result["ops"]
    expected = {"write_kv", "plan_decode", "select_ahead"}
    expected |= {"sparse_decode", "step", "prepare_rows"}
    if home == "host":
        expected |= {"resolve", "resolve_ahead", "recall_ahead"}
    assert set(ops) == expected
    entries = 2 * SHAPE.kv_heads * 16 * sparse  # 500 tokens are 16 pages
    assert ops["select_ahead"]["bytes"] == entries * (2 * 16 * 2 + 12 * SHAPE.group)
    units = 2 * SHAPE.kv_heads * min(8 if sparse else 7, 8) * (sparse or home == "host")
    missed = -(-units * 4 // 100) * (home == "host")
    assert ops["sparse_decode"]["bytes"] == (units + missed) * SHAPE.unit_bytes
    if home == "host":
        floor = max(units / COPY, missed / BUS) * SHAPE.unit_bytes * 1e6
        assert ops["sparse_decode"]["floor_us"] == pytest.approx(floor)
        early = -(-units * 15 // 100)
        assert ops["recall_ahead"]["bytes"] == early * SHAPE.unit_bytes
        floor = early * SHAPE.unit_bytes / BUS * 1e6
        assert ops["recall_ahead"]["floor_us"] == pytest.approx(floor)
    else:
        assert torch.equal(before, after), "a step that is run again gives the same"
    assert bool(result["check"]) == bool(units)


def disturbed():
    """A step of which some outputs, and some of what is listed, are not what they should be."""
    step = decode_step(500)
    step.layers[0].out += 1
    with pytest.raises(RuntimeError, match="specification"):
        decode_layer.measure(step, COPY, BUS, once)
    step = decode_step(500)
    others = step.layers[1].rows.block_table[:, -1]  # no page of the first layer's
    step.layers[0].lists[0, 2:4] = SHAPE.kv_heads * others
    return step.check()["selection"]


def test_a_wrong_step_is_not_measured(interpreted):
    assert interpreted(disturbed) < decode_layer.AGREEMENT


@pytest.mark.parametrize(
    ("method", "side"),
    [("freekv", None), ("freekv", AtOnce()), ("quest", None), ("arkvale", None), ("oracle", None)],
)
def test_launches_move_the_bytes_that_are_predicted(interpreted, method, side):
    """Kernels move what `benchmarks.gpu.predict` says that they must, and little more."""
    home = "device" if side is None else "host"
    config = counted.served(method, home, byte_counts.BUDGET)
    assert config is not None
    config = replace(config, exact_below=0)
    shape, context = counted.Attention(*byte_counts.SHAPE), byte_counts.CONTEXT
    sizes = predict.Sizes(config, 1, context, shape, corrected=0.0)  # queries stay the same
    expected = [
        (launch.kernel, predict.must_move(launch, sizes))
        for launch in counted.decode_step(
            config, batch=1, context=context, units=byte_counts.UNITS, shape=shape
        )
        if launch.kernel in MOVERS
    ]
    moved = interpreted(byte_counts.decode_step, method, side)
    compared = [(kernel, nbytes) for kernel, nbytes in moved if kernel in MOVERS]
    assert {kernel for kernel, _ in compared} == {*MOVERS}
    for (kernel, nbytes), (wanted, least) in zip(compared, expected, strict=True):
        assert kernel == wanted
        assert least <= nbytes <= least + BESIDE * shape.kv_heads, kernel


class SmallHome:
    """Stands in for memory of a GPU; has no room for long contexts."""

    def __init__(self, name, most=0):
        self.name = name

    def describe(self):
        return {"copy_gb_per_s": 1.0}

    def case(self, batch, context):
        if context > 1000:
            raise MemoryError(f"{context} tokens")
        op = {"us": 2.0 * batch, "bytes": 1, "floor_us": 1.0, "x_floor": 2.0 * batch}
        return {"ops": {"step": op}}

    def dense(self):
        return {"us": 7.0, "x_floor": None}


def run(monkeypatch, module, command, output):
    """A program's main function without a GPU; what it has stored."""
    monkeypatch.setattr(module, "gpu_header", lambda module: {})
    monkeypatch.setattr("sys.argv", ["prog", *command.split(), "--output", str(output)])
    with pytest.raises(SystemExit) as ended:
        module.main()
    return stored(output), ended.value.code


def test_decode_layer_goes_on_where_memory_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decode_layer, "Home", SmallHome)
    command = "--context 2000 --context 500 --batch 1 --batch 4"
    found, failed = run(monkeypatch, decode_layer, command, tmp_path / "result.json")
    assert failed
    assert set(found["errors"]) == {
        f"{home}, context 2000, batch {batch}" for home in decode_layer.HOMES for batch in (1, 4)
    }
    assert found["results"]["host, context 500, batch 4"]["ops"]["step"]["us"] == 8
    assert found["results"]["device, context 500, batch 1, dense"]["us"] == 7
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("One layer, home=device, us") :][1:4]
    assert [line.split() for line in table] == [
        ["context", "batch", "step", "dense"],
        ["500", "1", "2", "7"],
        ["500", "4", "8", "7"],
    ]


HARDWARE = """
import pytest

def test_right(): pass

def test_wrong():
    assert 1 + 1 == 3, "sums"

def test_absent():
    pytest.skip("no such device")
"""


def test_smoke_goes_on_after_a_failure(tmp_path, monkeypatch, capsys):
    """Tests run in its process, and each one's end is noted, with the error."""
    (tmp_path / "test_hardware.py").write_text(HARDWARE)
    monkeypatch.setattr(smoke, "ROOT", tmp_path)
    monkeypatch.setattr(smoke, "TESTS", ["test_hardware.py"])
    monkeypatch.setattr(smoke, "Home", SmallHome)
    monkeypatch.setattr(smoke, "CONTEXT", 500)
    monkeypatch.setattr(predict, "op_us", lambda *case: {"step": 1.5})
    found, failed = run(monkeypatch, smoke, "", tmp_path / "result.json")
    assert failed
    assert list(found["errors"]) == ["tests"]
    assert "test_hardware.py::test_wrong: AssertionError: sums" in found["errors"]["tests"]
    assert found["results"]["host, context 500, batch 8"]["ops"]["step"]["us"] == 16
    assert found["results"]["host, context 500, batch 8, predicted"] == {"step": 1.5}
    assert "left out" not in capsys.readouterr().out
    (tmp_path / "test_repaired.py").write_text(HARDWARE.replace("3, ", "2, "))
    monkeypatch.setattr(smoke, "TESTS", ["test_repaired.py"])
    found, failed = run(monkeypatch, smoke, "", tmp_path / "result.json")
    assert not failed
    ended = {name: noted["outcome"] for name, noted in found["results"]["tests"].items()}
    start = "test_repaired.py::test_"
    assert ended == {
        f"{start}right": "passed",
        f"{start}wrong": "passed",
        f"{start}absent": "skipped",
    }
    found, failed = run(monkeypatch, smoke, "--seconds 0", tmp_path / "result.json")
    assert not found["results"]
    assert "left out for lack of time: host, pool, device, pool, tests" in capsys.readouterr().out


def test_what_a_file_has_of_other_engines_is_kept(tmp_path, capsys):
    """Also its errors, which are not those of this run."""
    path, header = tmp_path / "result.json", {"command": "one"}
    report = common.Report(path, header)
    report.measure("device", lambda: 1)
    report.measure("host", lambda: 1 / 0)
    report = common.Report(path, header | {"command": "two"}, add=True)
    report.measure("stock", lambda: 2)
    with pytest.raises(SystemExit) as ended:
        report.finish()
    assert not ended.value.code
    found = stored(path)
    assert found["command"] == "one; two"
    assert found["results"] == {"device": 1, "stock": 2}
    assert list(found["errors"]) == ["host"]
    report = common.Report(path, header, add=True)
    report.measure("host", lambda: 3)
    assert not stored(path)["errors"]
    assert common.Report(path, header)._data["results"] == {}


def test_sparse_decode_beside_its_peers(tmp_path, monkeypatch, capsys):
    timed = {"device_copy": 1000.0, "ours": 4e-5, "flash_attention": 5e-5, "peer": 6e-5}
    for name, value in timed.items():
        monkeypatch.setattr(sparse_decode, name, lambda *a, value=value, **k: value)
    monkeypatch.setattr(sparse_decode, "installed", lambda: ["flashinfer"])
    found, failed = run(monkeypatch, sparse_decode, "", tmp_path / "result.json")
    assert not failed
    assert found["results"]["flashinfer, batch 8, 2048 tokens"] == 6e-5
    assert goals._attention(found["results"]) == pytest.approx(4e-5 / 67.1e-6, rel=1e-3)
    header = capsys.readouterr().out.split("Sparse decode attention")[1].splitlines()[1]
    assert header.split("  ")[-1].strip() == "flashinfer, us"


def test_layers_are_beyond_the_cache():
    shape = layer_parts.Shape()
    assert decode_layer.layers_for(1, 2048, shape) == decode_layer.MOST_LAYERS
    assert decode_layer.layers_for(32, 1 << 20, shape) == 2


def test_the_engine_has_as_many_slots_and_programs():
    assert layer_step.BUDGETS == tiers.BUDGETS
    assert layer_step.AHEAD_PROGRAMS == far.AHEAD_PROGRAMS


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "vocab_size": 30000,
}
TOKEN_BYTES = 2 * 2 * 2 * 32 * 2


@pytest.mark.slow
@pytest.mark.engine
def test_engine_decode(tmp_path, monkeypatch):
    """Two engines in turn, on the CPU, whose platform serves freekv, too; stock's prompts are
    computed."""
    monkeypatch.setattr(engine_decode, "STEPS", 3)
    monkeypatch.setattr(engine_decode, "MOST_REQUESTS", 4)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    arguments = "--context 200 --context 600 --batch 1 --batch 9 --budget 256 --uncompiled"
    sizes = ["--model", str(tmp_path), "--cache-gib", str(1000 * TOKEN_BYTES / 2**30)]
    given = engine_decode.options().parse_args([*arguments.split(), *sizes])
    report = common.Report(tmp_path / "result.json", {})
    largest: dict[int, int] = {}
    rows: list[Any] = []
    for engine in ("stock", "device"):
        given.prefill = engine == "stock"
        rows += engine_decode.measure(report, engine, given, largest, tmp_path / "result.log")
    assert largest == {200: 3, 600: 1}
    found = stored(tmp_path / "result.json")
    assert not found["errors"]
    assert 0 < found["results"]["stock, prefill 600"]["seconds"] == rows[-7][-1]
    for engine, fitting in (("stock", 3), ("device", 4)):  # in blocks of 128, and of 32
        assert found["results"][f"{engine}, decode 600, batch 9"]["fits"] is False
        decoded = found["results"][f"{engine}, decode 200, batch 3"]
        assert decoded["tokens_per_second"] == pytest.approx(3e3 / decoded["ms"])
        memory = found["results"][f"{engine}, memory"]
        assert memory["requests_that_fit"] == {"200": fitting, "600": 1}
        assert 600 * TOKEN_BYTES <= memory["device_bytes_per_request"]["600"] <= 640 * TOKEN_BYTES
    assert [(*row[:3], row[3] == "does not fit") for row in rows if row[0] == "device"] == [
        ("device", 200, 1, False),
        ("device", 200, 3, False),
        ("device", 200, 4, False),
        ("device", 200, 9, True),
        ("device", 600, 1, False),
        ("device", 600, 9, True),
    ]


def given(**options):
    words = [f"--{name}={value}" for name, value in options.items()]
    parsed = engine_decode.options().parse_args(words)
    parsed.context, parsed.batch = (131072,), (1, 8)
    return parsed


def test_what_engines_are_given():
    specs = {name: engine_decode.engine_spec(name, given()) for name in engine_decode.ENGINES}
    assert specs["stock"].env["VLLM_PLUGINS"] == ""
    assert "attention_backend" not in specs["stock"].llm
    assert specs["stock"].llm["kv_transfer_config"] == engine_decode.FILLED
    assert specs["device"].llm["compilation_config"]["cudagraph_capture_sizes"][-2:] == [16, 32]
    assert specs["host"].llm["max_num_seqs"] == 8
    usual = engine_decode.options().parse_args(["--defaults"])
    usual.context, usual.batch = (131072,), (1,)
    spec = engine_decode.engine_spec("device", usual)
    chosen_by_us = "max_num_seqs", "compilation_config", "gpu_memory_utilization"
    assert not {*chosen_by_us, "kv_cache_memory_bytes"} & spec.llm.keys()
    fixed = engine_decode.engine_spec("host", given(**{"cache-gib": 17, "home-gib": 100}))
    assert fixed.llm["kv_cache_memory_bytes"] == 17 << 30
    assert fixed.llm["additional_config"]["kv_retrieval"] == {
        "budget": 2048,
        "home": "host",
        "home_bytes": 100 << 30,
    }


def test_engines_come_in_turn(tmp_path, monkeypatch, capsys):
    """Stock vLLM first, whose largest batch the others get; what fails does not stop the rest."""
    output, asked = tmp_path / "result.json", []

    def measure(report, engine, given, largest, log):
        asked.append((engine, dict(largest), given.context, given.batch))
        if engine == "stock":
            largest[1000] = 3
        if engine == "device":
            raise RuntimeError("no such engine")
        return [[engine, 1000, 1, 2.0, 500.0, None, None, None]]

    monkeypatch.setattr(engine_decode, "gpu_header", lambda module: {})
    monkeypatch.setattr(engine_decode, "measure", measure)
    command = "prog --engine host --engine device --engine stock --context 1000"
    monkeypatch.setattr("sys.argv", [*command.split(), "--output", str(output)])
    with pytest.raises(SystemExit, match="True"):
        engine_decode.main()
    shape = [1000], engine_decode.BATCHES
    assert asked == [
        ("stock", {}, *shape),
        ("device", {1000: 3}, *shape),
        ("host", {1000: 3}, *shape),
    ]
    assert "FAILED device: RuntimeError: no such engine" in capsys.readouterr().out


def test_what_was_recalled():
    before = {"retrieval_heads": 10, "heads_corrected": 5, "looked_up": 0, "missed": 0, "ahead": 3}
    after = before | {"heads_corrected": 25, "looked_up": 1000, "missed": 40, "ahead": 103}
    assert engine_decode.shares(before, after, rows=8) == {
        "corrected": 0.25,
        "hit_rate": 0.96,
        "ahead_share": 0.1,
    }
    assert engine_decode.shares({}, {}, rows=8) == {}
    assert engine_decode.shares(before, before, rows=8) == {"corrected": 0}


def test_device_memory_of_a_request():
    measured = object.__new__(engine_decode.Measured)
    measured.block_size, measured.bytes_per_token, measured.requests = 32, 1000, 4
    measured.capacity = 3200
    assert measured.device_bytes(64, {}) == 64000
    assert measured.device_bytes(64, {"index": 5000}) == 64000 + 100
    tiers = {"blocks": 100, "dense": 3000, "index": 1000, "slots": 800}
    assert measured.device_bytes(64, {"index": 5000, "tiers": tiers}) == 80 + 200


def engine_results(**ms):
    """Milliseconds of engines at 128K, by engine and batch."""
    found = {}
    for name, value in ms.items():
        engine, batch = name.split("_")
        decoded = {"fits": value is not None, "ms": value}
        if value is not None:
            decoded["tokens_per_second"] = int(batch) / value * 1e3
        found[f"{engine}, decode {goals.LONG}, batch {batch}"] = decoded
    return found


def judged(start, results):
    (goal,) = [goal for goal in goals.GOALS if goal.figure.startswith(start)]
    return goal.judge(results)


def test_goals():
    results = engine_results(stock_1=11, stock_3=20, stock_8=None, device_1=6, device_3=8)
    assert judged("home=device, 128K, batch 1", results) == ("1.83 x", "reached")
    assert judged("home=device, 128K, the largest", results) == ("2.5 x", "MISSED")
    assert judged("home=device, batch 1", results) == ("", "not measured")
    equal = engine_results(stock_1=10, host_1=8, host_6=9, host_8=None)
    assert judged("home=host, 128K: tokens", equal) == ("6.67 x", "reached")
    equal["stock, memory"] = {"device_bytes_per_request": {str(goals.LONG): 1000}}
    equal["host, memory"] = {"device_bytes_per_request": {str(goals.LONG): 101}}
    assert judged("home=host: device memory", equal) == ("0.101 x", "MISSED")
    copied = {"gather, 16 KiB, 16 programs": 45.0, "copy engine, 1 GiB": 50.0}
    assert judged("recall", copied) == ("0.9 x", "reached")
    assert judged("recall", copied | {"copy engine, 1 GiB": None}) == ("", "not measured")
    attended = {"device copy, GB/s": 2000.0, "sparse, batch 8, 2048 tokens": 40e-6}
    assert judged("sparse attention, budget", attended) == ("1.19 x", "reached")
    attended["FA3 paged, batch 8, 2048 tokens"] = 30e-6
    assert judged("sparse attention, the same", attended) == ("1.33 x", "MISSED")
    for goal in goals.GOALS:
        assert goal.judge(None) == ("", "not measured")


def test_goals_are_those_of_the_documentation():
    text = (ROOT / "docs/gpu.md").read_text()
    assert "\n".join(goals.markdown()) in text


def test_kernels_are_measured_without_vllm():
    modules = "ceilings, compiled, decode_layer, goals, layer_step, peers, sparse_decode"
    code = f"import sys; sys.modules['vllm'] = None; from benchmarks.gpu import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_layer_is_measured_under_the_name_that_its_goal_reads():
    case = decode_layer.case_name("device", 131072, 8)
    results = {case: {"ops": {"select_ahead": {"us": 50.0}}}}
    assert judged("selection", results) == ("50 us", "reached")
