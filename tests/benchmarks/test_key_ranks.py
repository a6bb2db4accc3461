"""What low-rank factors of keys hold, before and after rotary embedding."""

import json
from typing import Any

import pytest
import torch

from benchmarks.quality import __main__ as driver
from benchmarks.quality import key_ranks
from benchmarks.tables import quality
from tests.support.engine import shortened
from tests.support.seen import seen
from vllm_kvretrieval.observed_model import CHUNK, ObservedModel

TOKENS = 2 * CHUNK


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    model = shortened(tmp_path_factory.mktemp("model"), "SmolLM2-135M-Instruct", 2)
    return ObservedModel(str(model))


@pytest.mark.model
def test_keys_are_turned_back(observed):
    """To what the model's projections gave."""
    given, keys = [], []
    for layer in observed.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda *args: given.append(args[-1][0]))
    text = torch.randint(100, 20_000, (TOKENS,), generator=torch.Generator().manual_seed(0))
    observed.read(text, torch.tensor([TOKENS - 1]), lambda shown: keys.append(shown.key))
    rotation = key_ranks.Rotation(observed, TOKENS)
    for number, key in enumerate(keys):
        own = torch.cat(given[number :: len(keys)]).unflatten(1, (len(key), -1)).transpose(0, 1)
        torch.testing.assert_close(rotation.undo(key), own, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(rotation.apply(own), key, rtol=1e-3, atol=1e-3)
        assert (own - key).abs().max() > 1


def test_factors():
    keys = torch.randn(2, 500, 32, generator=torch.Generator().manual_seed(1))
    keys *= torch.arange(1, 33) / 8
    factors, total = key_ranks.Factors(keys), keys.square().sum()
    torch.testing.assert_close(factors.keys(64), keys, rtol=1e-4, atol=1e-4)
    for rank in (1, 16, 40):
        left = (factors.keys(rank) - keys).square().sum()
        assert factors.energy(rank) == pytest.approx(float(1 - left / total), abs=1e-5)
        assert torch.linalg.matrix_rank(factors.keys(rank).transpose(0, 1).flatten(1)) == rank
    assert factors.energy(64) == pytest.approx(1)


@pytest.mark.model
def test_keys_of_a_low_rank_before_rotation(observed):
    """A sixteenth of their width holds them then, and not after it."""
    rotation = key_ranks.Rotation(observed, TOKENS)
    generator = torch.Generator().manual_seed(2)
    made = torch.randn(TOKENS, 12, generator=generator) @ torch.randn(12, 192, generator=generator)
    keys = rotation.apply(made.unflatten(1, (3, 64)).transpose(0, 1))
    query = torch.randn(9, 2, 64, generator=generator)
    found = key_ranks.KeyRanks(rotation)
    found.observe(seen(0, query, keys, torch.tensor([TOKENS - 100, TOKENS]), 0.125))
    assert found.ranks == [12, 30, 48, 96, 144]
    before, after = found.energy
    assert (before > 0.999).all()
    assert after[0] < 0.5
    assert (after.diff() > 0).all()
    before, after = found.moved
    assert (before < 0.01).all()
    assert 0.1 < after[0] < 1
    assert (after.diff() < 0).all()


def test_results_name_the_models(monkeypatch, tmp_path):
    row: dict[str, Any] = {stage: {"energy": 0.5, "moved": 0.25} for stage in key_ranks.STAGES}
    row |= {"model": "m", "width": 128, "share": "5/32", "rank": 20, "layers": 3}
    monkeypatch.setattr(key_ranks, "measure", lambda *arguments: [row])
    output = tmp_path / "ranks.json"
    words = ["key-ranks", "--model", "somewhere/m", "--output", str(output)]
    assert driver.main(words) == 0
    stored = json.loads(output.read_text())
    assert stored["settings"] == {"model": ["m"], "tokens": 4096, "queries": 32}
    shown = quality.key_ranks({"": stored}, {})
    assert "| 5/32 | 20 of 128 | 50.0 %, 50.0 % | 25.0 %, 25.0 % |" in shown
