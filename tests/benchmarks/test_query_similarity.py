"""How alike the queries of adjacent steps are."""

import json

import pytest
import torch

from benchmarks.quality import __main__ as driver
from benchmarks.quality import query_similarity
from benchmarks.tables import quality
from tests.support.engine import shortened
from tests.support.seen import seen
from vllm_kvretrieval.observed_model import CHUNK


def test_cosines_of_adjacent_queries():
    """Of two KV heads with two query heads each, at three steps."""
    angles = torch.tensor([[0.0, 0.1, 0.2], [0.0, 0.5, 1.0], [0.0, 1.0, 1.2], [0.0, 0.0, 0.0]])
    query = torch.stack([angles.cos(), angles.sin()], -1) * torch.tensor([1.0, 2.0, 3.0])[:, None]
    found = query_similarity.Similarity()
    found.observe(seen(0, query, torch.zeros(2, 9, 2), torch.tensor([7, 8, 9])))
    cosines = (angles[:, 1:] - angles[:, :-1]).cos()
    torch.testing.assert_close(found.heads[0], cosines.mean(1))
    first, second = cosines[:2].mean(0), cosines[2:].mean(0)
    torch.testing.assert_close(found.groups[0], torch.cat([first, second]))
    with pytest.raises(ValueError, match="not adjacent"):
        found.observe(seen(0, query, torch.zeros(2, 9, 2), torch.tensor([5, 7, 9])))


@pytest.mark.model
def test_a_model(monkeypatch, tmp_path):
    model = shortened(tmp_path, "SmolLM2-135M-Instruct", 2)
    output = tmp_path / "similarity.json"
    words = ["query-similarity", "--model", str(model), "--tokens", str(2 * CHUNK)]
    assert driver.main([*words, "--output", str(output)]) == 0
    stored = json.loads(output.read_text())
    (row,) = stored["rows"]
    assert (row["layers"], row["heads"]) == (2, 18)
    assert 0 < row["least"] < row["tenth"] < row["median"] < 1
    assert 0 < row["corrected"]["0.8"] < row["corrected"]["0.9"] < 1
    shown = quality.query_similarity({"": stored}, {})
    assert f"| {row['model']} | 18 of 2 layers | {row['least']:.2f} |" in shown
    with pytest.raises(SystemExit):
        driver.main([*words, "--queries", "32"])
