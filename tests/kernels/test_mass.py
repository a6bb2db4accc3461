"""A mass budget: as few of the selected units as reach a share of the scores."""

from dataclasses import replace

import pytest
import torch

from tests.spec import ops as reference
from tests.support.covering import covering
from tests.support.isas import visited
from tests.support.kernel_checks import DTYPES, clone_rows, copy_of, make_chooser, make_rows
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.retrieval.families.scored import MASS
from vllm_kvretrieval.retrieval.index import make_index
from vllm_kvretrieval.values import LEAST_SHARE

pytestmark = pytest.mark.threads

SEATS, KV_HEADS, GROUP, PAGE = 3, 2, 3, 32
SINK, WINDOW, SELECT = 1, 2, 20


def setting(index, parts, dtype, masses, per_token=False, sharp=1.0):
    """A chooser, queries and rows whose heads need between one unit and all of them."""
    chooser = make_chooser(
        120, SEATS, KV_HEADS, GROUP, 64, dtype,
        most_selected=SELECT * PAGE, index=make_index(index), parts=parts,
    )  # fmt: skip
    units = PAGE if per_token else 1
    budget = SINK * units, WINDOW * units, SELECT * units
    rows = make_rows(
        [90 * PAGE - 5, 60 * PAGE, 40 * PAGE + 1], chooser, budget, tau=1.0, per_token=per_token
    )
    rows.numbers["mass"][:] = torch.tensor(masses)
    query = sharp * torch.randn(3, KV_HEADS * GROUP, 64)
    return chooser, query.to(dtype), replace(rows, spared=torch.zeros(SEATS, dtype=torch.int64))


def copied(rows):
    return clone_rows(rows)


@covering(
    index=["mean", "min_max", "low_rank", "mean_std"],
    parts=[1, 2],
    dtype=DTYPES,
    sharp=[0.3, 2.0, 40.0],
)
def test_equals_reference(index, parts, dtype, sharp):
    torch.manual_seed(parts)
    chooser, query, rows = setting(index, parts, dtype, [0.5, 0.95, 1.0], sharp=sharp)
    expected, other = copied(rows), copy_of(chooser)
    reference.plan_decode(query, expected, other)
    for _ in visited():
        ours = copied(rows)
        cpu.plan_decode(query, ours, chooser)
        off = (ours.lengths - expected.lengths).abs()
        # A head whose mass is reached just so may need a page more or less.
        assert (off > 0).sum() <= 1
        assert off.max() <= PAGE
        if not off.any():
            assert torch.equal(ours.spared, expected.spared)
            same = (ours.lists == expected.lists).float().mean()
            assert same > 0.98, "pages as good as one another may change places"


@pytest.mark.parametrize("index", ["one_bit", "exact"])
def test_of_single_tokens(index):
    torch.manual_seed(1)
    chooser, query, rows = setting(index, 1, torch.float32, [0.5, 0.9, 1.0], per_token=True)
    expected = copied(rows)
    reference.plan_decode(query, expected, copy_of(chooser))
    for _ in visited():
        ours = copied(rows)
        cpu.plan_decode(query, ours, chooser)
        off = (ours.lengths - expected.lengths).abs()
        assert off.max() <= max(2, 0.01 * SELECT * PAGE)
        assert (ours.lengths[:2] < ours.lengths[4]).all(), "half of it takes fewer"


