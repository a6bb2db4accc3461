"""The indexes themselves, in plain torch: what records hold, and what their scores say of keys."""

import pytest
import torch

from vllm_kvretrieval.kernels.device import RECORD_ALIGNMENT
from vllm_kvretrieval.kernels.triton.index import check_store
from vllm_kvretrieval.kernels.types import IndexRecords
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.index import Field, indexes, make_index, pack, unpack
from vllm_kvretrieval.retrieval.index.exact import Exact
from vllm_kvretrieval.retrieval.index.low_rank import LowRank
from vllm_kvretrieval.retrieval.index.mean_std import MeanStd
from vllm_kvretrieval.retrieval.index.representative import KEPT

ENTRIES, TOKENS, SIZE, GROUP = 50, 16, 64, 3
SCALE = SIZE**-0.5
NAMES = (
    "min_max",
    "mean",
    "mean_std",
    "bounding",
    "representative",
    "one_bit",
    "low_rank",
    "landmark",
    "exact",
)


def index_of(value):
    index = make_index(value)
    assert index is not None
    return index


@pytest.fixture
def keys():
    torch.manual_seed(0)
    return torch.randn(ENTRIES, TOKENS, SIZE) + torch.randn(ENTRIES, 1, SIZE)


@pytest.fixture
def query():
    return torch.randn(GROUP, SIZE, generator=torch.Generator().manual_seed(1))


def stored(index, keys, dtype=torch.float32):
    """The record as it is read, after it has been built of keys in a cache's precision."""
    if index.reads_keys:
        return {"keys": keys.to(dtype).float()}
    fields = index.fields(keys.shape[2], keys.shape[1])
    return unpack(fields, pack(fields, index.build(keys.to(dtype).float()), dtype), dtype)


def scores_of(index, query, keys, dtype=torch.float32):
    return index.score(query, stored(index, keys, dtype), SCALE)


def products(query, keys):
    """[group, entries, tokens]."""
    return torch.einsum("gd,ntd->gnt", query, keys) * SCALE


