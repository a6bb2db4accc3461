"""The RULER benchmark's own tools: scores, samples, early ends, the table, and what is kept."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.quality.ruler_tasks import catalogue, decoding, generator, report, scoring
from benchmarks.quality.ruler_tasks.decoding import Answers
from benchmarks.quality.ruler_tasks.generator import Generator, GeneratorError, RulerSample


def letters(text: str) -> Any:
    """A tokenizer: one token per letter."""
    return SimpleNamespace(input_ids=[ord(letter) for letter in text])


@pytest.mark.parametrize(
    ("text", "references", "every", "part"),
    [
        (" 4711 and 4712.", ("4711", "4712"), 1.0, 1.0),
        ("4711", ("4711", "4712", "4713", "4714"), 0.25, 1.0),
        ("France", ("france", "FRANCE"), 1.0, 1.0),
        ("Italy", ("France",), 0.0, 0.0),
        ("New\tYork", ("New\nYork",), 1.0, 1.0),
        ("", ("France",), 0.0, 0.0),
    ],
)
def test_scores_are_rulers(text, references, every, part):
    assert scoring.match_all(text, references) == every
    assert scoring.match_part(text, references) == part


def test_tasks_are_rulers_13():
    assert [task.name for task in catalogue.TASKS if task.metric is scoring.match_part] == [
        "qa_1",
        "qa_2",
    ]
    assert {task.tokens for task in catalogue.TASKS if task.name.startswith("niah")} == {128}
    assert len({task.name for task in catalogue.TASKS}) == 13
    assert len({task.short for task in catalogue.TASKS}) == 13


SAMPLES = "".join(
    json.dumps({"index": i, "input": f"p{i}", "outputs": [f"a{i}", "b"], "length": 9}) + "\n"
    for i in range(3)
)


def test_samples_are_read_in_tokens(tmp_path):
    path = tmp_path / "vt.jsonl"
    path.write_text(SAMPLES)
    first, second = generator.read_samples(path, 2, letters)
    assert first == RulerSample((ord("p"), ord("0")), ("a0", "b"))
    assert second.references == ("a1", "b")
    with pytest.raises(ValueError, match="holds 3 samples, not 4"):
        generator.read_samples(path, 4, letters)


@pytest.mark.parametrize("line", ['{"input": "p"', '{"input": "p"}', '{"prompt": "p"}'])
def test_what_is_not_rulers_is_refused(tmp_path, line):
    path = tmp_path / "vt.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"vt\.jsonl is not RULER's"):
        generator.read_samples(path, 1, letters)


PROGRAM = """
import argparse, os, subprocess, sys
parser = argparse.ArgumentParser()
for name in ("benchmark task tokenizer_type tokenizer_path save_dir model_template_type "
             "max_seq_length num_samples").split():
    parser.add_argument("--" + name, required=True)
args = parser.parse_args()
assert os.path.isdir(os.environ["NLTK_DATA"]), "no sentence model"
script = os.path.join(os.path.dirname(__file__), "script.py")
subprocess.run(f"python {script} {args.save_dir} {args.task} {args.tokenizer_path} "
               f"{args.num_samples}", shell=True)
"""

SCRIPT = """
import json, pathlib, sys
import imported
out, task, model, count = sys.argv[1:]
if task == "cwe":
    sys.exit("cannot make cwe")
path = pathlib.Path(out) / task / "validation.jsonl"
path.parent.mkdir()
for index in range(int(count)):
    line = {"index": index, "input": model, "outputs": ["a"]}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\\n")
"""


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and a generator that does what RULER's does with its command line."""
    monkeypatch.setattr(generator, "CACHE", tmp_path / "cache")
    model = tmp_path / "my model"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    packages = Generator(model, 4096)._home / "packages"
    program = packages / generator._PROGRAM
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    (program.parent / "script.py").write_text(SCRIPT)
    (packages / "imported.py").touch()
    (packages / generator._SENTENCE_MODEL).mkdir(parents=True)
    return model


def test_samples_are_generated_once(fetched):
    mine = Generator(fetched, 4096)
    assert not mine.has("vt", 2)
    mine.make("vt", 2)
    assert mine.has("vt", 2)
    assert not mine.has("vt", 3)
    assert not mine.has("fwe", 1)
    assert not Generator(fetched, 8192).has("vt", 2)
    read = mine.read("vt", 2, letters)
    assert [sample.prompt for sample in read] == [tuple(map(ord, str(fetched)))] * 2
    mine.make("vt", 3)
    assert mine.has("vt", 3)
    (fetched / "tokenizer.json").write_text('{"another": 1}')
    assert not Generator(fetched, 4096).has("vt", 2)


def test_a_generator_that_fails_is_quoted(fetched):
    with pytest.raises(GeneratorError, match=r"made no cwe; it said:\ncannot make cwe"):
        Generator(fetched, 4096).make("cwe", 2)


