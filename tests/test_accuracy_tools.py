"""The accuracy benchmark's own tools: scores, samples, criteria, and what it keeps on disk."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import accuracy, build, common, texts, worker_counts
from benchmarks.tasks import (
    catalogue,
    criteria,
    engine,
    forced,
    metrics,
    needles,
    report,
    scoring,
    store,
    thresholds,
)
from benchmarks.tasks.base import (
    BLIND_HEAD,
    BLIND_TAIL,
    Sample,
    Task,
    TokenText,
    blind_positions,
    prompt_length,
)
from benchmarks.tasks.forcing import FORCED_TOKENS, ForceTokens
from benchmarks.tasks.metrics import Generated, Scored
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.retrieval.pooling import Pooling

VARIANT = {variant.name: variant for variant in catalogue.VARIANTS}


@pytest.fixture(scope="module")
def text() -> TokenText:
    """The novel in a tokenizer that needs no file: one token per byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return TokenText(PreTrainedTokenizerFast(tokenizer_object=raw))


def top(logits: np.ndarray, count: int, target: int = 0) -> Scored:
    """The `count` most likely tokens of each row, as vLLM would report them."""
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1)[:, :count]
    return Scored(logprobs[:, target], ids, np.take_along_axis(logprobs, ids, axis=1))


def exact_kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    p, q = (torch.tensor(x).log_softmax(-1) for x in (a, b))
    return (p.exp() * (p - q)).sum(-1).numpy()


def test_kl_over_the_whole_vocabulary_is_exact():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 50))
    np.testing.assert_allclose(
        metrics.kl_divergence(top(a, 50), top(b, 50)), exact_kl(a, b), rtol=1e-6, atol=1e-9
    )


def test_kl_with_a_tail_bucket_is_a_close_lower_bound():
    rng = np.random.default_rng(1)
    a = rng.normal(size=(20, 5000)) * 3
    b = a + rng.normal(size=a.shape) * 0.2
    bound, true = metrics.kl_divergence(top(a, 512), top(b, 512)), exact_kl(a, b)
    assert (bound <= true + 1e-12).all()
    assert bound.mean() > 0.9 * true.mean()


def test_kl_of_a_distribution_to_itself_is_zero_and_disjoint_tops_are_finite():
    a = top(np.random.default_rng(2).normal(size=(3, 100)), 10)
    np.testing.assert_allclose(metrics.kl_divergence(a, a), 0, atol=1e-12)
    first, last = np.zeros((1, 100)), np.zeros((1, 100))
    first[0, :10], last[0, -10:] = 9, 9
    assert np.isfinite(metrics.kl_divergence(top(first, 10), top(last, 10))).all()


def test_kl_refuses_different_lengths():
    a = np.zeros((3, 10))
    with pytest.raises(ValueError, match="3 positions cannot be compared with 2"):
        metrics.kl_divergence(top(a, 5), top(a[:2], 5))


def test_forced_scores_weigh_positions_not_samples():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, 8, 30))
    full, other = [top(a[:2], 30), top(a[2:], 30)], [top(b[:2], 30), top(b[2:], 30)]
    scores = metrics.forced_scores(full, other)
    assert scores["kl"] == pytest.approx(exact_kl(a, b).mean())
    assert scores["agreement"] == pytest.approx((a.argmax(1) == b.argmax(1)).mean())
    assert scores["perplexity"] == pytest.approx(math.exp(-top(b, 30).target.mean()))


@pytest.mark.parametrize(
    ("generated", "found"), [("48213", True), (" 48213.", True), ("48219", False), ("", False)]
)
def test_answers_are_found_at_the_start(generated, found):
    assert metrics.answer_found(generated, "48213") is found


def test_cache_share_counts_dense_layers_whole():
    assert metrics.cache_share(999, 2, 100, 10, 0) == pytest.approx(0.1)
    assert metrics.cache_share(999, 2, 100, 10, 1) == pytest.approx(0.9 * 0.1 + 0.1)
    assert metrics.cache_share(999, 10, 4096, 10, 1) == 1.0


