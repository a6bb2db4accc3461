"""Which cells the RULER benchmark runs, and how a run goes on after an interruption."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import build
from benchmarks.quality import __main__ as driver
from benchmarks.quality import ruler
from benchmarks.quality.ruler_tasks import catalogue
from benchmarks.quality.ruler_tasks.decoding import Answers
from benchmarks.quality.ruler_tasks.generator import RulerSample
from tests.benchmarks.test_ruler import row
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions


class FakeEngine:
    """Stands in for generator and engine; counts what is asked of them, and can break down."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.ran: list[tuple[str, int]] = []
        self.asked: list[dict[str, Any]] = []
        self.read_anew: list[str] = []
        self.breaks_at = ""

    @contextmanager
    def open(self, model: Path, context: int, budget: int, **options: Any) -> Iterator[Any]:
        self.started.append({"context": context, "budget": budget, **options})
        yield self

    def reset_prefix_cache(self) -> None:
        self.asked.append({})

    def answer(
        self,
        llm: Any,
        samples: Any,
        options: Any,
        metric: Any,
        tokens: int,
        label: str,
        anew: bool = False,
    ) -> Answers:
        if self.breaks_at and self.breaks_at in label:
            raise KeyboardInterrupt
        assert llm is self
        self.ran.append((label, tokens))
        self.asked.append(options)
        self.read_anew += [label] if anew else []
        score = 0.25 if label.startswith("cwe") else 1.0
        return Answers([score] * len(samples), ["text"] * len(samples), tokens, 0)

    def __call__(self, model: Path, context: int) -> Any:
        samples = [RulerSample((1,) * (context - 200), ("a",)), RulerSample((2,) * 100, ("b",))]
        return SimpleNamespace(
            has=lambda task, count: True, read=lambda task, count, tokenizer: samples[:count]
        )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    config = SimpleNamespace(
        num_hidden_layers=2, num_key_value_heads=1, head_dim=8, hidden_size=8, num_attention_heads=1
    )
    for name, replacement in (
        ("open_engine", fake.open),
        ("answer", fake.answer),
        ("Generator", fake),
        ("model_fingerprint", lambda model: "weights"),
        ("AutoTokenizer", SimpleNamespace(from_pretrained=lambda model: None)),
        ("AutoConfig", SimpleNamespace(from_pretrained=lambda model: config)),
        ("DTYPE", "float32"),
    ):
        monkeypatch.setattr(ruler, name, replacement)
    monkeypatch.setattr(build, "code_fingerprint", lambda: "code")
    return fake


def test_an_interrupted_run_goes_on_where_it_was(engine, tmp_path, monkeypatch, capsys):
    out = tmp_path / "ruler.json"
    command = ["ruler", "--task", "vt", "cwe", "--budgets", "512", "128", "--samples", "2"]
    command += ["--variants", "freekv", "control", "--out", str(out)]

    engine.breaks_at = "vt control 128"
    assert driver.main(command) == 130
    done = ["vt full", "vt freekv 128", "vt freekv 512"]
    assert engine.ran == [(label, 30) for label in done]

    engine.breaks_at = ""
    assert driver.main(command) == 0
    rest = [("vt prompts", 1), ("vt control 128", 30), ("vt control 512", 30), ("cwe full", 120)]
    assert engine.ran[3:] == rest  # full attention fails at cwe: no preset is put to it
    started = engine.started[1]
    assert (started["context"], started["budget"], started["batch"]) == (4096 - 200 + 120, 512, 2)
    assert started["also"] == {"freekv": {}, "streamingllm": {}}
    # 34 blocks of 128 tokens; 2 layers, keys and values, 8 numbers of 4 bytes; a tenth more.
    assert started["kv_cache_bytes"] == int(1.1 * 34 * 128 * 2 * 2 * 8 * 4)
    shown = capsys.readouterr().out
    assert row(shown, "freekv", "512") == ["100.0", "-", "100.0"]
    assert "without CWE" in shown
    assert "vt: prompts (6 cells and 2 readings of prompts to go, about 0 min)" in shown
    assert "vt control 128: 2 samples (6 cells and 1 readings of prompts to go" in shown

    ran = len(engine.ran)
    assert driver.main([*command, "--show"]) == 0
    assert len(engine.started) == 2
    assert len(engine.ran) == ran
    cell = json.loads(out.read_text())["cells"]["Qwen2.5-Coder-0.5B-Instruct/4096/vt/control/512"]
    assert (cell["score"], cell["scores"]) == (100.0, [100.0, 100.0])

    monkeypatch.setattr(build, "code_fingerprint", lambda: "another code")
    capsys.readouterr()
    assert driver.main([*command, "--show"]) == 0
    assert capsys.readouterr().out.count("  a: 'text'\n") == 6
    presets = [f"vt {name} {budget}" for name in ("freekv", "control") for budget in (128, 512)]
    every = ["vt full", *presets, "cwe full"]
    assert [label for label, _ in engine.ran[ran:]] == every
    ran = len(engine.ran)
    monkeypatch.setattr(ruler, "machine", lambda: {"isa": ["another"]})
    assert driver.main(command) == 0
    assert [label for label, _ in engine.ran[ran:]] == every


