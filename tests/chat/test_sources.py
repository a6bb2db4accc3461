"""What is noted of the attention of answers, page by page."""

import numpy as np
import pytest
import torch

from vllm_kvretrieval.engine import sources
from vllm_kvretrieval.engine.sources import Sources
from vllm_kvretrieval.kernels import TokenLists

SIZE, HEADS, GROUP = 16, 2, 3
GENERATOR = torch.Generator().manual_seed(1)


def expected(pages_of_heads, weights, count):
    """The most that a head gives to each page, token by token."""
    totals = np.zeros((len(weights), count))
    for head, own in enumerate(weights):
        for token, weight in enumerate(own.tolist()):
            totals[head, pages_of_heads[head // GROUP][token]] += weight
    return totals.max(0)


@pytest.fixture
def noted():
    """A request in seat 3, and what a step over a context of 75 tokens, 5 pages, notes of it."""
    made = Sources(SIZE, [1, 2, 4], 8)
    made.sit(3, "chatcmpl-a-0123abcd", True)
    made.sit(5, "chatcmpl-b-0123abcd", False)
    table = torch.tensor([[1, 2, 3, 4, 5, 0], [9, 4, 7, 30, 2, 0]], dtype=torch.int32)
    lens = torch.tensor([75, 75], dtype=torch.int32)

    def note(lists, weights):
        made.note(1, np.array([5, 3], dtype=np.int32), (table, lens), lists, weights)
        return made._records["chatcmpl-a-0123abcd"].weights[1]

    return made, note


def test_lists_of_pages(noted):
    """Each KV head has its own; the last page of a list is partly filled."""
    _, note = noted
    chosen = [[0, 2, 4], [0, 3, 4]]
    table = [9, 4, 7, 30, 2]
    units = [[table[page] * HEADS + head for page in own] for head, own in enumerate(chosen)]
    entries = torch.tensor([[2, 4, 6], [3, 5, 7], *units], dtype=torch.int32)
    lists = TokenLists(entries, torch.full((4,), 43, dtype=torch.int32), SIZE, HEADS)
    weights = torch.rand(2, HEADS * GROUP, 48, generator=GENERATOR)
    found = note(lists, weights)
    pages = [[own[token // SIZE] for token in range(43)] for own in chosen]
    np.testing.assert_allclose(found[:5], expected(pages, weights[1, :, :43], 5), rtol=1e-5)
    assert not found[5:].any()


def test_lists_of_tokens(noted):
    _, note = noted
    tokens = [[0, 5, 17, 74], [1, 18, 50, 74]]
    table = [9, 4, 7, 30, 2]
    numbers = [
        [(table[t // SIZE] * HEADS + head) * SIZE + t % SIZE for t in own]
        for head, own in enumerate(tokens)
    ]
    entries = torch.tensor([[0] * 4, [0] * 4, *numbers], dtype=torch.int32)
    lists = TokenLists(entries, torch.full((4,), 4, dtype=torch.int32), 1, HEADS)
    weights = torch.rand(2, HEADS * GROUP, 4, generator=GENERATOR)
    pages = [[token // SIZE for token in own] for own in tokens]
    np.testing.assert_allclose(note(lists, weights)[:5], expected(pages, weights[1], 5), rtol=1e-5)


def test_whole_contexts(noted):
    """KV heads share a list of pages, the block table."""
    _, note = noted
    entries = torch.tensor([[1, 2, 3, 4, 5], [9, 4, 7, 30, 2]], dtype=torch.int32)
    lengths = torch.full((4,), 75, dtype=torch.int32)
    lists = TokenLists(entries, lengths, SIZE, HEADS, per_head=False)
    weights = torch.rand(2, HEADS * GROUP, 75, generator=GENERATOR)
    pages = [[token // SIZE for token in range(75)]] * HEADS
    np.testing.assert_allclose(note(lists, weights)[:5], expected(pages, weights[1], 5), rtol=1e-5)


def test_what_is_told(noted):
    """Means over steps and layers, by the name that the client knows; of layers that noted."""
    made, note = noted
    entries = torch.tensor([[1, 2, 3, 4, 5], [9, 4, 7, 30, 2]], dtype=torch.int32)
    lengths = torch.full((4,), 75, dtype=torch.int32)
    lists = TokenLists(entries, lengths, SIZE, HEADS, per_head=False)
    weights = torch.zeros(2, HEADS * GROUP, 75)
    weights[1, 4, 40:42] = 0.25
    note(lists, weights)
    note(lists, weights / 2)
    made.leave(3)
    note(lists, weights)
    told = made.told("chatcmpl-a")
    assert told == {
        "page_size": SIZE,
        "tokens": 75,
        "steps": 2,
        "groups": [[2, 2]],
        "weights": [[0, 0, 0.375, 0, 0]],
        "peaks": [[0, 0, 0.5, 0, 0]],
    }
    assert made.told("chatcmpl-a-0123abcd") == told
    for other in ("chatcmpl-b", "chatcmpl", "a", ""):
        assert made.told(other) is None


def test_records_are_few(monkeypatch):
    """A client that asks again and again takes no more memory."""
    monkeypatch.setattr(sources, "MOST", 2)
    made = Sources(SIZE, [1], 8)
    for seat, name in enumerate("abc"):
        made.sit(seat, f"{name}-1", True)
    assert [made.told(name) is None for name in "abc"] == [True, False, False]
    made.sit(1, "b-1", True)  # it was interrupted, and is there again
    made.sit(2, "d-1", True)
    assert [made.told(name) is None for name in "bcd"] == [False, True, False]