class FakeLLM:
    """Stands in for vLLM: gives every request its text, a letter per step, then ends it."""

    def __init__(self, texts: Sequence[str], cached: int) -> None:
        self.llm_engine = self
        self._texts = list(texts)
        self._cached = cached
        self._running: dict[str, tuple[str, int]] = {}
        self.aborted: list[str] = []
        self.params: list[Any] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
        self._running[name] = (self._texts.pop(0), 0)
        self.params.append(params)

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.aborted.append(name)
            del self._running[name]

    def step(self) -> list[Any]:
        outputs = []
        for name, (text, length) in list(self._running.items()):
            length += 1
            self._running[name] = (text, length)
            finished = length == min(len(text), self.params[0].max_tokens)
            if finished:
                del self._running[name]
            completion = SimpleNamespace(text=text[:length], token_ids=range(length))
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    outputs=[completion],
                    finished=finished,
                    num_cached_tokens=self._cached,
                )
            )
        return outputs[::-1]


def test_samples_end_when_their_score_can_only_stay():
    samples = [RulerSample((1,) * 10, ("ab", "cd")), RulerSample((2,) * 12, ("ab", "cd"))]
    llm = FakeLLM(["xabxcdxxxx", "xabxxxxxxxxx"], cached=8)
    options = {"budget": 512}
    found = decoding.answer(llm, samples, options, scoring.match_all, 8, "label")
    assert found == Answers([1.0, 0.5], ["xabxcd", "xabxxxxx"], tokens=6 + 8, prefilled=2 + 4)
    assert len(llm.aborted) == 1
    assert llm.params[0].extra_args == {"kv_retrieval": {"budget": 512}}
    assert llm.params[0].temperature == 0
    assert not llm.params[0].ignore_eos


def test_room_is_counted_in_blocks():
    samples = [RulerSample((1,) * 100, ("a",)), RulerSample((1,) * 200, ("a",))]
    assert decoding.cache_tokens(samples, 28) == 128 + 256


TASKS = catalogue.TASKS[:3]


def test_the_engine_knows_every_preset_that_is_asked_for():
    assert catalogue.engine_options(catalogue.VARIANTS) == {
        "also": {name: {} for name in ("oracle", "freekv", "quest", "streamingllm")}
    }
    ours = [variant for variant in catalogue.VARIANTS if variant.name == "kvretrieval"]
    assert catalogue.engine_options([catalogue.FULL, *ours]) == {"also": {}}


def test_a_preset_with_a_layout_of_its_own_is_run_alone():
    by_name = {variant.name: variant for variant in catalogue.KNOWN}
    fier, ours = by_name["fier"], by_name["kvretrieval"]
    assert catalogue.engine_options([fier]) == {"method": "fier", "also": {}}
    groups = catalogue.grouped([fier, ours])
    assert [group.variants for group in groups] == [(ours,), (fier,)]


def scores(**by_row: Sequence[float | None]) -> dict[tuple[str, str, int | None], dict[str, Any]]:
    """Cells of `TASKS` by ``variant_budget``; a None is not there."""
    cells = {}
    for row, values in by_row.items():
        variant, _, budget = row.partition("_")
        for task, value in zip(TASKS, values, strict=True):
            if value is not None:
                key = (task.name, variant, int(budget) if budget else None)
                cells[key] = {"score": value, "samples": 10}
    return cells


def row(shown: str, *first: str) -> list[str]:
    """The cells of the table's row that begins with these."""
    lines = [[text.strip() for text in line.strip("|").split("|")] for line in shown.splitlines()]
    return next(line[len(first) :] for line in lines if line[: len(first)] == list(first))


def test_means_are_over_the_tasks_that_count():
    cells = scores(
        full=[100, 30, 40],
        freekv_512=[90, None, 20],
        control_512=[5, None, None],
        freekv_128=[0] * 3,
    )
    shown = report.table(TASKS, (512, 128), cells)
    assert row(shown, "preset", "budget") == ["S1", "S2", "S3", "mean"]
    assert row(shown, "full", "all") == ["100.0", "30.0", "40.0", "70.0"]
    assert row(shown, "freekv", "512") == ["90.0", "-", "20.0", "55.0"]
    assert row(shown, "control", "512") == ["5.0", "-", "-", "-"]
    freekv = [line.split()[3] for line in shown.splitlines() if line.startswith("| freekv")]
    assert freekv == ["128", "512"]
    first, second = report.notes(TASKS, cells)
    assert "2 tasks" in first
    assert first.endswith("without S2.")
    assert "5.00 points" in second


@pytest.mark.parametrize(
    ("ours", "expected"), [(79.0, True), (78.9, False), (80.0, True), (95.0, True), (None, None)]
)
def test_kvretrieval_is_held_to_the_oracle(ours, expected):
    cells = scores(full=[100] * 3, oracle_512=[80] * 3, kvretrieval_512=[ours, 79, 79])
    if ours is not None:
        cells |= scores(kvretrieval_512=[ours] * 3)
    found = report.criteria(TASKS, (128, 512), cells)
    assert [criterion.passed for criterion in found] == ([] if expected is None else [expected])


def test_tasks_that_do_not_count_are_no_part_of_the_criterion():
    cells = scores(full=[100, 20, 90], oracle_512=[80, 90, 70], kvretrieval_512=[80, 0, 70])
    (found,) = report.criteria(TASKS, (512,), cells)
    assert found.passed
    assert found.figures == "kvretrieval 75.0, oracle 75.0, +0.0"


def test_published_rows_name_their_model():
    shown = report.published((128, 512, 1024))
    assert "another model" in shown.splitlines()[0]
    assert row(shown, "published") == ["64", "128", "512", "1024", "2048", "full"]
    assert row(shown, "LOCKS") == ["78.1", "87.4", "91.4", "-", "93.7", "94.3"]
