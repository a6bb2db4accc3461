"""Tasks of one's own, tasks that need much of their prompts, and how answers to them are scored."""

import json

import numpy as np
import pytest

from benchmarks.quality import __main__ as driver
from benchmarks.quality import examples, intensive
from benchmarks.quality.examples import Example, read_examples
from benchmarks.quality.ruler_tasks import scoring
from benchmarks.quality.tasks import forced
from tests.benchmarks.test_ruler import SAMPLES
from tests.support.byte_text import byte_text
from vllm_kvretrieval.calibration import divergence
from vllm_kvretrieval.calibration.samples import Sample

GOOD = {"input": "Who?", "outputs": ["Ann"]}


def test_rulers_own_lines_are_examples(tmp_path):
    path = tmp_path / "vt.jsonl"
    path.write_text(SAMPLES + "\n")
    (found,) = read_examples(path).values()
    assert found[1] == Example("vt", "p1", ("a1", "b"), answer="a1")


def test_lines_name_task_length_and_score(tmp_path):
    path = tmp_path / "mine.jsonl"
    answer = '{"a": 1}, {"b": 2}'
    asks = {"task": "boxes", "tokens": 9, "match": "json", "answer": answer}
    lines = [GOOD, {"input": "x", "outputs": ['{"a": 1}', '{"b": 2}'], **asks}]
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, lines)))
    found = read_examples(path)
    assert list(found) == ["mine", "boxes"]
    assert found["boxes"] == [Example("boxes", "x", ('{"a": 1}', '{"b": 2}'), 9, "json", answer)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "it is no JSON"),
        ("[1]", "it is no object"),
        ("[" * 100_000, "it is no JSON"),
        ("1" * 5000, "it is no JSON"),
        ('{"outputs": ["a"]}', '"input" must be a text'),
        ('{"input": "  ", "outputs": ["a"]}', '"input" must be a text'),
        ('{"input": "x"}', '"outputs" must be a list'),
        ('{"input": "x", "outputs": []}', '"outputs" must be a list'),
        ('{"input": "x", "outputs": [1]}', '"outputs" must be a text'),
        ('{"input": "\\ud800", "outputs": ["a"]}', "half a character"),
        ('{"input": "x", "outputs": ["a"], "tokens": true}', '"tokens" must be a whole number'),
        ('{"input": "x", "outputs": ["a"], "tokens": 1e9}', '"tokens" must be a whole number'),
        ('{"input": "x", "outputs": ["a"], "match": "some"}', "there are: all, part, json"),
        ('{"input": "x", "outputs": ["a"], "match": "json"}', "the JSON of an object"),
        ('{"input": "x", "outputs": ["a"], "task": "a/b"}', '"task" must be a name'),
        (b"\xff", "it is not UTF-8 (byte 1)"),
        ("x" * (examples.MOST_BYTES + 1), "more than 16,777,216 bytes"),
    ],
)
def test_lines_that_are_none_are_named(tmp_path, line, why):
    path = tmp_path / "mine.jsonl"
    wrong = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + wrong)
    with pytest.raises(ValueError, match=r"mine\.jsonl, line 2: ") as said:
        read_examples(path)
    assert why in str(said.value)


def test_files_that_are_none_are_named(tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    assert driver.main(["ruler", "--data", str(path)]) == 2
    path.write_text("\n")
    assert driver.main(["ruler", "--data", str(path)]) == 2
    path.write_text("\n".join(json.dumps({**GOOD, "match": of}) for of in ("all", "part")))
    assert driver.main(["accuracy", "--data", str(path), "--model", str(tmp_path)]) == 2
    path.write_text(json.dumps({**GOOD, "task": "vt"}))
    assert driver.main(["ruler", "--task", "vt", "--data", str(path)]) == 2
    said = capsys.readouterr().err
    for part in ("there is no such file", "has no examples", "no checkpoint", "two tasks are"):
        assert part in said


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"a": 1}, {"b": [2, "c"]}', 1.0),
        ('{ "b" : [2,"c"]}\n{"a": 1}', 1.0),
        ('{"a": 1}, {"a": 1}', 0.5),
        ('{"a": true}, {"b": [2]}', 0.0),
        ('[{"a": 1}, {"b": [2, "c"', 0.5),
        ('{"x": {"a": 1}}', 0.5),
        ("", 0.0),
        ("{" * 5000, 0.0),
        ('{"a": ' + "1" * 5000 + "}", 0.0),
    ],
)
def test_objects_are_compared_whole(text, score):
    assert scoring.match_json(text, ('{"a": 1}', '{"b": [2, "c"]}')) == score


def tokens(text):
    return text.split(" ")


@pytest.mark.parametrize("task", intensive.MAKERS)
def test_intensive_examples_need_their_prompts(task):
    short, long = (intensive.MAKERS[task](tokens, context, 2) for context in (400, 1200))
    assert {example.task for example in long} == {task}
    first, second = long
    assert (first.match, len(first.outputs) > 2 * len(short[0].outputs)) == ("json", True)
    assert first.input != second.input
    for example in (*short, *long):
        fits = len(tokens(example.input)) + example.tokens
        assert fits <= (400 if example in short else 1200)
        whole, half = list(example.outputs), example.outputs[: len(example.outputs) // 2]
        assert scoring.match_json(",\n".join(whole), example.outputs) == 1
        assert 0.3 < scoring.match_json(",".join(half), example.outputs) < 0.6
        forced = min(len(whole), intensive.ANSWERED)
        share = scoring.match_json(example.answer, example.outputs)
        assert share == pytest.approx(forced / len(whole))
        if forced < len(whole):
            places = sorted(map(whole.index, example.answer.split(",\n")))
            assert places[0] < len(whole) / 4 < 3 * len(whole) / 4 < places[-1]
        table = example.input[: example.input.index("in JSON:")]
        for value in example.values:
            assert value.strip('"') in table
    with pytest.raises(ValueError, match=f"{task}: a context of 20 tokens has no room"):
        intensive.MAKERS[task](tokens, 20, 1)


def test_values_are_right_where_each_token_is():
    text = byte_text()
    example = Example("t", "ab", (), answer='{"x": 12}, {"y": 345}', values=("12", "345"))
    sample = forced.answer(text, example)
    assert len(sample.forced) == len(example.answer)
    assert [example.answer[begin:end] for begin, end in sample.parts] == ["12", "345"]
    whole = forced.answer(text, Example("t", "ab", (), answer="4711"))
    assert whole.parts == ((1, 4),)
    with pytest.raises(ValueError, match="a single token"):
        forced.answer(text, Example("t", "ab", (), answer="4"))

    count = len(sample.scored)
    ids = np.zeros((count, 2), dtype=int)
    top = np.log(np.tile([0.6, 0.4], (count, 1)))
    target = top[:, 0].copy()
    scored = divergence.Scored(target, ids, top)
    assert divergence.right(scored, sample.parts) == 1
    target[sample.parts[1][1] - 2] = np.log(0.4)  # the token before the last
    assert divergence.right(scored, sample.parts) == 0.5


def test_what_is_forced_in_part_is_no_value(monkeypatch):
    monkeypatch.setattr(forced, "ANSWER_TOKENS", 18)
    example = Example("t", "ab", (), answer='{"x": 12}, {"y": 345}', values=("12", "345"))
    sample: Sample = forced.answer(byte_text(), example)
    assert (len(sample.forced), len(sample.parts)) == (18, 1)
