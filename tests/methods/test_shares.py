"""Shares of a budget: the rules, how counts follow from them, and what is refused."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.steps import Runner, metadata_builder, request_table, split
from vllm_kvretrieval.attention.refusals import check_layers
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.shares import allot, distribute, make_shares, pyramid


def config(shares, method="kvretrieval", **options):
    return RetrievalConfig.from_options(method, {"budget_shares": shares, **options})


def model(layers=5, kv_heads=2, kinds=None, pipeline=1):
    """The part of vLLM's configuration that is read."""
    text = SimpleNamespace(layer_types=kinds, sliding_window=256 if kinds else None)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline),
        model_config=SimpleNamespace(
            model="some model",
            hf_text_config=text,
            is_hybrid=False,
            is_attention_free=False,
            has_noops=False,
            get_total_num_hidden_layers=lambda: layers,
            get_total_num_kv_heads=lambda: kv_heads,
        ),
    )


# --------------------------------------------------------------------------------------- rules


def test_pyramid():
    """PyramidKV: k_last = total / (beta m), k_first = 2 total / m - k_last, linear in between."""
    layers, beta, total = 29, 20, 29 * 100.0
    last = total / (beta * layers)
    first = 2 * total / layers - last
    expected = [first - (first - last) / (layers - 1) * layer for layer in range(layers)]
    assert 100 * pyramid(layers) == pytest.approx(expected)
    assert pyramid(layers).sum() == pytest.approx(layers)
    assert pyramid(7, 1) == pytest.approx(np.ones(7))
    assert pyramid(1) == [1]
    per_head = make_shares("pyramid").of([3] * layers).reshape(layers, 3)
    assert (per_head == per_head[:, :1]).all()
    assert 100 * per_head[:, 0] == pytest.approx(expected)
    steeper = make_shares({"pyramid": {"beta": 100}}).of([1] * 3)
    assert steeper == pytest.approx([1.99, 1, 0.01])


def test_numbers(tmp_path):
    assert make_shares("uniform").of([2, 2]).tolist() == [1, 1, 1, 1]
    assert make_shares([1, 3]).of([2, 2]).tolist() == [0.5, 0.5, 1.5, 1.5]
    assert make_shares([[1, 2], [3, 2]]).of([2, 2]).tolist() == [0.5, 1, 1.5, 1]
    assert make_shares((5, (2, 3))).of([1, 2]) == pytest.approx([1.5, 0.6, 0.9])
    assert make_shares([1e308, 1e308, 0]).of([1, 1, 1]) == pytest.approx([1.5, 1.5, 0])
    assert make_shares([5e-324, 5e-324]).of([1, 1]) == pytest.approx([1, 1])
    file = tmp_path / "shares.json"
    file.write_text("[[1, 2], 3]")
    assert make_shares(str(file)).of([2, 2]) == pytest.approx(make_shares([[1, 2], 3]).of([2, 2]))


NUMBERS = st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(any)


@settings(max_examples=300, deadline=None)
@given(numbers=NUMBERS, select=st.integers(0, 5000))
def test_all_of_it_is_given_away(numbers, select):
    shares = make_shares(numbers).of([1] * len(numbers))
    counts = distribute(shares, select)
    assert counts.sum() == select * len(numbers)
    assert (counts >= 0).all()
    assert np.abs(counts - shares * select).max() < 1 + 1e-6
    allotment = allot(make_shares(numbers), [1] * len(numbers), 900)
    assert (allotment.counts(select) == np.minimum(counts, 900)).all()
    assert (allotment.counts(select) <= allotment.most(select)).all()


