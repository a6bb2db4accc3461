"""The files of the accuracy benchmark."""

import json
import math

import numpy as np
import pytest

from benchmarks import build, common
from benchmarks.quality.tasks import store
from tests.benchmarks.test_accuracy_metrics import top
from tests.support.accuracy_figures import NEW, OLD
from vllm_kvretrieval.calibration import divergence
from vllm_kvretrieval.calibration.divergence import Generated
from vllm_kvretrieval.calibration.samples import Sample


def test_results_resume_where_the_key_matches(tmp_path, capsys):
    path = tmp_path / "out" / "accuracy.json"
    first = store.Results(path, {"command": "first", "build": OLD})
    first.put("task/freekv/256", "k1", {"accuracy": 1.0})
    resumed = store.Results(path, {"command": "second", "build": NEW})
    kept = {"key": "k1", "accuracy": 1.0, "build": OLD}
    assert resumed.get("task/freekv/256", "k1") == kept
    assert resumed.get("task/freekv/256", "k2") is None
    assert resumed.get("task/freekv/512", "k1") is None
    resumed.put("task/freekv/512", "k1", {"accuracy": 0.5})
    resumed.print_builds()
    assert "1 cells of" in (said := capsys.readouterr().out)
    assert "  task/freekv/256\n" in said
    stored = json.loads(path.read_text())
    assert stored["command"] == "second"
    assert set(stored["cells"]) == {"task/freekv/256", "task/freekv/512"}
    assert [cell.get("build") for cell in stored["cells"].values()] == [OLD, None]
    again = store.Results(path, {"command": "third", "build": NEW})
    assert again.get("task/freekv/512", "k1") == {"key": "k1", "accuracy": 0.5, "build": NEW}
    assert [file.name for file in path.parent.iterdir()] == ["accuracy.json"]


def test_builds_are_named_and_compared_by_their_code():
    mine = build.build()
    assert mine["code"] == build.code_fingerprint()
    assert build.same(mine, mine | {"commit": "another", "dirty": True})
    assert not build.same(OLD, NEW)
    assert not build.same(None, mine)
    assert not build.same(mine | {"code": None}, mine | {"code": None})
    assert build.label(mine | {"commit": "abc", "dirty": True}).endswith("(abc, with changes)")
    assert build.label(None) == "unknown"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "results.json"
    common.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        common.write_json(path, {"a": math.nan})
    assert common.read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_are_keys(tmp_path):
    common.write_json(tmp_path / "results.json", {"contexts": {2048: {"ms": [1, 2]}}})
    assert common.read_json(tmp_path / "results.json") == {"contexts": {"2048": {"ms": [1, 2]}}}


def test_a_broken_result_file_says_what_to_do(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="move it away"):
        store.Results(path, {})


def test_references_return_what_was_put(tmp_path):
    references = store.References(tmp_path)
    scored = top(np.random.default_rng(4).normal(size=(3, 40)), 8)
    assert references.get("task", "key") is None
    references.put("task", "key", [Generated((1, 2), scored), Generated((3,), None)])
    stored = references.get("task", "key")
    assert stored is not None
    first, second = stored
    assert first.scored is not None
    assert (first.tokens, second.tokens, second.scored) == ((1, 2), (3,), None)
    np.testing.assert_array_equal(first.scored.top_ids, scored.top_ids)
    np.testing.assert_allclose(divergence.kl_divergence(scored, first.scored), 0, atol=1e-5)
    assert (tmp_path / ".gitignore").read_text() == "*\n"


def test_reference_keys_follow_all_that_can_change_them(monkeypatch):
    sample = Sample((1, 2, 3), (4,))

    def key(model="m", samples=(sample,), dtype="float32", engine=()):
        return store.reference_key(model, samples, dtype, engine)

    mine = key()
    assert mine == key(samples=[Sample((1, 2, 3), (4,))])
    others = [key("n"), key(samples=[Sample((1, 2, 3), (5,))]), key(samples=[sample, sample])]
    others += [key(dtype="bfloat16"), key(engine=["code"]), key(engine=["other code"])]
    monkeypatch.setattr(store, "versions", lambda: {"vllm": "another"})
    others.append(key())
    monkeypatch.undo()
    monkeypatch.setattr(store, "machine", lambda: {"isa": ["another"]})
    others.append(key())
    assert len({mine, *others}) == 1 + len(others)


def test_a_missing_model_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="make models"):
        store.model_fingerprint(tmp_path / "none")
