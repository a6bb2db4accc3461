"""Which cells the accuracy benchmark runs, and how a run goes on after an interruption."""

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks import build
from benchmarks.quality import __main__ as driver
from benchmarks.quality import accuracy
from benchmarks.quality.tasks import catalogue, scoring, store, variants
from benchmarks.quality.tasks.engine import BATCH
from benchmarks.quality.tasks.variant import OWN, PAGE
from tests.support.accuracy_figures import NOVEL, OLD, PASSKEY, SENTENCES
from tests.support.byte_text import byte_text
from tests.support.outside import MEDIAN, POINTS, install, installed
from vllm_kvretrieval.calibration.asking import Questions
from vllm_kvretrieval.calibration.divergence import Generated
from vllm_kvretrieval.calibration.samples import Sample
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.retrieval.pooling import Pooling


def test_thresholds_are_variants_of_the_same_engine():
    cells = catalogue.cells_of(NOVEL, (512,), 4096, variants.chosen(False, ["thresholds"]))
    names = {cell.variant.name for cell in cells}
    assert {"freekv", "every_step", "threshold_0.8", "threshold_0.7", "reuse"} <= names
    assert not any(cell.variant.engine for cell in cells)


CORE = ["kvretrieval", "oracle", "freekv", "every_step", "sink_window"]
QUICK = ["kvretrieval", "oracle", "freekv", "sink_window"]


@pytest.mark.parametrize(
    ("quick", "also", "added"),
    [
        (False, [], []),
        (True, [], []),
        (True, ["every_step"], ["every_step"]),
        (False, ["mean", "quest"], ["mean", "quest"]),
        (
            False,
            ["poolings"],
            [
                f"{index}_{pooling}"
                for index in ("pooling", "bounds")
                for pooling in ("relative", "max", "sum", "max_softmax")
            ],
        ),
        (
            False,
            ["presets", "quest"],
            ["quest", "arkvale", "infllm", "shadowkv", "shadowkv_scores"],
        ),
        (
            False,
            ["indexes"],
            [
                *("mean", "mean_std", "mean_std_half", "bounding", "representative", "one_bit"),
                *("low_rank_4", "low_rank_8", "kvretrieval_rerank"),
            ],
        ),
        (
            True,
            ["thresholds"],
            ["every_step", "threshold_0.8", "threshold_0.7", "reuse", "speculative", "summary_8"],
        ),
        (False, ["pages"], ["page_16", "kvretrieval_page_16"]),
        (False, ["budgets"], ["pyramid", "pyramid_2"]),
    ],
)
def test_variants_run_where_asked_for(quick, also, added):
    names = [variant.name for variant in variants.chosen(quick, also)]
    assert names[0] == OWN == "kvretrieval"
    assert sorted(names) == sorted((QUICK if quick else CORE) + added)


def test_variants_run_alone_where_asked_for(capsys):
    names = [variant.name for variant in variants.chosen(False, ["presets", "fier"], alone=True)]
    assert names == ["quest", "arkvale", "infllm", "shadowkv", "shadowkv_scores", "fier"]
    with pytest.raises(SystemExit):
        driver.main(["accuracy", "--alone"])
    assert "--alone runs the variants of --also alone; name some" in capsys.readouterr().err


def test_cells_are_of_all_budgets_and_the_covering_one():
    compared = variants.chosen(False, ["mean"])
    cells = catalogue.cells_of(NOVEL, (256, 512), 4224, compared)
    assert len({cell.name for cell in cells}) == len(cells) == 2 * len(compared) + 1
    assert cells[-1].name == f"{NOVEL.name}/kvretrieval/all"
    assert cells[-1].options == {"budget": 4224, "method": "kvretrieval"}
    by_name = {cell.name.split("/", 1)[1]: cell for cell in cells}
    every_step = {"budget": 256, "method": "freekv", "correction_threshold": 1.0}
    assert by_name["every_step/256"].options == every_step
    assert not [c for c in catalogue.cells_of(PASSKEY, (256,), 4224, compared) if c.covering]