def test_workers_have_the_heads_of_their_own():
    shares, heads = make_shares([[1, 2, 3, 4], [5, 6, 7, 8]]), [4, 4]
    parts = [allot(shares, heads, 10**6, (rank, 2)).counts(700) for rank in range(2)]
    whole = allot(shares, heads, 10**6).counts(700).reshape(2, 2, 2)
    assert np.stack([part.reshape(2, 2) for part in parts], 1).tolist() == whole.tolist()
    assert whole.sum() == 700 * 8


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        (
            "steep",
            r"='steep' cannot be read as a file of JSON .*use one of uniform, py",
        ),
        ({"pyramid": 3}, "is unknown; use one of"),
        ({"flat": {}}, "is unknown; use one of"),
        ({"pyramid": {}, "uniform": {}}, "is unknown; use one of"),
        ({"pyramid": {"beta": 0.5}}, "pyramid has beta, a number from 1"),
        ({"pyramid": {"beta": math.nan}}, "pyramid has beta, a number from 1"),
        ({"pyramid": {"beta": math.inf}}, "pyramid has beta, a number from 1"),
        ({"pyramid": {"beta": 10**400}}, "pyramid has beta, a number from 1"),
        ({"pyramid": {"beta": True}}, "pyramid has beta, a number from 1"),
        ({"pyramid": {"alpha": 2}}, "pyramid has beta, a number from 1"),
        (3, "=3 must be one of uniform"),
        (True, "=True must be one of uniform"),
        ([], r"=\[\] must be one of uniform"),
        ([[], []], "must hold numbers of 0 or more"),
        ([1, -1], "must hold numbers of 0 or more"),
        ([1, [2, math.nan]], "must hold numbers of 0 or more"),
        ([1, math.inf], "must hold numbers of 0 or more"),
        ([1, 10**400], "must hold numbers of 0 or more"),
        ([1, True], "must hold numbers of 0 or more"),
        ([1, "2"], "must hold numbers of 0 or more"),
        ([1, None], "must hold numbers of 0 or more"),
        ([1, [[2]]], "must hold numbers of 0 or more"),
        ([0, [0, 0.0]], "and one above 0 at least"),
    ],
    ids=str,
)
def test_what_no_shares_are(shares, why):
    with pytest.raises(RetrievalConfigError, match=f"kv_retrieval.budget_shares.*{why}"):
        config(shares)
    with pytest.raises(
        RetrievalConfigError, match=f"kv_retrieval.also: mine: budget_shares.*{why}"
    ):
        RetrievalConfig.from_options("freekv", {"also": {"mine": {"budget_shares": shares}}})


@pytest.mark.parametrize("text", ["", "[1, 2", "{", "3", '{"pyramid": {}}', "[NaN]", "\xff"])
def test_files_of_none(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)  # messages cut long paths
    file = Path("shares.json")
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(RetrievalConfigError, match=r"kv_retrieval.budget_shares=.*shares\.json"):
        config(str(file))
    file.write_text(json.dumps([1, 2]))
    assert config(str(file)).own.budget_shares.numbers == (1.0, 2.0)


def test_methods_beside_the_engines_own():
    served = config("pyramid", also={"quest": {}, "flat": {"budget_shares": "uniform"}, "fine": {}})
    by = {name: method.budget_shares.uniform for name, method in served.methods.items()}
    assert by == {
        "kvretrieval": False, "quest": True, "flat": True, "fine": False, "streamingllm": True,
    }  # fmt: skip


def test_shares_are_of_the_models_shape():
    check_layers(model(), config([1, 2, 3, 4]))
    check_layers(model(), config([1, [2, 1], 3, 4]))
    check_layers(model(pipeline=2), config("uniform"))
    kinds = ["sliding_attention", "full_attention"] * 3
    check_layers(model(6, kinds=kinds), config([1, 2, 3]))
    check_layers(model(), config([1, 2, 3, 4, 5], dense_layers=0))
    for wrong, shares, why in (
        (model(), [1, 2, 3, 4, 5], "5 layers, but 4 retrieve .dense ones have no share"),
        (model(6, kinds=kinds), [1, 2, 3, 4, 5], "5 layers, but 3 retrieve"),
        (model(), [1, [2, 1, 3], 3, 4], "3 numbers for layer 1 of those that retrieve.*2 KV heads"),
        (model(), [1, [2], 3, 4], "1 numbers for layer 1 .*or one for all"),
    ):
        with pytest.raises(RetrievalConfigError, match=f"kv_retrieval.budget_shares=.*{why}"):
            check_layers(wrong, config(shares))
    divided = "--pipeline-parallel-size 2 leaves no worker .* kvretrieval divides the budget"
    with pytest.raises(RetrievalConfigError, match=divided):
        check_layers(model(pipeline=2), config("pyramid"))
    fraction = config("uniform", memory_fraction=0.3)
    check_layers(model(), fraction)
    with pytest.raises(RetrievalConfigError, match=r"memory_fraction=0\.3 is .* over all layers,"):
        check_layers(model(pipeline=2), fraction)