def test_hybrid_models_count_their_full_layers_only(tmp_path):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": kinds}))
    own, fier = VARIANT["kvretrieval"], VARIANT["fier"]
    assert scoring.attention_layers(own, tmp_path) == (2, 0)
    assert scoring.attention_layers(fier, tmp_path) == (2, 1)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 30}))
    assert scoring.attention_layers(own, tmp_path) == (30, 1)
    # Served by the same engine, whose dense layers are every method's.
    assert scoring.attention_layers(VARIANT["quest"], tmp_path) == (30, 1)


def test_filters_and_the_layers_after_them_count_as_dense():
    smollm2 = common.MODELS / "SmolLM2-135M-Instruct"
    assert scoring.attention_layers(VARIANT["omnikv"], smollm2) == (30, 7)
    assert scoring.whole_heads(VARIANT["razor"], smollm2) == pytest.approx(14 / 87)
    assert scoring.whole_heads(VARIANT["snapkv"], smollm2) == 0
    samples = [Sample(prompt=(1,) * 999, forced=(1, 2))]
    share = scoring.mean_share(samples, 100, VARIANT["razor"], smollm2)
    assert share == pytest.approx(0.1 + 0.9 * (1 + 14 / 3) / 30)


def test_the_kv_cache_keeps_a_tasks_prompts_and_two_runs_beside_them(tmp_path):
    config = {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    samples = [Sample((0,) * (3 * 128 + 8), (0,) * 120), Sample((0,) * 100, (0,) * 100)]
    block = 128 * 3 * 2 * 2 * 64 * 4
    size = (1 + (3 + 2 * 1) + 2 * 2) * block
    assert engine.prefix_cache_bytes(tmp_path, samples, "float32") == size
    assert engine.prefix_cache_bytes(tmp_path, samples, "bfloat16") == size // 2


@pytest.mark.parametrize(
    "build", [needles.passkey_in_novel, needles.passkey_in_sentences, needles.key_value_lookup]
)
def test_needles_are_hidden_from_sinks_and_window(text, build):
    context, count = 4096, 5
    for sample in build(text, context, count):
        prompt = text.tokenizer.decode(sample.prompt)
        assert len(sample.prompt) <= prompt_length(context)
        if build is not needles.key_value_lookup:
            assert len(sample.prompt) == prompt_length(context)
        assert prompt.index(sample.answer) >= BLIND_HEAD - 100  # it may move between paragraphs
        assert prompt.rindex(sample.answer) < len(prompt) - BLIND_TAIL + 100
        assert text.tokenizer.decode(sample.forced).endswith(" is ")
        assert sample.answer_tokens == len(sample.answer)
        assert prompt.endswith("?")


def test_needle_samples_differ_and_are_reproducible(text):
    first = needles.passkey_in_novel(text, 4096, 4)
    assert len({sample.answer for sample in first}) == 4
    assert first == needles.passkey_in_novel(text, 4096, 4)


def test_second_copy_forces_what_stands_in_the_prompt(text):
    for sample in forced.second_copy(text, 2048, 6):
        passage = sample.forced[2:]
        assert len(passage) == forced.COPY_TOKENS
        place = blind_positions(len(sample.prompt), forced.COPY_TOKENS, forced.COPIES)
        assert passage in [sample.prompt[i : i + forced.COPY_TOKENS] for i in place]
        assert sample.scored_from == 2 + forced.COPY_CUE


def test_novel_forces_its_own_continuation(text):
    prose = "".join(f"{paragraph}\n\n" for paragraph in texts.paragraphs())
    for sample in forced.novel(text, 2048, 3):
        assert text.tokenizer.decode(sample.prompt + sample.forced) in prose


def test_a_context_without_room_is_refused():
    with pytest.raises(ValueError, match="take a longer context"):
        blind_positions(1200, 80, 4)


def test_forcing_leaves_one_token_then_lets_go():
    processor = ForceTokens(SimpleNamespace(), torch.device("cpu"), False)
    params = SimpleNamespace(extra_args={FORCED_TOKENS: [3, 1]})
    force = processor.new_req_logits_processor(params)
    assert force is not None
    logits = torch.arange(5.0)
    assert force([], logits.clone()).argmax() == 3
    assert force([3], logits.clone()).argmax() == 1
    assert torch.equal(force([3, 1], logits.clone()), logits)
    assert processor.new_req_logits_processor(SimpleNamespace(extra_args=None)) is None


OLD, NEW = ({"version": "0.1.0", "code": code, "commit": None, "dirty": None} for code in "ab")


def test_results_resume_where_the_key_matches(tmp_path):
    path = tmp_path / "out" / "accuracy.json"
    first = store.Results(path, {"command": "first", "build": OLD})
    first.put("task/freekv/256", "k1", {"accuracy": 1.0})
    resumed = store.Results(path, {"command": "second", "build": NEW})
    kept = {"key": "k1", "accuracy": 1.0, "build": OLD}
    assert resumed.get("task/freekv/256", "k1") == kept
    assert resumed.get("task/freekv/256", "k2") is None
    assert resumed.get("task/freekv/512", "k1") is None
    resumed.put("task/freekv/512", "k1", {"accuracy": 0.5})
    assert resumed.outdated() == ["task/freekv/256"]
    stored = json.loads(path.read_text())
    assert stored["command"] == "second"
    assert set(stored["cells"]) == {"task/freekv/256", "task/freekv/512"}
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
    np.testing.assert_allclose(metrics.kl_divergence(scored, first.scored), 0, atol=1e-5)
    assert (tmp_path / ".gitignore").read_text() == "*\n"


def test_reference_keys_follow_model_samples_version_and_dtype():
    sample = Sample((1, 2, 3), (4,))
    key = store.reference_key("m", [sample], "0.32.0", "float32")
    assert key == store.reference_key("m", [Sample((1, 2, 3), (4,))], "0.32.0", "float32")
    assert key != store.reference_key("n", [sample], "0.32.0", "float32")
    assert key != store.reference_key("m", [Sample((1, 2, 3), (5,))], "0.32.0", "float32")
    assert key != store.reference_key("m", [sample, sample], "0.32.0", "float32")
    assert key != store.reference_key("m", [sample], "0.32.1", "float32")
    assert key != store.reference_key("m", [sample], "0.32.0", "bfloat16")


def test_a_missing_model_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="make models"):
        store.model_fingerprint(tmp_path / "none")