def test_an_engine_serves_every_cell_that_it_runs():
    """It serves all cells at once, and each cell alone, as after an interruption."""
    cells = catalogue.cells_of(NOVEL, (768, 1024), 4352, variants.VARIANTS)
    engines = [variant.engine for variant in variants.VARIANTS]
    assert {"method": "omnikv"} in engines
    for engine_options in engines:
        run = [cell for cell in cells if cell.variant.engine == engine_options]
        options = dict(engine_options)
        own = options.pop("method", OWN)
        for part in (run, *([cell] for cell in run)):
            also = catalogue.also_of(part)
            config = RetrievalConfig.from_options(own, {"budget": 4352, "also": also, **options})
            for cell in part:
                RequestOptions.parse({"kv_retrieval": cell.options}, config)
                served: Any = config.methods[cell.variant.method]
                alone: Any = cell.variant.config.own
                assert replace(served, name=alone.name) == alone
            named = {cell.variant.method for cell in part}
            assert set(config.methods) == named | {own, "streamingllm"}


def test_indexes_differ_in_nothing_but_the_index():
    for variant in variants.VARIANTS:
        if variant.index in ("", "none"):
            continue
        method = variant.config.own
        assert method.pooling is Pooling.MEAN_SOFTMAX
        assert not method.speculates or variant.asks == {"correction_threshold": 1.0}
        assert method.rerank == (2 if variant.index.endswith("_rerank") else 0)
        assert variant.config.page_size == PAGE


@pytest.mark.parametrize(
    ("name", "head_size", "kept"),
    [
        ("freekv", 64, (8.0, 0.03125)),
        ("oracle", 64, (0.0, 0.0)),
        ("sink_window", 64, (0.0, 0.0)),
        ("kvretrieval", 64, (20.4375, 0.07983)),
        ("kvretrieval", 256, (53.375, 0.05212)),
        ("mean", 64, (4.0, 0.01562)),
        ("summary_8", 64, (32.0, 0.125)),
        ("quest", 64, (8.0, 0.03125)),
        ("page_16", 64, (16.0, 0.0625)),
    ],
)
def test_index_bytes_are_of_the_variant_alone(tmp_path, name, head_size, kept):
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": head_size}))
    variant = next(v for v in variants.VARIANTS if v.name == name)
    assert tuple(scoring.index_bytes(variant, tmp_path).values()) == kept


