"""How the scores of query heads become those of pages, against one-line formulas."""

import pytest
import torch

from vllm_kvretrieval.retrieval.pooling import Pooling

GROUP, PAGES, PARTS = 3, 20, 4
FORMULAS = {
    Pooling.MEAN_SOFTMAX: lambda s: s.softmax(-1).mean(0).unflatten(0, (-1, PARTS)).sum(-1),
    Pooling.RELATIVE: lambda s: (
        (s - s.amax(-1, keepdim=True)).exp().sum(0).unflatten(0, (-1, PARTS)).sum(-1)
    ),
    Pooling.MAX: lambda s: s.amax(0).unflatten(0, (-1, PARTS)).amax(-1),
    Pooling.SUM: lambda s: s.sum(0).unflatten(0, (-1, PARTS)).amax(-1),
    Pooling.MAX_SOFTMAX: lambda s: s.softmax(-1).amax(0).unflatten(0, (-1, PARTS)).sum(-1),
}


@pytest.fixture
def scores():
    torch.manual_seed(0)
    return torch.randn(GROUP, PAGES * PARTS) * 3


def pooled(pooling, scores, parts=PARTS):
    return pooling.pool(scores.double() - pooling.norms(scores), parts)


def test_their_numbers_and_names():
    """Those of csrc/cpu/kernels.h, and of the option."""
    assert {pooling.name.lower(): int(pooling) for pooling in Pooling} == {
        "mean_softmax": 0,
        "relative": 1,
        "max": 2,
        "sum": 3,
        "max_softmax": 4,
    }
    assert [pooling for pooling in Pooling if pooling.raw] == [Pooling.MAX, Pooling.SUM]


@pytest.mark.parametrize("pooling", Pooling)
def test_formulas(scores, pooling):
    got, expected = pooled(pooling, scores), FORMULAS[pooling](scores.double())
    if pooling == Pooling.MEAN_SOFTMAX:
        got = got - torch.tensor(GROUP).log()  # the mean's divisor, which changes no order
    torch.testing.assert_close(got if pooling.raw else got.exp(), expected)


@pytest.mark.parametrize("pooling", Pooling)
def test_the_last_page_may_have_fewer_entries(scores, pooling):
    norms = pooling.norms(scores)
    short = pooling.pool(scores[:, :-3].double() - norms, PARTS)
    whole = pooling.pool(scores.double() - norms, PARTS)
    assert torch.equal(short[:-1], whole[:-1])
    last = pooling.pool(scores[:, -PARTS:-3].double() - norms, 1)
    torch.testing.assert_close(short[-1:], last)


@pytest.mark.parametrize("pooling", [p for p in Pooling if not p.raw])
def test_a_shift_of_a_head_changes_nothing(scores, pooling):
    shifted = scores + torch.tensor([[50.0], [-80.0], [0.0]])
    torch.testing.assert_close(
        pooled(pooling, shifted), pooled(pooling, scores), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("pooling", Pooling)
def test_pages_keep_their_order_however_far_apart(pooling):
    """One head; each page has a better entry than the one before it."""
    scores = torch.arange(PAGES, dtype=torch.float32)[None] * 500
    assert (pooled(pooling, scores, 1).diff() > 1).all()


def test_a_head_that_spreads_has_more_say_in_relative():
    """A sharp head wants page 0, a spread-out one all but that, and page 9 a little more."""
    sharp, spread = torch.zeros(10), torch.zeros(10)
    sharp[0], spread[0], spread[9] = 20, -20, 0.1
    scores = torch.stack([sharp, spread])
    assert pooled(Pooling.MEAN_SOFTMAX, scores, 1).argmax() == 0
    share = pooled(Pooling.MEAN_SOFTMAX, scores, 1).exp()
    relative = pooled(Pooling.RELATIVE, scores, 1).exp()
    assert relative[9] / relative[0] > 5 * share[9] / share[0]