GOOD = {
    "novel": {
        "full_all": 0.0,
        "kvretrieval_all": 0.001,
        "kvretrieval_1024": 0.0104,
        "oracle_1024": 0.006,
        "freekv_1024": 0.0104,
        "every_step_1024": 0.01,
        "sink_window_1024": 0.04,
    },
    "lookup": {
        "full_all": 0.45,
        "kvretrieval_1024": 0.4,
        "oracle_1024": 0.45,
        "freekv_1024": 0.3,
        "sink_window_1024": 0.0,
    },
    "passkey": {
        "full_all": 1.0,
        "kvretrieval_1024": 0.95,
        "oracle_1024": 0.95,
        "freekv_1024": 0.9,
        "every_step_1024": 0.95,
        "sink_window_1024": 0.1,
    },
}
GOOD["copy"], GOOD["sentences"] = GOOD["novel"], GOOD["passkey"]


def figures(task: Task, **changes: float) -> dict[str, dict[str, Any]]:
    """Cells that meet every criterion, with changes by ``variant_budget``."""
    cells = {}
    for name, value in (GOOD[task.what] | changes).items():
        variant, budget = name.rsplit("_", 1)
        cell: dict[str, Any] = {"variant": variant, "samples": 4, "share": 0.25}
        if variant == "freekv":
            cell["corrected_share"] = None if budget == "all" else 0.72
        if variant == "kvretrieval":
            cell |= {"index_bytes": 19.125, "index_share": 0.0747}
        if task.what in ("novel", "copy"):
            cell |= {"kl": value, "agreement": 0.9, "perplexity": 20.0}
        else:
            cell |= {"accuracy": value}
        cells[f"{task.name}/{variant}/{budget}"] = cell
    return cells


PASSKEY, LOOKUP, COPY, NOVEL = (
    next(task for task in catalogue.TASKS if task.what == what)
    for what in ("passkey", "lookup", "copy", "novel")
)
SENTENCES = next(task for task in catalogue.QUICK_TASKS if task.what == "sentences")


