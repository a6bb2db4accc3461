"""Which pages are encoded when."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_kvretrieval.storage.base import StepContexts, StorageFacts
from vllm_kvretrieval.storage.encoded import Encoded, OpenPages

SIZE = 4


@pytest.mark.parametrize("keeps", [0, 1, 3])
def test_every_page_is_encoded_once_when_it_leaves(keeps):
    """Against the definition, over requests that start behind a prefix, in chunks, and end."""
    random = torch.Generator().manual_seed(keeps)
    integer = lambda low, high: int(torch.randint(low, high, (), generator=random))  # noqa: E731
    tier = OpenPages(SIZE, keeps)
    contexts: dict[str, tuple[int, int, list[int]]] = {}  # shared, tokens, pages
    fresh = iter(range(10**6))
    encoded: set[int] = set()
    ended = 0
    for step in range(400):
        if len(contexts) < 3:
            shared = integer(0, 3)
            contexts[str(step)] = shared, shared * SIZE, [next(fresh) for _ in range(shared)]
            encoded.update(contexts[str(step)][2])
        ids = [name for name in contexts if integer(0, 3)]
        before = [contexts[name][1] for name in ids]
        for name in ids:
            shared, tokens, pages = contexts[name]
            tokens += integer(1, 3 * SIZE) if integer(0, 4) == 0 else 1
            pages += [next(fresh) for _ in range(-(-tokens // SIZE) - len(pages))]
            contexts[name] = shared, tokens, pages
        table = np.full((len(ids), 400), -1)
        for row, name in enumerate(ids):
            table[row, : len(contexts[name][2])] = contexts[name][2]
        after = np.array([contexts[name][1] for name in ids])
        closing = tier.advance(ids, np.array(before), after, after, table)
        assert not encoded.intersection(closing)
        assert len(set(closing)) == len(closing)
        encoded.update(closing)
        for name in ids:
            shared, tokens, pages = contexts[name]
            first_open = max(shared, tokens // SIZE - keeps)
            assert encoded.issuperset(pages[:first_open])
            assert encoded.isdisjoint(pages[first_open:])
        if integer(0, 12) == 0 and ids:
            shared, tokens, pages = contexts.pop(ids[0])
            full, unfinished = tier.end([ids[0], "unknown"])
            assert full == pages[max(shared, tokens // SIZE - keeps) : tokens // SIZE]
            assert unfinished == pages[tokens // SIZE :]
            encoded.update(full)
            ended += 1
    assert ended > 10
    assert tier.end(["unknown"]) == ([], [])


def test_all_layers_encode_what_leaves(tmp_path):
    """Layers that differ in their query heads have metadata builders of their own."""
    tiers: Any = SimpleNamespace(slots=[1], blocks=9, home=9 << 12, streams_dense=False)
    config: Any = SimpleNamespace(page_size=SIZE, open_pages=0, home_directory=str(tmp_path))
    storage = Encoded(config, StorageFacts(["a"], tiers, SIZE))
    storage.allocate(["a"], 9 << 12)
    for before, page in ((0, 7), (SIZE, 8)):
        storage.begin_step(SimpleNamespace(kv_cache_block_copies=None))
        step = StepContexts(
            requests=["a"],
            seats=np.array([0]),
            before=np.array([before]),
            lens=np.array([before + SIZE]),
            certain=np.array([before + SIZE]),
            block_table=np.array([[7, 8]]),
            whole=None,
            laid_out=[],
            most_pages=1,
        )
        assert [storage.plan(step).leaving.tolist() for _ in range(2)] == [[page], [page]]


def test_pages_with_drafts_stay_open():
    """Until the tokens that a page is full of are certain; with others in their places, or not."""
    tier, table = OpenPages(SIZE, 0), np.array([[7, 8, 9, 5]])

    def closing(before, certain, after):
        start, end, stay = (np.array([tokens]) for tokens in (before, after, certain))
        return tier.advance(["a"], start, end, stay, table)

    assert closing(0, 3, 3) == []
    assert closing(3, 4, 9) == [7]  # drafts fill a page, and begin another
    assert closing(5, 6, 8) == []  # one was accepted, and other drafts fill the page again
    assert closing(6, 7, 8) == []  # all were rejected
    assert closing(8, 9, 13) == [8]  # one was accepted, which has filled the page
    assert tier.end(["a"]) == ([], [9, 5])