def test_prompts_that_retrieve_are_compared(engine, tmp_path, capsys):
    """Each sample is read exactly once, and once with each prefill budget."""
    out = tmp_path / "ruler.json"
    command = ["ruler", "--task", "vt", "cwe", "--samples", "2", "--variants", "kvretrieval"]
    command += ["--budgets", "1024", "--prefill-budgets", "2048", "1024", "--out", str(out)]
    command += ["--options", '{"prefill_chunk": 64}']
    engine.breaks_at = "vt prefill_2048 1024"
    assert driver.main(command) == 130
    engine.breaks_at = ""
    assert driver.main(command) == 0
    ours = {"method": "kvretrieval", "budget": 1024}
    exactly, at_1024, at_2048 = ({"prefill_budget": budget} for budget in (0, 1024, 2048))
    whole = ours | {"budget": 4032}  # 4096 - 200 and 120 tokens, in pages
    first = [{"exact": True}, ours | exactly]
    first += [{}, *[whole | at_1024] * 2, ours | at_1024, {}, *[whole | at_2048] * 2]
    then = [{}, whole | at_2048, ours | at_2048, {"exact": True}]
    assert engine.asked == first + then  # {} gives up what the prefix cache holds
    labels = ["vt full", "vt kvretrieval 1024"]
    labels += ["vt prompts", "vt prefill_1024", "vt prefill_1024 1024"]
    labels += ["vt prompts", "vt prefill_2048", "vt prompts", "vt prefill_2048 1024", "cwe full"]
    assert [label for label, _ in engine.ran] == labels
    started = engine.started[0]
    assert (started["budget"], started["prefill_budget"]) == (4032, 2048)
    assert started["prefill_chunk"] == 64
    shown = capsys.readouterr().out
    assert row(shown, "prefill_2048", "all") == row(shown, "prefill_1024", "1024")
    assert "vt: prompts (6 cells and 4 readings of prompts to go" in shown
    config = RetrievalConfig.from_options("kvretrieval", _of_engine(started))
    for options in filter(None, engine.asked):
        RequestOptions.parse({"kv_retrieval": options}, config)

    assert driver.main(command) == 0
    assert len(engine.ran) == len(labels)
    assert driver.main(command[:-2]) == 0  # chunks of 128
    assert len(engine.ran) == 2 * len(labels) - 1


def test_prompts_that_retrieve_a_share_are_compared(engine, tmp_path, capsys):
    """Beside them, all other requests of the engine ask for the budget alone."""
    out = tmp_path / "ruler.json"
    command = ["ruler", "--task", "vt", "--samples", "2", "--variants", "control", "--budgets"]
    command += ["1024", "--out", str(out), "--prefill-budgets"]
    assert driver.main([*command, "2048+12.5%", "2048", "1024+25%"]) == 0
    started = engine.started[0]
    assert (started["prefill_budget"], started["prefill_share"]) == (2048, 0.25)
    assert "prefill_depth" not in started
    config = RetrievalConfig.from_options("kvretrieval", _of_engine(started))
    asked = [options for options in engine.asked if options and "exact" not in options]
    for options in asked:
        RequestOptions.parse({"kv_retrieval": options}, config)
    pairs = [(options["prefill_budget"], options["prefill_share"]) for options in asked]
    assert pairs == [(0, 0)] + [(1024, 0.25)] * 3 + [(2048, 0)] * 3 + [(2048, 0.125)] * 3
    shown = capsys.readouterr().out
    assert row(shown, "prefill_2048+12.5%", "all") == row(shown, "prefill_1024+25%", "1024")

    assert driver.main([*command, "2048+25%=@70%"]) == 0
    assert engine.started[1]["prefill_depth"] == 0.7
    assert engine.started[1]["prefill_budget_shares"] == "uniform"
    assert row(capsys.readouterr().out, "prefill_2048+25%=@70%", "all")
    for other in ("2048@70%", "2048="):
        with pytest.raises(SystemExit):
            driver.main([*command, other, "2048"])
        assert "name budgets that agree" in capsys.readouterr().err