@pytest.mark.parametrize(
    ("task", "changes", "expected"),
    [
        (PASSKEY, {}, [True, True]),
        (PASSKEY, {"kvretrieval_1024": 0.9}, [False, True]),
        (PASSKEY, {"kvretrieval_1024": 0.9, "oracle_1024": 0.9}, [None, True]),
        (PASSKEY, {"sink_window_1024": 0.6}, [True, False]),
        (PASSKEY, {"full_all": 0.75}, [None, None]),
        (SENTENCES, {}, [True, True]),
        (SENTENCES, {"kvretrieval_1024": 0.9, "oracle_1024": 0.9}, [False, True]),
        (SENTENCES, {"sink_window_1024": 0.6}, [True, False]),
        (SENTENCES, {"full_all": 0.75}, [None, None]),
        (LOOKUP, {}, [True]),
        (LOOKUP, {"kvretrieval_1024": 0.35}, [False]),
        (COPY, {}, [True, True]),
        (COPY, {"oracle_1024": 0.0059}, [False, True]),
        (COPY, {"sink_window_1024": 0.03}, [True, False]),
        (NOVEL, {}, [True, True, True, True]),
        (NOVEL, {"kvretrieval_all": 0.0031}, [False, True, True, True]),
        (NOVEL, {"kvretrieval_1024": 0.0106}, [True, False, True, True]),
        (NOVEL, {"kvretrieval_1024": 0.0, "oracle_1024": 0.0}, [True, True, True, True]),
        (NOVEL, {"sink_window_1024": 0.03}, [True, True, False, True]),
        (NOVEL, {"every_step_1024": 0.0095}, [True, True, True, False]),
    ],
)
def test_criteria(task, changes, expected):
    found = criteria.check([task], [1024], figures(task, **changes))
    assert [criterion.passed for criterion in found] == expected
    words = {True: "PASS", False: "FAIL", None: "SKIP"}
    lines = report.verdicts(found).splitlines()
    assert [line[:4] for line in lines] == [words[passed] for passed in expected]


def test_every_budget_is_set_against_the_oracle():
    changes = {"kvretrieval_512": 0.5, "oracle_512": 0.9, "sink_window_512": 0.1}
    found = criteria.check([PASSKEY], [1024, 512], figures(PASSKEY, **changes))
    assert [criterion.passed for criterion in found] == [None, True, True]
    found = criteria.check([PASSKEY], [1024, 512], figures(PASSKEY, **changes | {"oracle_512": 1}))
    assert [criterion.passed for criterion in found] == [False, True, True]
    found = criteria.check([LOOKUP], [1024, 512], figures(LOOKUP, **changes))
    assert [criterion.passed for criterion in found] == [False, True]
    changes = {f"{name}_512": 0.1 for name in ("oracle", "freekv", "every_step", "sink_window")}
    for ours, passed in ((0.128, True), (0.1281, False)):
        cells = figures(NOVEL, kvretrieval_512=ours, **changes)
        found = criteria.check([NOVEL], [512, 1024], cells)
        assert [criterion.passed for criterion in found] == [True, passed, *[True] * 4]


def test_every_task_but_a_quick_one_is_held_to_what_the_oracle_reaches():
    assert all({"passkey", "oracle"}.intersection(task.checks) for task in catalogue.TASKS)
    checks = {task.what: task.checks for task in catalogue.TASKS}
    assert {"oracle", "control"} <= set(checks["copy"])
    assert {"oracle", "control", "covering", "speculation"} == set(checks["novel"])
    assert [task.checks for task in catalogue.QUICK_TASKS] == [("found",), ("covering",)]