def test_it_is_the_smallest_set_that_reaches_it():
    """By shares that are computed here from the index."""
    torch.manual_seed(2)
    chooser, query, rows = setting("mean", 1, torch.float32, [0.3, 0.6, 0.9], sharp=3.0)
    cpu.plan_decode(query, rows, chooser)
    spared = 0
    for r, seat in enumerate(rows.seats.tolist()):
        pages = rows.block_table[r, : -(-int(rows.seq_lens[r]) // PAGE)].long()
        whole = pages[: int(rows.seq_lens[r]) // PAGE]
        for head in range(KV_HEADS):
            keys = chooser.store.cache[whole, head, :].view(len(whole), 2, 64, PAGE)[:, 0].mean(-1)
            logits = query[r].view(KV_HEADS, GROUP, 64)[head] @ keys.T / 8
            shares = logits.softmax(-1).mean(0)
            count = -(-int(rows.lengths[r * KV_HEADS + head]) // PAGE)
            listed = rows.lists[r * KV_HEADS + head, :count] // KV_HEADS
            place = {page: j for j, page in enumerate(pages.tolist())}
            chosen = [place[page] for page in listed.tolist()][SINK:-WINDOW]
            assert chosen == sorted(chosen)
            fixed = shares[:SINK].sum() + shares[len(pages) - WINDOW :].sum()
            reached = fixed + shares[chosen].sum()
            least = shares[chosen].min()
            if len(chosen) < SELECT:
                assert reached >= rows.numbers["mass"][r] - 1e-5
                assert len(chosen) == 1 or reached - least < rows.numbers["mass"][r] + 1e-5
                others = [j for j in range(SINK, len(pages) - WINDOW) if j not in chosen]
                assert shares[[j for j in others if j < len(shares)]].max() <= least + 1e-6
            spared += SELECT - len(chosen)
        assert seat in range(SEATS)
    assert 0 < spared == int(rows.spared.sum())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mass": 0.0}, "a mass of 0.* is no share"),
        ({"mass": 1.5}, "a mass of 1.5.* is no share"),
        ({"mass": float("nan")}, "a mass of .*nan.* is no share"),
        ({"threshold": 0.5}, "is reached by each step's own shares"),
        ({"spared": torch.zeros(0, dtype=torch.int64)}, "is outside the 0 of spared"),
    ],
)
def test_refused(change, why):
    chooser, query, rows = setting("mean", 1, torch.float32, [0.5, 0.5, 0.5])
    for name, value in change.items():
        if isinstance(value, torch.Tensor):
            rows = replace(rows, **{name: value})
        else:
            rows.numbers[name][1] = value
    with pytest.raises(ValueError, match=why):
        cpu.plan_decode(query, rows, chooser)


# ------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("method", "options", "mass"),
    [
        ("twilight", {}, 0.95),
        ("twilight", {"mass": 0.5}, 0.5),
        ("kvretrieval", {}, 1),
        ("kvretrieval", {"mass": 0.9}, 0.9),
        ("fier", {"mass": 0.9}, 0.9),
        ("quest", {"pooling": "mean_softmax", "mass": 0.9}, 0.9),
        ("twilight", {"pooling": "max"}, 1),
        ("snapkv", {"mass": 1}, 1),
    ],
)
def test_methods_that_have_a_mass(method, options, mass):
    assert MASS.of(RetrievalConfig.from_options(method, options).own) == mass


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("freekv", {"mass": 0.9}, "mass=0.9 cannot be reached with freekv"),
        ("quest", {"mass": 0.9}, "mass=0.9 cannot be reached with quest"),
        ("kvretrieval", {"mass": 0.9, "rerank": 2}, "mass=0.9 cannot be reached with kvretrieval"),
        ("snapkv", {"mass": 0.9}, "mass=0.9 has no effect with snapkv"),
        ("omnikv", {"mass": 0.9}, "mass=0.9 has no effect with omnikv"),
        ("kvretrieval", {"mass": 0}, "mass=0 must be more than 0"),
        ("kvretrieval", {"mass": 95}, "mass=95 must be a number between"),
        ("kvretrieval", {"mass": "0.9"}, "mass='0.9' must be a number between"),
        ("freekv", {"also": {"mine": {"mass": 0.9}}}, "also: mine: mass=0.9 cannot be reached"),
    ],
)
def test_refused_options(method, options, why):
    with pytest.raises(RetrievalConfigError, match=f"kv_retrieval.{why}"):
        RetrievalConfig.from_options(method, options)


@pytest.mark.parametrize("mass", [5e-324, 1e-60, 1e-45, 2**-127])
def test_a_mass_that_is_none_in_32_bits(mass):
    """Kernels would refuse it in the midst of a step, which ends the engine."""
    why = rf"kv_retrieval\.mass={mass} must be more than 0, and 1\.2e-38 at least"
    with pytest.raises(RetrievalConfigError, match=why):
        RetrievalConfig.from_options("twilight", {"mass": mass})
    served = RetrievalConfig.from_options("twilight", {})
    with pytest.raises(RetrievalConfigError, match=why):
        RequestOptions.parse({"kv_retrieval_mass": mass}, served)
    with pytest.raises(RetrievalConfigError, match="at least"):
        RetrievalConfig.from_options("freekv", {"memory_fraction": mass})


def test_the_least_mass_is_one_in_32_bits():
    chooser, query, rows = setting("mean", 1, torch.float32, [0.5, 0.5, LEAST_SHARE])
    cpu.plan_decode(query, rows, chooser)
    served = RetrievalConfig.from_options("twilight", {"mass": LEAST_SHARE})
    assert RequestOptions.parse(None, served).numbers["mass"] == LEAST_SHARE


def test_requests_choose():
    served = RetrievalConfig.from_options("twilight", {"also": ["freekv"]})
    for options, mass in [({}, 0.95), ({"mass": 0.5}, 0.5), ({"method": "freekv"}, 1)]:
        assert RequestOptions.parse({"kv_retrieval": options}, served).numbers["mass"] == mass
