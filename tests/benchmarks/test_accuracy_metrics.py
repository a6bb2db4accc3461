"""Scores of the accuracy benchmark, and the shares of the cache that it reports."""

import json
import math

import numpy as np
import pytest
import torch

from benchmarks import common, worker_counts
from benchmarks.quality.tasks import engine, scoring, variants
from vllm_kvretrieval.calibration import divergence
from vllm_kvretrieval.calibration.divergence import Scored
from vllm_kvretrieval.calibration.samples import Sample

VARIANT = {variant.name: variant for variant in variants.VARIANTS}


def top(logits: np.ndarray, count: int) -> Scored:
    """The `count` most likely tokens of each row, as vLLM would report them."""
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1)[:, :count]
    return Scored(logprobs[:, 0], ids, np.take_along_axis(logprobs, ids, axis=1))


def exact_kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    p, q = (torch.tensor(x).log_softmax(-1) for x in (a, b))
    return (p.exp() * (p - q)).sum(-1).numpy()


def test_kl_over_the_whole_vocabulary_is_exact():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 50))
    np.testing.assert_allclose(
        divergence.kl_divergence(top(a, 50), top(b, 50)), exact_kl(a, b), rtol=1e-6, atol=1e-9
    )


def test_kl_with_a_tail_bucket_is_a_close_lower_bound():
    rng = np.random.default_rng(1)
    a = rng.normal(size=(20, 5000)) * 3
    b = a + rng.normal(size=a.shape) * 0.2
    bound, true = divergence.kl_divergence(top(a, 512), top(b, 512)), exact_kl(a, b)
    assert (bound <= true + 1e-12).all()
    assert bound.mean() > 0.9 * true.mean()


def test_kl_of_a_distribution_to_itself_is_zero_and_disjoint_tops_are_finite():
    a = top(np.random.default_rng(2).normal(size=(3, 100)), 10)
    np.testing.assert_allclose(divergence.kl_divergence(a, a), 0, atol=1e-12)
    first, last = np.zeros((1, 100)), np.zeros((1, 100))
    first[0, :10], last[0, -10:] = 9, 9
    assert np.isfinite(divergence.kl_divergence(top(first, 10), top(last, 10))).all()


def test_kl_refuses_different_lengths():
    a = np.zeros((3, 10))
    with pytest.raises(ValueError, match="3 positions cannot be compared with 2"):
        divergence.kl_divergence(top(a, 5), top(a[:2], 5))


def test_forced_scores_weigh_positions_not_samples():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, 8, 30))
    full, other = [top(a[:2], 30), top(a[2:], 30)], [top(b[:2], 30), top(b[2:], 30)]
    scores = divergence.forced_scores(full, other)
    assert scores["kl"] == pytest.approx(exact_kl(a, b).mean())
    assert scores["agreement"] == pytest.approx((a.argmax(1) == b.argmax(1)).mean())
    assert scores["perplexity"] == pytest.approx(math.exp(-top(b, 30).target.mean()))
    assert "kl_turns" not in scores


def test_forced_scores_of_turns():
    """A turn is the same stretch of every sample."""
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(2, 12, 30))
    full, other = [top(a[:6], 30), top(a[6:], 30)], [top(b[:6], 30), top(b[6:], 30)]
    found = divergence.forced_scores(full, other, turns=3)["kl_turns"]
    expected = exact_kl(a, b).reshape(2, 3, 2).mean((0, 2))
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("generated", "found"), [("48213", True), (" 48213.", True), ("48219", False), ("", False)]
)
def test_answers_are_found_at_the_start(generated, found):
    assert divergence.answer_found(generated, "48213") is found


def test_cache_share_counts_dense_layers_whole():
    assert scoring.cache_share(999, 2, 100, 10, 0) == pytest.approx(0.1)
    assert scoring.cache_share(999, 2, 100, 10, 1) == pytest.approx(0.9 * 0.1 + 0.1)
    assert scoring.cache_share(999, 10, 4096, 10, 1) == 1.0


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
    assert scoring.attention_layers(VARIANT["omnikv"], smollm2) == (30, 8)
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


def test_corrected_share_is_of_the_heads_of_sparse_steps():
    before = {"corrected": 5, "sparse_heads": 870}
    after = {"corrected": 5 + 652, "sparse_heads": 870 + 87 * 10}
    assert worker_counts.corrected_share(before, after) == pytest.approx(0.7494)
    assert worker_counts.corrected_share(before, before) is None
    assert [v.name for v in variants.VARIANTS if not v.selects] == [
        "sink_window",
        "sink_window_16",
        "razor",
        "kivi_k2v2",
        "kivi_k4v4",
        "kvquant_k2v2",
        "kvquant_k4v4",
        "full_int8",
        "full_int4",
    ]
    speculating = {v.name for v in variants.VARIANTS if v.speculates}
    of_freekv = {v.name for v in variants.VARIANTS if v.method == "freekv"}
    assert speculating == of_freekv | {"speculative", "summary_8"}