class FakeEngine:
    """Stands in for vLLM: answers right, counts its starts and runs, and can break down."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.started: list[int | None] = []
        self.served: list[set[str]] = []
        self.options: dict[str, Any] = {}
        self.engines: list[dict[str, Any]] = []
        self.ran: list[str] = []
        self.breaks_at = ""

    @contextmanager
    def open(
        self,
        model: Path,
        context: int,
        budget: int | None,
        kv_cache_bytes: int,
        also: Any = None,
        **options: Any,
    ) -> Iterator[str]:
        assert kv_cache_bytes > 2 * context * 4 * 64 * 2
        self.started.append(budget)
        if budget is not None:
            self.served.append(set(also))
        self.options = options
        self.engines += [options] if budget is not None else []
        yield "engine"

    def run(self, llm: Any, samples: list[Sample], options: Any, label: str) -> list[Generated]:
        return self.run_together(llm, [Questions(samples, options)], label)[0]

    def run_together(self, llm: Any, asked: list[Questions], label: str) -> list[list[Generated]]:
        if self.breaks_at and self.breaks_at in label:
            raise KeyboardInterrupt
        self.ran.append(label)
        return [self._answered(questions) for questions in asked]

    def _answered(self, asked: Questions) -> list[Generated]:
        assert not asked.anew, "no variant here watches prompts"
        if asked.options is not None:
            own = self.engines[-1].get("method", OWN)
            assert asked.options["method"] in self.served[-1] | {own}
        answers = [self.tokenizer(sample.answer).input_ids for sample in asked.samples]
        return [
            Generated((*sample.forced, *answer), None)
            for sample, answer in zip(asked.samples, answers, strict=True)
        ]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The engine, and a model of four layers in ``tmp_path``."""
    text = byte_text()
    fake = FakeEngine(text.tokenizer)
    config = {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, replacement in (
        ("open_engine", fake.open),
        ("run_samples", fake.run),
        ("run_together", fake.run_together),
        ("retrieval_counts", lambda llm: {"corrected": 0, "sparse_heads": 0}),
        ("model_fingerprint", lambda model: "weights"),
        ("RESULTS", tmp_path),
        ("AutoTokenizer", SimpleNamespace(from_pretrained=lambda model: text.tokenizer)),
    ):
        monkeypatch.setattr(accuracy, name, replacement)
    monkeypatch.setattr(build, "code_fingerprint", lambda: "code")
    return fake


def test_an_interrupted_run_goes_on_where_it_was(fake, tmp_path, monkeypatch, capsys):
    what = f"sentences-{tmp_path.name}-2k"
    command = [
        "accuracy",
        "--quick",
        "--model",
        str(tmp_path),
        "--task",
        what,
        "--samples",
        str(BATCH),
    ]

    fake.breaks_at = "freekv"
    assert driver.main(command) == 130
    assert fake.started == [None, 512]
    ran = [f"{what} full", *(f"{what} {n} 512" for n in ("kvretrieval", "oracle", "sink_window"))]
    assert fake.ran == ran
    assert fake.served == [{"oracle", "freekv", "streamingllm"}]

    fake.breaks_at = ""
    assert driver.main(command) == 1  # the control answers as well: the task proves nothing
    assert fake.started == [None, 512, 512]
    assert fake.ran[4:] == [f"{what} freekv 512"]
    assert fake.served[1:] == [{"freekv"}]
    shown = capsys.readouterr().out
    assert "FAIL" in shown

    assert driver.main(command) == 1
    assert fake.started == [None, 512, 512]

    capsys.readouterr()
    driver.main([*command, "--also", "thresholds"])
    assert fake.started[3:] == [512]
    assert fake.served[2:] == [{"freekv", "speculative", "summary_8"}]
    others = ("every_step", "threshold_0.8", "threshold_0.7", "reuse", "speculative", "summary_8")
    assert fake.ran[5:] == [f"{what} {name} 512" for name in others]

    driver.main([*command, "--also", "page_16", "mean"])
    assert fake.started[4:] == [512, 512]
    assert fake.served[3:] == [{"mean"}, {"freekv"}]
    assert fake.options == {"page_size": 16}
    assert fake.ran[11:] == [f"{what} mean 512", f"{what} page_16 512"]

    monkeypatch.setattr(build, "code_fingerprint", lambda: "another code")
    driver.main(command)
    assert fake.started[6:] == [512]
    assert len(fake.ran) == 13 + 4


def test_presets_run_in_engines_of_their_own(fake, tmp_path, capsys):
    """By name, another package's, too; with ``--apart`` all of them, as their papers have them."""
    what = f"sentences-{tmp_path.name}-2k"
    command = ["accuracy", "--quick", "--model", str(tmp_path), "--task", what, "--samples", "2"]
    command += ["--variants", "quest", "toy", "ttkv", "full"]
    with installed(install(tmp_path / "package", MEDIAN, POINTS)):
        tables = [str(tmp_path / f"t.{end}") for end in ("md", "csv", "tex")]
        assert driver.main([*command, "--budgets", "512", "1024", "--table", *tables]) == 0
        assert fake.engines == [{"page_size": 32}, {"method": "toy"}, {"method": "ttkv"}]
        assert fake.served == [{"quest"}, set(), set()]
        said = capsys.readouterr().out
        assert "ttkv is left out at 512: --budgets for ttkv=512 is too small" in said
        assert "| ttkv | 1024 | 100.0 |" in (tmp_path / "t.md").read_text()
        assert "accuracy-quick.json" in said

        assert driver.main([*command, "--budgets", "1024", "--apart"]) == 0
        assert fake.engines[3:] == [{"method": "quest"}]  # the others had that before
        (tmp_path / "package" / "toy_index.py").write_text(MEDIAN + "\n# another thought\n")
        assert driver.main([*command, "--budgets", "1024", "--apart"]) == 0
        assert fake.engines[4:] == [{"method": "toy"}]
    for wrong, why in (
        (["--variants", "toy"], "there is no such variant, group or preset; there are: "),
        (["--variants", "ttkv", "--budgets", "512"], "--budgets for ttkv=512 is too small"),
        (["--variants", "quest", "--also", "mean"], "leave --also and --alone out"),
        (["--apart"], "name the presets by --variants"),
    ):
        with pytest.raises(SystemExit):
            driver.main(["accuracy", "--quick", "--model", str(tmp_path), *wrong])
        assert why in capsys.readouterr().err


def test_tasks_of_ones_own(fake, tmp_path):
    """Their right answers are forced; a task has no more examples than the file."""
    path = tmp_path / "mine.jsonl"
    lines = [{"input": n * "abc ", "outputs": ["4711"]} for n in (100, 200)]
    path.write_text("\n".join(map(json.dumps, lines)))
    given = Namespace(data=[path], model=tmp_path)
    (task,) = accuracy._own_tasks(given)
    assert (task.name, task.samples) == (f"mine-{tmp_path.name}-0k", 2)
    samples = task.build(byte_text(), task.context, 9)
    assert [len(sample.prompt) for sample in samples] == [400, 800]
    assert [(len(sample.forced), sample.parts) for sample in samples] == [(4, ((1, 4),))] * 2


def test_cells_that_fill_a_batch_run_at_once():
    """A cell that speculates has the engine's counts of corrections for itself."""
    few, many = (
        accuracy.Job(task, [Sample((1,), (), "yes")] * count, "key")
        for task, count in ((NOVEL, BATCH // 4), (SENTENCES, BATCH))
    )
    todo = [
        (job, cell)
        for job in (few, many)
        for cell in catalogue.cells_of(job.task, (512,), 4096, variants.chosen(True, ["mean"]))
    ]
    rounds = [
        (job.task, [cell.variant.name for cell in cells]) for job, cells in accuracy._rounds(todo)
    ]
    assert rounds == [
        (NOVEL, ["kvretrieval", "oracle", "sink_window", "mean"]),
        (NOVEL, ["kvretrieval"]),  # at the covering budget
        (NOVEL, ["freekv"]),
        *((SENTENCES, [name]) for name in ("kvretrieval", "oracle", "sink_window", "mean")),
        (SENTENCES, ["freekv"]),
    ]


def test_a_method_that_changes_is_run_anew(tmp_path, monkeypatch):
    """What the engine serves under a name is part of a cell's key."""
    monkeypatch.setattr(build, "code_fingerprint", lambda: "code")
    mean = next(v for v in variants.VARIANTS if v.name == "mean")
    other = replace(mean, served=mean.served | {"pooling": "max"})
    results = store.Results(tmp_path / "out.json", {"build": OLD})
    benchmark = accuracy.Benchmark(results, store.References(tmp_path), (512,), [mean])
    job = accuracy.Job(SENTENCES, [], "key")
    keys = {
        benchmark._cell_key(job, catalogue.Cell(SENTENCES, v, budget))
        for v in (mean, other)
        for budget in (256, 512)
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("option", "message"),
    [("--task", "no task nothing; there are: passkey-qwen-4k"), ("--also", "poolings")],
)
def test_unknown_names_are_refused(capsys, option, message):
    with pytest.raises(SystemExit):
        driver.main(["accuracy", option, "nothing"])
    assert message in capsys.readouterr().err


def test_a_budget_without_use_to_a_variant_is_refused(capsys):
    with pytest.raises(SystemExit):
        driver.main(["accuracy", "--alone", "--also", "tiers", "--budgets", "512"])
    assert "budgets for tiers_256=512 is too small" in capsys.readouterr().err


def test_another_model_takes_the_tasks_over(tmp_path):
    tasks = catalogue.with_model(catalogue.TASKS, tmp_path / "Mine")
    assert "passkey-Mine-4k" in [task.name for task in tasks]
    assert len({task.name for task in tasks}) == len(tasks)