def test_there_are_these():
    assert tuple(indexes())[: len(NAMES)] == NAMES
    assert [index_of(name).name for name in NAMES] == list(NAMES)
    assert [name for name in NAMES if index_of(name).grows] == ["min_max"]
    assert [name for name in NAMES if index_of(name).reads_keys] == ["exact"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("alignment", [1, 16])
def test_fields_are_packed(dtype, alignment):
    """Without gaps, or each from a multiple of the alignment on."""
    torch.manual_seed(2)
    fields = (
        Field("first", torch.uint8, (3,)),
        Field("own", None, (2, 8)),
        Field("number", torch.float32, (1,)),
        Field("last", torch.int8, (5,)),
    )
    record = {
        "first": torch.randint(256, (7, 3)).to(torch.uint8),
        "own": torch.randn(7, 2, 8).to(dtype),
        "number": torch.randn(7, 1),
        "last": torch.randint(-128, 128, (7, 5)).to(torch.int8),
    }
    packed = pack(fields, record, dtype, alignment)
    assert packed.dtype == torch.uint8
    size = 3 + 16 * dtype.itemsize + 4 + 5 if alignment == 1 else 16 + 16 * dtype.itemsize + 16 + 16
    assert packed.shape == (7, size)
    assert torch.equal(packed[:, :3], record["first"])
    own = packed[:, alignment if alignment > 3 else 3 :][:, : 16 * dtype.itemsize]
    assert torch.equal(own, record["own"].flatten(1).view(torch.uint8))
    back = unpack(fields, packed, dtype, alignment)
    assert back.keys() == record.keys()
    for name, field in record.items():
        assert back[name].dtype == field.dtype
        assert torch.equal(back[name], field)


@pytest.mark.parametrize(
    ("index", "size"),
    [
        ("min_max", 2 * 2 * SIZE),
        ("mean", 2 * SIZE),
        ("mean_std", 2 * 2 * SIZE),
        ("bounding", 2 * SIZE + 4),
        ("representative", 2 * SIZE),
        ("one_bit", 2 * 2 * SIZE + SIZE * TOKENS // 8),
        ({"low_rank": {"rank": 5}}, 5 * (SIZE // 2 + 1) + 3 * TOKENS + SIZE + 2),
        ("landmark", 2 * SIZE + 4),
        ("exact", 0),
    ],
)
def test_bytes_of_a_record(keys, index, size):
    """The bytes that the index states, those of the formula in its docs, and those in memory are
    equal."""
    made = index_of(index)
    assert made.record_bytes(SIZE, TOKENS, torch.bfloat16) == size
    if size:
        packed = pack(made.fields(SIZE, TOKENS), made.build(keys), torch.bfloat16)
        assert packed.shape == (ENTRIES, size)


@pytest.mark.parametrize(("name", "size"), [("bounding", 2 * 128 + 16), ("low_rank", 960)])
def test_bytes_on_a_gpu(name, size):
    """Sizes are planned by what kernels take, whose loads have 16 bytes."""
    index, cache = index_of(name), torch.empty(4, 2, 32, 2 * 128, dtype=torch.bfloat16)

    def store_of(alignment):
        return IndexRecords.empty(
            index, pages=4, kv_heads=2, head_size=128, page_size=32, dtype=cache.dtype,
            cache=cache, layout="rows", alignment=alignment,
        )  # fmt: skip

    store = store_of(RECORD_ALIGNMENT)
    check_store(store)
    assert store.records.shape[2] == size
    options = RetrievalConfig(index=name, page_size=32)
    planned = options.index_bytes(cache.nbytes, 128, cache.dtype, RECORD_ALIGNMENT)
    assert planned == store.records.numel()
    with pytest.raises(ValueError, match="the index's records must be"):
        check_store(store_of(1))


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_in_units_of_products(keys, query, name):
    """Twice the scale is twice the score, or no more than that of the best key moves."""
    index = index_of(name)
    once = scores_of(index, query, keys)
    twice = index.score(query, stored(index, keys), 2 * SCALE)
    assert once.shape == (GROUP, ENTRIES)
    assert once.dtype == torch.float32
    if name in ("one_bit", "low_rank", "exact"):  # log-sum-exp over tokens
        most = torch.log(torch.tensor(float(TOKENS)))
        assert ((twice - 2 * once) <= 1e-4).all()
        assert ((twice - 2 * once) >= -most - 1e-4).all()
    else:
        torch.testing.assert_close(twice, 2 * once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["min_max", "bounding"])
def test_bounds_are_bounds(query, name, dtype):
    """They bound every key in the cache, also hostile keys."""
    torch.manual_seed(3)
    for factor in (1, 100):
        keys = torch.randn(ENTRIES, TOKENS, SIZE)
        keys[:, 3] *= factor
        cached = keys.to(dtype).float()
        highest = products(query, cached).amax(-1)
        slack = 0.0 if name == "min_max" else factor * torch.finfo(dtype).eps * SIZE**0.5
        assert (scores_of(index_of(name), query, keys, dtype) >= highest - slack - 1e-4).all()
    one = torch.randn(1, 1, SIZE).expand(ENTRIES, TOKENS, SIZE)
    bound = scores_of(index_of(name), query, one)
    torch.testing.assert_close(bound, products(query, one).amax(-1))


def test_min_max_is_reached(query):
    """The bound is reached if one key has the best value of every channel."""
    keys = torch.randn(1, TOKENS, SIZE, generator=torch.Generator().manual_seed(4))
    best = torch.where(query[0] > 0, keys.amax(1), keys.amin(1))
    keys[:, 5] = best
    bound = scores_of(index_of("min_max"), query[:1], keys)
    torch.testing.assert_close(bound, products(query[:1], keys).amax(-1))


def test_mean_scores_are_the_mean_products(keys, query):
    """Representative's are those of the few keys that differ most from the others."""
    torch.testing.assert_close(
        scores_of(index_of("mean"), query, keys), products(query, keys).mean(-1)
    )
    distance = (keys - keys.mean(1, keepdim=True)).norm(dim=-1)
    kept = distance >= distance.sort(descending=True).values[:, KEPT - 1 : KEPT]
    of_kept = (products(query, keys) * kept).sum(-1) / KEPT
    torch.testing.assert_close(scores_of(index_of("representative"), query, keys), of_kept)
    few = keys[:, :3]
    torch.testing.assert_close(
        scores_of(index_of("representative"), query, few), products(query, few).mean(-1)
    )


def test_spread(keys, query):
    mean = scores_of(index_of("mean"), query, keys)
    torch.testing.assert_close(scores_of(MeanStd(0), query, keys), mean)
    width = scores_of(MeanStd(1), query, keys) - mean
    assert (width > 0).all()
    torch.testing.assert_close(scores_of(MeanStd(2.5), query, keys), mean + 2.5 * width)
    two = torch.cat([keys[:, :1] - 1, keys[:, :1] + 1], dim=1)  # a standard deviation of one
    expected = products(query, keys[:, :1])[..., 0] + (query.abs().sum(-1) * SCALE)[:, None]
    torch.testing.assert_close(scores_of(MeanStd(1), query, two), expected)


def test_bounding_radius(keys):
    record = index_of("bounding").build(keys)
    distances = (keys - record["centre"][:, None]).square().sum(-1).sqrt()
    torch.testing.assert_close(record["radius"][:, 0], distances.amax(1))


def test_least_cosine_of_a_landmark(keys):
    """Of keys that are all zero it is zero."""
    keys[3, 5] *= -2
    keys[4] = 0
    record = index_of("landmark").build(keys)
    torch.testing.assert_close(record["mean"], keys.mean(1))
    cosines = torch.cosine_similarity(keys, keys.mean(1, keepdim=True), dim=-1)
    torch.testing.assert_close(record["least_cosine"][:, 0], cosines.amin(1))
    assert record["least_cosine"].argmin() == 3
    assert record["least_cosine"][4] == 0


def test_one_bit_rounds_each_channel(keys, query):
    """Each channel is rounded to the nearer one of its two ends. Scores differ from those by
    rounded steps."""
    index = index_of("one_bit")
    record = index.build(keys)
    low, high = record["minimum"][:, None], record["maximum"][:, None]
    nearer = torch.where((keys - low) > (high - keys), high, low)
    of_tokens = index.score_tokens(query, record, SCALE)
    expected = products(query, nearer)
    error = (of_tokens - expected).square().mean(-1).sqrt() / expected.std(-1)
    assert error.mean() < 2e-3
    rounded = scores_of(index, query, keys)
    assert torch.equal(rounded, of_tokens.logsumexp(-1))
    torch.testing.assert_close(rounded, expected.logsumexp(-1), atol=5e-3, rtol=0)
    bits = record["bits"]
    assert bits.shape == (ENTRIES, SIZE // 32, TOKENS, 4)
    for channel in range(SIZE):
        byte = bits[:, channel // 32, :, channel % 4]
        upper = (byte >> channel % 32 // 4) & 1
        assert torch.equal(upper.bool(), nearer[..., channel] == high[..., channel])
    exact = scores_of(Exact(), query, nearer)
    torch.testing.assert_close(scores_of(index, query, nearer), exact, atol=5e-3, rtol=0)
    constant = keys[:, :1].expand_as(keys)  # no steps at all
    scores = index.score_tokens(query, index.build(constant), SCALE)
    torch.testing.assert_close(scores, products(query, constant))


def test_exact_is_the_log_of_the_mass(keys, query):
    mass = products(query, keys).double().exp().sum(-1)
    torch.testing.assert_close(scores_of(Exact(), query, keys), mass.log().float())
    far = keys * 1000  # nothing overflows
    assert scores_of(Exact(), query, far).isfinite().all()


def test_low_rank_is_nearly_exact_at_the_full_rank(keys, query):
    """With all directions of the centred keys, only rounding is left. Fewer directions are
    worse."""
    exact = scores_of(Exact(), query, keys)
    errors = [
        (scores_of(LowRank(rank), query, keys) - exact).abs().mean().item()
        for rank in (1, 4, 8, TOKENS - 1)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.05
    assert errors[0] > 3 * errors[-1]
    # Keys of two directions: a third one has nothing to add.
    flat = keys.mean(1, keepdim=True) + torch.randn(ENTRIES, TOKENS, 2) @ keys[:, :2]
    exact = scores_of(Exact(), query, flat)
    one, two, three = ((scores_of(LowRank(r), query, flat) - exact).abs() for r in (1, 2, 3))
    assert two.mean() < one.mean() / 2
    assert three.mean().item() == pytest.approx(two.mean().item(), rel=0.3)
    same = keys[:, :1].expand(-1, TOKENS, -1)  # nothing but their mean
    torch.testing.assert_close(
        scores_of(LowRank(4), query, same), scores_of(Exact(), query, same), rtol=0.02, atol=0.05
    )


@pytest.mark.parametrize(
    ("index", "entry_tokens", "why"),
    [
        (LowRank(8), 16, ""),
        (LowRank(), 16, ""),
        (LowRank(16), 16, "rank=16 must be a whole number from 1 to 15"),
        (LowRank(4), 8, "entries of 8 tokens are too small; use summary_size=16 or more"),
        (LowRank(17), 32, "from 1 to 16"),
        (LowRank(-1), 32, "rank=-1"),
        (index_of({"low_rank": {"rank": 2.5}}), 32, "rank=2.5"),
        (MeanStd(0), 8, ""),
        (MeanStd(-1), 8, "spread=-1 must be from 0 to 16"),
        (MeanStd(float("nan")), 8, "spread=nan"),
        (index_of("min_max"), 8, ""),
    ],
)
def test_what_there_can_be(index, entry_tokens, why):
    assert why in index.check(entry_tokens)
    assert bool(why) == bool(index.check(entry_tokens))


def test_equal_ones_are_one():
    assert index_of({"mean_std": {"spread": 0.5}}) == MeanStd(0.5)
    assert len({index_of("mean_std"), MeanStd(1), MeanStd(0.5), index_of("mean")}) == 3
