"""The tokens that are kept of a prompt: the papers' rules, on small numbers."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.methods import make_method
from vllm_kvretrieval.retrieval.keeping import Keeping, entropy_shares
from vllm_kvretrieval.retrieval.presets import OWN


def rule(preset):
    return OWN[preset].keeping


def kept(keeping, mass, *counts):
    return [
        positions.tolist() for positions in keeping.keep(torch.tensor(mass), torch.tensor(counts))
    ]


MASS = [9.0, 0, 0, 0, 5, 0, 0, 7, 0, 0, 0, 0]  # 12 tokens


def test_entropykv_keeps_sink_top_half_and_recent_half():
    """Section 3.3: half of the budget by score, half the most recent, and the first token."""
    assert kept(rule("entropykv"), [MASS], 6) == [[0, 4, 7, 9, 10, 11]]
    assert kept(rule("entropykv"), [[0.0, *MASS[1:]]], 4, 4) == [[0, 7, 10, 11]] * 2
    assert kept(rule("entropykv"), [MASS], 1) == [[0]]


def test_heads_differ_in_what_and_how_much_they_keep():
    other = [0.0, 0, 8, 0, 0, 0, 6, 0, 0, 0, 0, 0]
    assert kept(rule("h2o"), [MASS, other], 4, 6) == [[0, 7, 10, 11], [0, 2, 6, 9, 10, 11]]


def test_equal_ones_are_kept_from_the_start_on():
    assert kept(Keeping(), [[1.0] * 8], 3) == [[0, 1, 2]]


def test_snapkv_keeps_its_window_and_what_lies_around_the_best():
    """A token is rated as the best of the 7 tokens around it, without those of the window."""
    mass = [0.0] * 100
    mass[50], mass[99], mass[69] = 9, 100, 1
    assert kept(rule("snapkv"), [mass], 32 + 7) == [[*range(47, 54), *range(68, 100)]]


def test_a_window_larger_than_the_count():
    assert kept(rule("snapkv"), [[1.0] * 100], 8) == [list(range(92, 100))]


def test_everything_is_kept_where_there_is_room():
    for preset in ("entropykv", "snapkv", "h2o", "tova"):
        assert kept(rule(preset), [MASS], 12) == [list(range(12))]


@pytest.mark.parametrize(("end", "first"), [(10, 0), (32, 0), (33, 1), (1000, 968)])
def test_the_last_queries_count(end, first):
    assert Keeping(observation=32).first_observed(end) == first
    assert Keeping().first_observed(end) == 0


def test_budgets_in_proportion_to_entropy():
    """Section 3.3, clipped on both sides; what is left over goes to the others."""
    entropies = np.array([1.0, 2.0, 3.0, 2.0])
    np.testing.assert_allclose(entropy_shares(entropies, 0.0, 9.0), entropies / 2)
    shares = entropy_shares(np.array([0.0, 1, 1, 10]), 0.25, 2.0)
    np.testing.assert_allclose(shares, [0.25, 0.875, 0.875, 2.0], rtol=1e-6)
    np.testing.assert_allclose(entropy_shares(np.zeros(3), 0.125, 2.0), np.ones(3))
    rng = np.random.default_rng(0)
    for _ in range(50):
        drawn = rng.exponential(size=rng.integers(1, 40)) * 10.0 ** rng.integers(-8, 8)
        shares = entropy_shares(drawn, 0.125, 2.0)
        assert shares.mean() == pytest.approx(1)
        assert shares.min() > 0.125 - 1e-9
        assert shares.max() < 2 + 1e-9
        order = drawn.argsort()
        assert (np.diff(shares[order]) > -1e-9).all()


@pytest.mark.parametrize(
    ("preset", "options", "observation"),
    [
        ("entropykv", {}, None),
        ("entropykv", {"observation": 64}, 64),
        ("snapkv", {}, 32),
        ("snapkv", {"observation": "all"}, None),
        ("tova", {}, 1),
    ],
)
def test_observation(preset, options, observation):
    method: Any = make_method(preset, preset, options, 32)
    assert method.keeping.observation == observation
    assert method.per_token


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("snapkv", {"observation": 0}, "observation=0 must be all, or how many"),
        ("snapkv", {"observation": "last"}, "observation='last' must be all"),
        ("snapkv", {"observation": True}, "observation"),
        ("snapkv", {"index": "min_max"}, "index='min_max' has no effect with snapkv"),
        ("h2o", {"correction_threshold": 0.5}, "correction_threshold=0.5 has no effect with h2o"),
        ("h2o", {"schedule": "every_step"}, "cannot be combined with h2o: methods that drop"),
        ("freekv", {"schedule": "once"}, "cannot be combined with freekv: methods that drop"),
        ("fier", {"budget_shares": "entropy"}, "which fier does not look at"),
        ("tova", {"schedule": "sliding"}, "keeps no window of recent tokens; use a method that"),
        ("raas", {"schedule": "sliding"}, "does, such as snapkv or h2o"),
        ("kvretrieval", {"schedule": "sliding"}, "cannot be combined with kvretrieval"),
        ("tova", {"budget_shares": [[1, 3]]}, "different shares, and with tova they keep the same"),
        (
            "entropykv",
            {"budget_shares": [1, [1, 3]], "schedule": "running"},
            "give one number per layer, or use schedule=once",
        ),
        ("snapkv", {"budget_shares": {"entropy": {"least": 2}}}, "entropy has least"),
        ("snapkv", {"budget_shares": {"entropy": {"most": 0.5}}}, "entropy has least"),
        ("snapkv", {"budget_shares": {"entropy": [1, 2]}}, "entropy has least"),
    ],
)
def test_refusals(preset, options, message):
    with pytest.raises(RetrievalConfigError, match=message.replace("(", r"\(")):
        make_method(preset, preset, options, 32)


def test_what_can_be_combined():
    once: Any = make_method("h2o", "h2o", {"schedule": "once"}, 32)
    running: Any = make_method("s", "snapkv", {"schedule": "running"}, 32)
    assert (once.drops, running.drops) == (False, True)
    assert make_method("p", "snapkv", {"budget_shares": "pyramid"}, 32).budget_shares.beta == 20
    shares = make_method(
        "e", "snapkv", {"budget_shares": {"entropy": {"most": 4}}}, 32
    ).budget_shares
    assert shares.entropy == (0.125, 4.0)


@pytest.mark.parametrize("page", [1, 16])
def test_how_many_are_kept(page):
    """As many tokens as fit are kept, in whole pages and the last page. Without room a page is
    dropped."""
    keeping = Keeping(page=page)
    rng = np.random.default_rng(page)
    for _ in range(200):
        room, prompt = int(rng.integers(15, 100)), int(rng.integers(1, 200))
        kept = prompt if prompt <= room else prompt % page + (room - prompt % page) // page * page
        counts = []
        for _ in range(60):
            counts.append(kept)
            kept += 1
            if kept > room:
                kept -= page
        added = torch.arange(60)
        assert keeping.kept(torch.tensor(room), torch.tensor(prompt), added).tolist() == counts


def test_raas_keeps_pages_by_their_latest_stamp():
    """Of equal pages the latest are kept, and always the last page, which is not full."""
    stamps = torch.zeros(16 * 5 + 3)
    stamps[[5, 20, 40]] = torch.tensor([80.0, 79, 80])
    (kept,) = rule("raas").keep(stamps[None], torch.tensor([3 + 3 * 16]))
    assert kept.tolist() == [*range(16), *range(32, 48), *range(64, 83)]
    (kept,) = rule("raas").keep(stamps[None], torch.tensor([3 + 4 * 16]))
    assert kept.tolist() == [*range(48), *range(64, 83)]


@pytest.mark.parametrize(("end", "stays"), [(33, True), (48, True), (49, False), (64, False)])
def test_raas_never_drops_a_prompt_that_leaves_room_for_two_pages(end, stays):
    """One for the latest page, and one that can go: here of five pages in all."""
    stamps = torch.arange(end).float()
    rated = rule("raas").ratings(stamps, torch.arange(end), 5 * 16, slides=False)
    assert rated.tolist() == [math.inf] * end if stays else torch.equal(rated, stamps)
    rated = rule("h2o").ratings(stamps, torch.arange(end), 5 * 16, slides=False)
    assert torch.equal(rated, stamps), "other ratings say what goes"


@pytest.mark.parametrize(
    ("preset", "mass", "budget", "stay"),
    [
        ("entropykv", MASS, 14, [0, 1, 2, 3, 4, 5, 7]),
        ("entropykv", [0.0, 0, 0, 0, 0, 0, 1, 0, 3, 0, 2, 0], 13, [0, 1, 2, 3, 6, 8, 10]),
        ("entropykv", MASS[:5], 12, range(5)),
        ("snapkv", [*[0.0] * 20, *MASS, *[0.0] * 9], 50, [*range(4), *range(17, 31)]),
    ],
)
def test_the_most_attended_part_of_a_prompt_that_fits_stays(preset, mass, budget, stay):
    """As many tokens as a budget has beside recent ones; the others slide from the earliest on."""
    end = len(mass)
    rated = rule(preset).ratings(torch.tensor(mass), torch.arange(end), budget, slides=True)
    expected = [math.inf if t in stay else t for t in range(end)]
    assert rated.tolist() == expected


def test_what_was_chosen_of_a_prompt_that_does_not_fit_stays():
    positions = torch.tensor([0, 4, 7, 9, 10, 11])
    rated = rule("entropykv").ratings(torch.tensor(MASS), positions, 7, slides=True)
    assert rated.tolist() == [math.inf] * 3 + [9, 10, 11]
