"""The benchmark of sparse prefill: which answers it compares, and how a run goes on."""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import build
from benchmarks.quality import __main__ as driver
from benchmarks.quality import prefill
from benchmarks.quality.tasks import store
from tests.benchmarks.test_accuracy_metrics import top
from tests.support.byte_text import byte_text
from vllm_kvretrieval.calibration.divergence import Generated
from vllm_kvretrieval.calibration.samples import Sample

CONTEXT = 2048
SETTINGS = ["1024:128", "512:128"]


class FakeEngine:
    """Stands in for vLLM: its answers depend on the code, the CPU and its options alone."""

    def __init__(self) -> None:
        self.answers_by: list[Any] = ["code", ["avx2"]]
        self.started: list[dict[str, Any]] = []
        self.ran: list[str] = []
        self.breaks_at = ""

    @contextmanager
    def open(self, *args: Any, dtype: str, method: str, **options: Any) -> Iterator[Any]:
        self.started.append(options)
        nothing = {"generate": lambda *args, **more: None, "reset_prefix_cache": lambda: None}
        yield SimpleNamespace(**nothing)

    def run(self, llm: Any, samples: list[Sample], options: Any, label: str) -> list[Generated]:
        if self.breaks_at and self.breaks_at in label:
            raise KeyboardInterrupt
        self.ran.append(label)
        seed = [self.answers_by, self.started[-1].get("attention")]
        random = np.random.default_rng(list(json.dumps(seed).encode()))
        scored = [top(random.normal(size=(len(s.scored), 40)), 8) for s in samples]
        return [Generated(s.forced, of) for s, of in zip(samples, scored, strict=True)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    fake = FakeEngine()
    for name, replacement in (
        ("open_engine", fake.open),
        ("run_samples", fake.run),
        ("retrieval_counts", lambda llm: {"prompt": len(fake.ran), "prompt_attended": 0}),
        ("prefix_cache_bytes", lambda model, samples, dtype: 1),
        ("model_fingerprint", lambda model: "weights"),
        ("novel_text", lambda tokenizer: byte_text()),
        ("AutoTokenizer", SimpleNamespace(from_pretrained=lambda model: None)),
        ("RESULTS", tmp_path),
        ("_processor_time", itertools.count(1.0).__next__),
    ):
        monkeypatch.setattr(prefill, name, replacement)
    monkeypatch.setattr(build, "code_fingerprint", lambda: fake.answers_by[0])
    monkeypatch.setattr(store, "machine", lambda: {"isa": fake.answers_by[1]})
    return fake


def run(out: Path, *settings: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """The cells of a run with these settings, by name."""
    command = ["prefill", "--contexts", str(CONTEXT), "--settings", *settings]
    command += ["--options", json.dumps(options or {}), "--output", str(out)]
    assert driver.main(command) == 0
    cells: dict[str, Any] = json.loads(out.read_text())["cells"]
    return cells


def test_an_interrupted_run_goes_on_where_it_was(engine, tmp_path):
    out = tmp_path / "prefill.json"
    engine.breaks_at = f"{CONTEXT} {SETTINGS[1]}"
    command = ["prefill", "--contexts", str(CONTEXT), "--settings", *SETTINGS]
    assert driver.main([*command, "--output", str(out)]) == 130
    assert engine.ran == [f"{CONTEXT} exact", f"{CONTEXT} {SETTINGS[0]}"]
    engine.breaks_at = ""
    cells = run(out, *SETTINGS)
    assert engine.ran[2:] == [f"{CONTEXT} {SETTINGS[1]}"]
    assert set(cells) == {f"{CONTEXT}/{name}" for name in ("exact", *SETTINGS)}
    assert [cells[f"{CONTEXT}/{name}"]["copy"]["kl"] for name in SETTINGS] == pytest.approx(
        [0, 0], abs=1e-4
    )
    run(out, *SETTINGS)
    assert len(engine.started) == 3


def test_a_setting_may_have_a_share_equal_heads_and_a_depth(engine, tmp_path):
    settings = "1024+12.5%=@70%:128:8", "512:128"
    cells = run(tmp_path / "prefill.json", *settings)
    assert set(cells) == {f"{CONTEXT}/{name}" for name in ("exact", *settings)}
    first, second = engine.started
    assert first == {
        "prefill_budget": 1024,
        "prefill_share": 0.125,
        "prefill_budget_shares": "uniform",
        "prefill_depth": 0.7,
        "prefill_chunk": 128,
        "prefill_queries": 8,
    }
    assert second == {"prefill_budget": 512, "prefill_chunk": 128}


@pytest.mark.parametrize(
    "setting",
    [
        "1024",
        "1024+25:128",
        "1024+x%:128",
        "1024==:128",
        "1024@70%=:128",
        "1024+0%:128",
        "1024+100%:128",
        "+25%:128",
        "nan:128",
        "1024@0%:128",
        "1024@100%:128",
        "1024@70%+25%:128",
    ],
)
def test_wrong_settings_are_refused(setting, capsys):
    with pytest.raises(SystemExit):
        driver.main(["prefill", "--settings", setting])
    assert f"invalid parse value: '{setting}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "options"),
    [(["other", ["avx2"]], {}), (["code", ["avx512f"]], {}), (None, {"attention": "vllm"})],
    ids=["code", "isa", "options"],
)
def test_answers_are_compared_with_those_of_the_same_engine(engine, tmp_path, other, options):
    """Whatever other engines have answered exactly between the runs."""
    mine = engine.answers_by
    run(tmp_path / "mine.json", SETTINGS[0])
    engine.answers_by = other or mine
    run(tmp_path / "other.json", SETTINGS[0], options=options)
    engine.answers_by = mine
    cells = run(tmp_path / "mine.json", *SETTINGS)
    assert engine.ran.count(f"{CONTEXT} exact") == 2
    assert cells[f"{CONTEXT}/{SETTINGS[1]}"]["novel"]["kl"] == pytest.approx(0, abs=1e-4)