def test_report_shows_every_cell(tmp_path):
    cells = figures(PASSKEY) | figures(NOVEL)
    shown = report.table([PASSKEY, NOVEL], [1024], cells)
    assert "sink_window" in shown
    assert "95%" in shown
    assert "KL 0.0104" in shown
    assert "ppl 20.00 corr 72%" in shown
    assert "90% corr 72%" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["kvretrieval", "19.1", "7.5%", "95%"] in lines
    assert ["oracle", "-", "-", "95%"] in lines
    report.plot(tmp_path / "plot.png", [PASSKEY, NOVEL], [1024], cells)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_indexes_are_drawn_where_some_were_compared(tmp_path):
    path, cells = tmp_path / "indexes.png", figures(PASSKEY) | figures(NOVEL)
    assert not report.plot_indexes(path, [PASSKEY, NOVEL], [1024], cells)
    assert not path.exists()
    cells |= figures(PASSKEY, mean_1024=0.7) | figures(NOVEL, mean_1024=0.008)
    for cell in cells.values():
        cell.setdefault("index_share", 0.01)
    assert report.plot_indexes(path, [PASSKEY, NOVEL], [1024], cells)
    assert path.stat().st_size > 10_000


def test_indexes_stand_between_the_control_and_the_oracle():
    extra = {"mean_std_1024": 0.8, "mean_1024": 0.7}
    cells = figures(PASSKEY, **extra) | figures(NOVEL, mean_std_1024=0.008)
    cells[f"{PASSKEY.name}/kvretrieval/1024"]["index_share"] = 0.048
    stored = {
        "build": OLD,
        "rows": [
            {"index": "min_max", "context": 32768, "batch": 1, "planning_us": 812.4},
            {"index": "min_max", "context": 32768, "batch": 4, "planning_us": 3000.0},
            {"index": "mean", "context": 8192, "batch": 1, "planning_us": 3.0},
        ],
    }
    planned = report.planning(stored, OLD)
    lines = report.indexes([PASSKEY, NOVEL], [1024], cells, planned).splitlines()
    assert not any("another build" in line for line in lines)
    rows = [line.split() for line in lines[2:] if line]
    assert rows == [
        ["of", "us", "at", PASSKEY.name, NOVEL.name],
        ["index", "KV", "32K", "1024", "1024"],
        ["none", "(sink_window)", "-", "-", "10%", "0.0400"],
        ["low_rank", "(kvretrieval)", "4.8-7.5%", "-", "95%", "0.0104"],
        ["min_max", "(every_step)", "-", "812", "95%", "0.0100"],
        ["mean", "-", "-", "70%", "-"],
        ["mean_std", "-", "-", "80%", "0.0080"],
        ["exact", "(oracle)", "-", "-", "95%", "0.0060"],
        ["mean_std", "to", "min_max", "-15", "0.80x"],
    ]
    assert "another build" in report.planning(stored, NEW).note
    nothing = report.planning(None, OLD)
    assert "benchmarks.planning" in nothing.note
    shown = report.indexes([PASSKEY], [1024], figures(PASSKEY), nothing)
    assert nothing.note in shown
    assert "mean_std" not in shown


def test_corrected_share_is_of_the_heads_of_sparse_steps():
    before = {"corrected": 5, "sparse_heads": 870}
    after = {"corrected": 5 + 652, "sparse_heads": 870 + 87 * 10}
    assert worker_counts.corrected_share(before, after) == pytest.approx(0.7494)
    assert worker_counts.corrected_share(before, before) is None
    assert [v.name for v in catalogue.VARIANTS if not v.selects] == ["sink_window", "razor"]
    speculating = {v.name for v in catalogue.VARIANTS if v.speculates}
    of_freekv = {v.name for v in catalogue.VARIANTS if v.method == "freekv"}
    assert speculating == of_freekv | {"speculative", "summary_8"}


def test_thresholds_are_variants_of_the_same_engine():
    assert thresholds.THRESHOLDS == [1.0, 0.9, 0.8, 0.7, -1.0]
    cells = catalogue.cells_of(NOVEL, (512,), 4096, catalogue.chosen(False, ["thresholds"]))
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
        (False, ["poolings"], ["pooling_relative", "pooling_max", "pooling_sum"]),
        (False, ["presets", "quest"], ["quest", "arkvale", "infllm"]),
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
    names = [variant.name for variant in catalogue.chosen(quick, also)]
    assert names[0] == catalogue.OWN == "kvretrieval"
    assert sorted(names) == sorted((QUICK if quick else CORE) + added)