@pytest.mark.parametrize(
    ("served", "method", "options", "remedy"),
    [
        (model(pipeline=2), "kvretrieval", {}, "leave one out, or use kv_retrieval.dense_layers=0"),
        (
            model(4, kinds=["unheard of"] * 4, pipeline=2),
            "kvretrieval",
            {"dense_layers": 0},
            "leave one out",
        ),
        (model(9, pipeline=2), "omnikv", {"filters": [0, 3]}, "leave one out"),
    ],
)
def test_a_share_of_the_cache_that_stages_would_read_differently(served, method, options, remedy):
    """With dense layers it would be an average over all of them, of which a stage has some."""
    fraction = RetrievalConfig.from_options(method, {"memory_fraction": 0.6, **options})
    with pytest.raises(
        RetrievalConfigError, match=rf"memory_fraction=0\.6 is .* has them all; {remedy}\.$"
    ):
        check_layers(served, fraction)


def test_a_share_of_the_cache_that_every_stage_reads():
    kinds = ["sliding_attention", "full_attention"] * 3
    for served in (model(pipeline=2), model(6, kinds=kinds, pipeline=3)):
        check_layers(served, config("uniform", memory_fraction=0.3, dense_layers=0))


# ------------------------------------------------------------------------------ what is counted


def test_requests_have_counts_of_their_own():
    """Counts depend on method and budget. Attended tokens are booked as pages."""
    options = {"budget": 256, "also": {"pages": {"preset": "freekv", "budget_shares": [0.2, 1.8]}}}
    settings = RetrievalConfig.from_options("fier", options | {"budget_shares": [3, 1]})
    runner, heads = Runner(), [1, 2]
    table = request_table(settings, 3, heads, runner, longest=4096)
    builder = metadata_builder(table, heads=1, rows=True)
    runner.batch("a", "b", "c", b={"method": "pages"}, c={"method": "streamingllm"})
    step = split(builder, [301, 301, 301])
    assert [plan.schedule for plan in step.decode] == [None] * 3
    assert table.selected is not None
    counts = dict(zip("abc", table.selected[table.seats].tolist(), strict=True))
    # fier: 192 tokens each of 3; freekv: sink 1, window 2, 5 pages each; of nothing, nothing.
    assert counts == {"a": [346, 115, 115], "b": [1, 7, 7], "c": [0, 0, 0]}
    assert sum(counts["a"]) == 3 * 192
    assert sum(counts["b"]) == 3 * 5
    assert table.room.most_chosen(slice(0, 1)) == 346
    assert table.room.most_chosen(slice(1, 3)) == 116
    # Of 10 pages: 8 between sink and window of fier, 7 of freekv.
    attended = (2 * 3 + (256 + 115 + 115) // 32) + (3 * 3 + 1 + 7 + 7) + 8 * 3
    assert table.counts().attended == attended


def test_kv_heads_that_keep_the_same_get_the_same():
    """Rounding included; less than one for each of them is left over."""
    shares = make_shares("pyramid")
    for layers, heads in ((30, 3), (24, 2), (32, 8)):
        for select in (128, 256, 1024, 2047):
            made = allot(shares, [heads] * layers, 8192, together=True)
            by_layer = made.counts(select).reshape(layers, heads)
            assert (by_layer == by_layer[:, :1]).all()
            assert by_layer.sum() == select * layers * heads
            assert (np.abs(by_layer[:, 0] - shares.of([1] * layers) * select) < 1).all()
    of_each = allot(make_shares([1, 1, 2]), [1, 4, 2], 8192, together=True).counts(101)
    assert [*of_each[1:5]] == [of_each[1]] * 4
    assert of_each[5] == of_each[6]
    assert 0 <= 7 * 101 - of_each.sum() < 4