def _of_engine(started: dict[str, Any]) -> dict[str, Any]:
    """The options of a started engine that are retrieval's."""
    return {k: v for k, v in started.items() if k not in ("context", "batch", "kv_cache_bytes")}


def test_other_samples_and_lengths_are_other_cells(engine, tmp_path):
    command = ["ruler", "--task", "vt", "--variants", "--out", str(tmp_path / "ruler.json")]
    for change in (["--samples", "1"], ["--samples", "2"], ["--context", "8192", "--samples", "2"]):
        driver.main([*command, *change])
    assert [label for label, _ in engine.ran] == ["vt full"] * 3
    driver.main([*command, "--context", "8192", "--samples", "2"])
    assert len(engine.ran) == 3
    driver.main([*command, "--samples", "2"])
    assert len(engine.ran) == 3  # of each length there is a cell of its own


def test_other_presets_in_the_engine_are_other_cells(engine, tmp_path):
    """Beside them kvretrieval has larger pages."""
    command = ["ruler", "--task", "vt", "--samples", "1", "--budgets", "128"]
    command += ["--out", str(tmp_path / "ruler.json"), "--variants", "kvretrieval"]
    driver.main(command)
    driver.main([*command, "freekv"])
    again = ["vt full", "vt kvretrieval 128"]
    assert [label for label, _ in engine.ran] == [*again, *again, "vt freekv 128"]


def test_methods_that_watch_prompts_read_them_anew(engine, tmp_path):
    command = ["ruler", "--task", "vt", "--samples", "1", "--budgets", "128"]
    command += ["--out", str(tmp_path / "ruler.json"), "--variants", "razor", "snapkv"]
    driver.main(command)
    assert [label for label, _ in engine.ran] == ["vt full", "vt razor 128", "vt snapkv 128"]
    assert engine.read_anew == ["vt snapkv 128"]


def test_an_engine_of_its_own_has_its_options(engine, tmp_path):
    command = ["ruler", "--task", "vt", "--samples", "1", "--budgets", "128"]
    command += ["--out", str(tmp_path / "ruler.json"), "--variants", "quest_16"]
    driver.main(command)
    options = _of_engine(engine.started[0])
    config = RetrievalConfig.from_options(options.pop("method"), options)
    assert (config.own.name, config.page_size, config.dense_layers) == ("quest", 16, 2)
    assert engine.asked[-1] == {"method": "quest", "prefill_budget": 0, "budget": 128}
    assert [label for label, _ in engine.ran] == ["vt full", "vt quest_16 128"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--task", "niah"], "niah_single_1"),
        (["--samples", "0"], "--samples 0: at least 1 is needed"),
        (["--context", "2048"], "--context 2048: at least 4096 is needed"),
        (["--budgets", "0"], "--budgets 0"),
        (["--prefill-budgets", "-1"], "--prefill-budgets -1"),
        (["--prefill-budgets", "2048+25"], "--prefill-budgets: invalid prefill_budget value"),
        (["--variants", "nothing"], "freekv"),
        (
            ["--variants", "ttkv", "--budgets", "128"],
            "--budgets for ttkv: kv_retrieval.budget=128 is",
        ),
    ],
)
def test_wrong_arguments_are_named(wrong, said, capsys):
    with pytest.raises(SystemExit):
        driver.main(["ruler", *wrong])
    assert said in capsys.readouterr().err


def test_the_list_needs_neither_model_nor_network(capsys):
    assert driver.main(["ruler", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(task.name in shown for task in catalogue.TASKS)
    assert all(variant.name in shown for variant in catalogue.KNOWN)