def test_cells_are_of_all_budgets_and_the_covering_one():
    variants = catalogue.chosen(False, ["mean"])
    cells = catalogue.cells_of(NOVEL, (256, 512), 4224, variants)
    assert len({cell.name for cell in cells}) == len(cells) == 2 * len(variants) + 1
    assert cells[-1].name == f"{NOVEL.name}/kvretrieval/all"
    assert cells[-1].options == {"budget": 4224, "method": "kvretrieval"}
    by_name = {cell.name.split("/", 1)[1]: cell for cell in cells}
    every_step = {"budget": 256, "method": "freekv", "correction_threshold": 1.0}
    assert by_name["every_step/256"].options == every_step
    assert not [c for c in catalogue.cells_of(PASSKEY, (256,), 4224, variants) if c.covering]


def test_an_engine_serves_every_cell_that_it_runs():
    """All at once, and each cell's alone, as after an interruption."""
    cells = catalogue.cells_of(NOVEL, (256, 1024), 4224, catalogue.VARIANTS)
    engines = [variant.engine for variant in catalogue.VARIANTS]
    assert {"method": "omnikv"} in engines
    for engine_options in engines:
        run = [cell for cell in cells if cell.variant.engine == engine_options]
        options = dict(engine_options)
        own = options.pop("method", catalogue.OWN)
        for part in (run, *([cell] for cell in run)):
            also = catalogue.also_of(part)
            config = RetrievalConfig.from_options(own, {"budget": 4224, "also": also, **options})
            for cell in part:
                RequestOptions.parse({"kv_retrieval": cell.options}, config)
                served = config.methods[cell.variant.method]
                assert replace(served, name="") == replace(cell.variant.config.own, name="")
            named = {cell.variant.method for cell in part}
            assert set(config.methods) == named | {own, "streamingllm"}


def test_indexes_differ_in_nothing_but_the_index():
    for variant in catalogue.VARIANTS:
        if variant.index in ("", "none"):
            continue
        method = variant.config.own
        assert method.pooling is Pooling.MEAN_SOFTMAX
        assert not method.schedule.speculates or variant.threshold == 1.0
        assert method.rerank == (2 if variant.index.endswith("_rerank") else 0)
        assert variant.config.page_size == catalogue.PAGE


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
    variant = next(v for v in catalogue.VARIANTS if v.name == name)
    assert tuple(scoring.index_bytes(variant, tmp_path).values()) == kept


def test_threshold_table_sets_cost_against_waiting():
    cells = figures(PASSKEY) | figures(NOVEL)
    rows = [
        {"context": 16384, "batch": 1, "threshold": 0.9, "waited_ms": 0.25},
        {"context": 16384, "batch": 1, "threshold": None, "waited_ms": 9.0},
    ]
    waited = thresholds.waits({"build": OLD, "rows": rows}, OLD)
    lines = thresholds.table([PASSKEY, NOVEL], [1024], cells, waited).splitlines()
    found = {line[: line.index("  ", 3)].strip(): line.split()[-5:] for line in lines[2:] if line}
    assert found["KV heads corrected"] == ["-", "72.0%", "-", "-", "-"]
    assert found[f"KL above that of every step, {NOVEL.name}"] == ["+0.0%", "+4.0%", "-", "-", "-"]
    needle = found[f"points found less than of every step, {PASSKEY.name}"]
    assert needle == ["+0.0", "+5.0", "-", "-", "-"]
    assert found["ms waited per step on disk, 16,384 x 1"] == ["-", "0.25", "-", "-", "-"]
    assert "slow_home steady" in thresholds.waits(None, OLD).note
    assert "another build" in thresholds.waits({"build": NEW, "rows": rows}, OLD).note


def test_threshold_table_is_empty_where_none_was_run():
    cells = figures(LOOKUP)  # freekv alone, without every step
    assert thresholds.table([LOOKUP], [1024], cells, thresholds.waits(None, OLD)) == ""


