"""The attention that tokens receive, against the whole matrix of it in float64."""

from itertools import pairwise

import pytest
import torch

from vllm_kvretrieval.kernels import observe as observation
from vllm_kvretrieval.kernels.observe import context_keys, observe


def whole(query, first, keys, scale, softcap=0.0, sinks=None):
    """Softmax weights float64 [heads, n, tokens] of queries at positions from ``first`` on."""
    count, heads, _ = query.shape
    keys = keys.double().repeat_interleave(heads // len(keys), 0)
    scores = torch.einsum("nhd,htd->hnt", query.double(), keys) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    positions = torch.arange(first, first + count)
    later = torch.arange(keys.shape[1]) > positions[:, None]
    scores = scores.masked_fill(later, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.double()[:, None, None].expand(-1, count, 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize(
    ("first", "count", "kv_heads", "group", "head_size", "rest"),
    [(0, 70, 3, 3, 64, 0), (500, 32, 2, 7, 64, 9), (999, 1, 1, 4, 256, 0), (40, 200, 2, 1, 96, 30)],
)
@pytest.mark.parametrize("scratch", [1, 40_000, observation.SCRATCH])
def test_equals_the_whole_matrix(
    monkeypatch, scratch, first, count, kv_heads, group, head_size, rest, per_layer
):
    """However few queries fit in the scratch; what lies behind the last one is not read."""
    monkeypatch.setattr(observation, "SCRATCH", scratch)
    torch.manual_seed(first)
    query = torch.randn(count, kv_heads * group + 1, head_size)[:, : kv_heads * group]
    keys = 3 * torch.randn(kv_heads, first + count + rest, head_size)
    keys[:, first + count :] = torch.nan
    mass = torch.rand(1 if per_layer else kv_heads, first + count + rest)
    before = mass.clone()
    entropy = observe(query, first, keys, 0.2, mass, entropies=True)
    weights = whole(query, first, keys[:, : first + count], 0.2)
    expected = weights.unflatten(0, (kv_heads, group)).sum((1, 2))
    expected = expected.sum(0, keepdim=True) if per_layer else expected
    torch.testing.assert_close(
        (mass - before)[:, : first + count].double(), expected, atol=2e-5, rtol=1e-5
    )
    assert torch.equal(mass[:, first + count :], before[:, first + count :])
    shannon = -torch.special.xlogy(weights, weights).sum()
    assert entropy == pytest.approx(float(shannon), rel=1e-4, abs=1e-3)
    assert observe(query, first, keys, 0.2, mass) == 0.0


@pytest.mark.parametrize("scratch", [1, observation.SCRATCH])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(2.0, False), (0.0, True), (5.0, True)])
def test_soft_capping_and_sinks(monkeypatch, scratch, softcap, with_sinks):
    """Sinks take a part of the weights, which is no token's."""
    monkeypatch.setattr(observation, "SCRATCH", scratch)
    torch.manual_seed(0)
    query, keys = 3 * torch.randn(30, 4, 64), torch.randn(2, 130, 64)
    sinks = torch.tensor([-40.0, 0.0, 3.0, 40.0]) if with_sinks else None
    rule = {"softcap": softcap, "sinks": sinks}
    weights = whole(query, 100, keys, 0.2, **rule)
    mass = torch.zeros(2, 130)
    entropy = observe(query, 100, keys, 0.2, mass, entropies=True, **rule)
    expected = weights.unflatten(0, (2, 2)).sum((1, 2))
    torch.testing.assert_close(mass.double(), expected, atol=2e-5, rtol=1e-5)
    shannon = -torch.special.xlogy(weights, weights).sum()
    assert entropy == pytest.approx(float(shannon), rel=1e-4, abs=1e-3)
    again, latest = torch.zeros(2, 130), torch.zeros(1, 130)
    assert observe(query, 100, keys, 0.2, again, **rule) == 0
    torch.testing.assert_close(again, mass, atol=2e-5, rtol=1e-5)
    observe(query, 100, keys, 0.2, latest, stamped=0.05, **rule)
    positions = torch.arange(100, 130.0)[:, None]
    torch.testing.assert_close(latest[0], ((weights > 0.05).any(0) * positions).amax(0))


def test_chunks_add_up_to_the_prompt():
    torch.manual_seed(0)
    query, keys = torch.randn(300, 4, 64), torch.randn(2, 300, 64)
    at_once, in_chunks = torch.zeros(2, 300), torch.zeros(2, 300)
    entropy = observe(query, 0, keys, 0.3, at_once, entropies=True)
    borders = (0, 100, 101, 256, 300)
    parts = [
        observe(query[a:b], a, keys[:, :b], 0.3, in_chunks[:, :b], entropies=True)
        for a, b in pairwise(borders)
    ]
    torch.testing.assert_close(in_chunks, at_once)
    assert sum(parts) == pytest.approx(entropy)
    assert at_once.sum() == pytest.approx(300 * 4, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_of_a_context(dtype):
    cache = torch.randn(9, 2, 32, 128).to(dtype)
    for head in range(2):
        keys = context_keys(cache, torch.tensor([7, 0, 3]), 70, head)
        assert keys.shape == (1, 70, 64)
        assert keys.dtype == torch.float32
        for position, (page, offset) in {0: (7, 0), 40: (0, 8), 69: (3, 5)}.items():
            assert torch.equal(keys[0, position], cache[page, head, offset, :64].float())


@pytest.mark.parametrize("scratch", [1, observation.SCRATCH])
def test_stamps(monkeypatch, scratch):
    """The position of the latest query of which a head gives a token much."""
    monkeypatch.setattr(observation, "SCRATCH", scratch)
    torch.manual_seed(5)
    query, keys = torch.randn(90, 4, 64), 2 * torch.randn(2, 290, 64)
    stamps = torch.zeros(2, 290)
    stamps[:, :5] = 1000.0  # later than any of these
    observe(query, 200, keys, 0.3, stamps, stamped=0.02)
    high = (whole(query, 200, keys, 0.3).unflatten(0, (2, 2)) > 0.02).any(1)
    expected = (high * torch.arange(200, 290)[:, None]).amax(1).float()
    expected[:, :5] = 1000.0
    assert torch.equal(stamps, expected)
    assert 20 < (stamps > 0).sum() < 560