class FakeEngine:
    """Stands in for vLLM: answers right, counts its starts and runs, and can break down."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.started: list[int | None] = []
        self.served: list[set[str]] = []
        self.options: dict[str, Any] = {}
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
        yield "engine"

    def run(
        self, llm: Any, samples: list[Sample], options: Any, label: str, anew: bool = False
    ) -> list[Generated]:
        assert not anew, "no variant here watches prompts"
        if self.breaks_at and self.breaks_at in label:
            raise KeyboardInterrupt
        self.ran.append(label)
        if options is not None:
            assert options["method"] in self.served[-1] | {"kvretrieval"}
        answers = [self.tokenizer(sample.answer).input_ids for sample in samples]
        return [
            Generated((*sample.forced, *answer), None)
            for sample, answer in zip(samples, answers, strict=True)
        ]


def test_an_interrupted_run_goes_on_where_it_was(text, tmp_path, monkeypatch, capsys):
    fake = FakeEngine(text.tokenizer)
    config = {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, replacement in (
        ("open_engine", fake.open),
        ("run_samples", fake.run),
        ("retrieval_counts", lambda llm: {"corrected": 0, "sparse_heads": 0}),
        ("model_fingerprint", lambda model: "weights"),
        ("RESULTS", tmp_path),
        ("AutoTokenizer", SimpleNamespace(from_pretrained=lambda model: text.tokenizer)),
    ):
        monkeypatch.setattr(accuracy, name, replacement)
    monkeypatch.setattr(build, "code_fingerprint", lambda: "code")
    what = f"sentences-{tmp_path.name}-2k"
    command = ["--quick", "--model", str(tmp_path), "--task", what, "--samples", "2"]

    fake.breaks_at = "sink_window"
    with pytest.raises(KeyboardInterrupt):
        accuracy.main(command)
    assert fake.started == [None, 512]
    ran = [f"{what} full", *(f"{what} {name} 512" for name in QUICK[:3])]
    assert fake.ran == ran
    assert fake.served == [{"oracle", "freekv", "streamingllm"}]

    fake.breaks_at = ""
    assert accuracy.main(command) == 1  # the control answers as well: the task proves nothing
    assert fake.started == [None, 512, 512]
    assert fake.ran[4:] == [f"{what} sink_window 512"]
    assert fake.served[1:] == [{"streamingllm"}]
    shown = capsys.readouterr().out
    assert "FAIL" in shown
    assert "which index?" in shown
    assert "which threshold?" not in shown

    assert accuracy.main(command) == 1
    assert fake.started == [None, 512, 512]

    capsys.readouterr()
    accuracy.main([*command, "--also", "thresholds"])
    assert fake.started[3:] == [512]
    assert fake.served[2:] == [{"freekv", "speculative", "summary_8"}]
    others = ("every_step", "threshold_0.8", "threshold_0.7", "reuse", "speculative", "summary_8")
    assert fake.ran[5:] == [f"{what} {name} 512" for name in others]
    assert "which threshold?" in capsys.readouterr().out

    accuracy.main([*command, "--also", "page_16", "mean"])
    assert fake.started[4:] == [512, 512]
    assert fake.served[3:] == [{"mean"}, {"freekv"}]
    assert fake.options == {"page_size": 16}
    assert fake.ran[11:] == [f"{what} mean 512", f"{what} page_16 512"]

    monkeypatch.setattr(build, "code_fingerprint", lambda: "another code")
    accuracy.main(command)
    assert fake.started[6:] == [512]
    assert len(fake.ran) == 13 + 4


def test_a_method_that_changes_is_run_anew(tmp_path, monkeypatch):
    """What the engine serves under a name is part of a cell's key."""
    monkeypatch.setattr(build, "code_fingerprint", lambda: "code")
    mean = next(v for v in catalogue.VARIANTS if v.name == "mean")
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


def test_unknown_tasks_are_named(capsys):
    with pytest.raises(SystemExit):
        accuracy.main(["--task", "nothing"])
    assert "no task nothing; there are: passkey-qwen-4k" in capsys.readouterr().err


def test_unknown_variants_are_named(capsys):
    with pytest.raises(SystemExit):
        accuracy.main(["--also", "nothing"])
    assert "poolings" in capsys.readouterr().err


def test_another_model_takes_the_tasks_over(tmp_path):
    tasks = catalogue.with_model(catalogue.TASKS, tmp_path / "Mine")
    assert "passkey-Mine-4k" in [task.name for task in tasks]
    assert len({task.name for task in tasks}) == len(tasks)
