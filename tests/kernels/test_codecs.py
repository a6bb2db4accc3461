"""Codecs: their error bounds, and the compiled ones against their specification, byte by byte."""

import pytest
import torch

from tests.spec import ops as reference
from vllm_kvretrieval import _cpu
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.retrieval.codec import CODECS
from vllm_kvretrieval.retrieval.codec.sparse import find_outliers, outlier_count

pytestmark = pytest.mark.threads

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((16, 32), (32, 64), (32, 80), (64, 112), (128, 256), (256, 64))
NAMES = ("raw", "k8v4", "k4v4", "k2v2", "k4v4_sparse", "k2v2_sparse")
SHIPPED = [CODECS[name] for name in NAMES]  # tests may have added theirs
QUANTISED, SPARSE = SHIPPED[1:], SHIPPED[4:]
by_name = pytest.mark.parametrize("codec", SHIPPED, ids=lambda codec: codec.name)
quantised = pytest.mark.parametrize("codec", QUANTISED, ids=lambda codec: codec.name)
sparse = pytest.mark.parametrize("codec", SPARSE, ids=lambda codec: codec.name)


def tokens(page_size, head_size, dtype, count=5):
    """Keys whose channels lie somewhere, as those of models do, and values around zero."""
    keys = torch.randn(count, page_size, head_size) * torch.randn(count, 1, head_size).exp()
    keys += 4 * torch.randn(count, 1, head_size)
    keys[1, :, 3], keys[1, :, 5] = 0.0, 7.0
    values = torch.randn(count, page_size, head_size)
    values[2, 4] = values[2, 4].abs() + 1
    values[2, 5] = -values[2, 4]
    values[2, 6] = 0.0
    return keys.to(dtype), values.to(dtype)


def units_of(keys, values):
    """[n, 2 * page_size, head_size] as vLLM lays them out."""
    parts = keys.transpose(1, 2).flatten(1), values.flatten(1)
    return torch.cat(parts, 1).view(len(keys), -1, keys.shape[2])


@by_name
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_comes_back_is_within_bounds(codec, dtype):
    torch.manual_seed(0)
    for shape in SHAPES:
        given = tokens(*shape, dtype)
        data = codec.encode(*given)
        assert data.shape == (5, codec.unit_bytes(*shape, dtype))
        returned = codec.decode(data, *shape, dtype)
        bounds = codec.error_bounds(*given)
        for x, found, bound in zip(given, returned, bounds, strict=True):
            assert found.dtype == dtype
            rounding = found.float().abs() * torch.finfo(dtype).eps
            assert ((found.float() - x.float()).abs() <= bound + rounding).all()
            if codec.name != "raw":
                # and not far within: a bound that says nothing would hold, too
                largest = ((found.float() - x.float()).abs() / bound)[bound > 0].amax()
                assert largest > 0.9
        assert codec.decode(codec.encode(*returned), *shape, dtype)[1][2, 6].eq(0).all()


@quantised
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_is_never_made_one(codec, dtype):
    """A channel of a page, or a token's value, that has one is NaN; the others are as they were,
    but for outliers, which are other ones then."""
    torch.manual_seed(1)
    keys, values = tokens(32, 64, dtype)
    clean = codec.decode(codec.encode(keys, values), 32, 64, dtype)
    keys[0, 3, 7], keys[1, 4, 8], values[2, 5, 9] = torch.inf, torch.nan, -torch.inf
    if dtype != torch.float16:
        values[3, 6, 10] = 2.0**121
    found = codec.decode(codec.encode(keys, values), 32, 64, dtype)
    gone = [torch.zeros(5, 32, 64, dtype=torch.bool) for _ in range(2)]
    gone[0][0, :, 7] = gone[0][1, :, 8] = gone[1][2, 5] = True
    gone[1][3, 6] = dtype != torch.float16
    bounds = codec.error_bounds(keys, values)
    for x, expected, lost, given, bound in zip(
        found, clean, gone, (keys, values), bounds, strict=True
    ):
        assert x.isnan().equal(lost)
        assert bound.isnan().equal(lost)
        if codec in SPARSE:
            rounding = x.float().abs() * torch.finfo(dtype).eps
            within = (x.float() - given.float()).abs() <= bound + rounding
            assert within.equal(~lost)
        else:
            assert x[~lost].equal(expected[~lost])
    # Extremes that are numbers: the largest that are taken, and some that nothing is left of.
    for size in (2.0**120, 1e-38) if dtype != torch.float16 else (65504.0, 6e-8):
        x = torch.rand(1, 32, 64).mul(size).to(dtype)
        x[0, :, 0] = -x[0, :, 0]
        back = codec.decode(codec.encode(x, x), 32, 64, dtype)
        for y, bound in zip(back, codec.error_bounds(x, x), strict=True):
            eps = torch.finfo(dtype).eps * y.float().abs() + torch.finfo(dtype).smallest_normal
            assert ((y.float() - x.float()).abs() <= bound + eps).all()


@by_name
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_equal_reference(isa, codec, dtype):
    torch.manual_seed(2)
    for shape in SHAPES:
        keys, values = tokens(*shape, dtype)
        keys[3, 1, 2] = torch.nan
        values[4, 2, 1] = torch.inf
        units = units_of(keys, values)
        data = reference.encode_units(units, codec)
        assert cpu.encode_units(units, codec).equal(data)
        expected, found = torch.empty_like(units), torch.empty_like(units)
        reference.decode_units(data, codec, expected)
        cpu.decode_units(data, codec, found)
        assert found.isnan().equal(expected.isnan())
        assert found.nan_to_num().equal(expected.nan_to_num())


@quantised
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_have_no_sign(isa, codec, dtype):
    """Where the lowest numbers are zeros of both signs, in any order, or one at an end is."""
    keys, values = tokens(16, 16, dtype)
    keys[0] = 0.0
    keys[0].fill_diagonal_(-0.0)
    keys[1] = -0.0
    keys[1].fill_diagonal_(0.0)
    keys[:2, 1, 2:] = 3.0
    keys[2], keys[3] = 3.0, -3.0
    keys[2].fill_diagonal_(-0.0)
    keys[3].fill_diagonal_(-0.0)
    values[:4] = keys[:4]
    units = units_of(keys, values)
    data = reference.encode_units(units, codec)
    assert cpu.encode_units(units, codec).equal(data)
    assert reference.encode_units(units + 0.0, codec).equal(data)


def test_sizes():
    """Bytes per token of a KV head of 64 channels in bfloat16, which raw takes 256 of."""
    sizes = [codec.bytes_per_token(32, 64, torch.bfloat16) for codec in SHIPPED]
    assert sizes == [256, 102, 74, 42, 82, 50]


@by_name
def test_units_that_do_not_fit_are_refused(codec):
    good = torch.randn(3, 64, 64)
    data = cpu.encode_units(good, codec)
    for units, why in [
        (torch.randn(3, 63, 64), "units must be"),
        (torch.randn(3, 64, 64).double(), "units must be"),
        (torch.randn(3, 64, 64)[:, :, ::2], "contiguous"),
        (torch.randn(3, 24, 64), "cannot take 3 units of 12 tokens"),
        (torch.randn(3, 64, 24), "units of 32 tokens of 24 channels"),
        (torch.randn(1, 2048, 16), "multiples of 16 up to 512"),
        (torch.randn(0, 0, 16), "cannot take 0 units of 0 tokens"),
    ]:
        with pytest.raises(ValueError, match=why):
            cpu.encode_units(units, codec)
    for wrong in (data[:2], data[:, :-1], data[:, :-1].contiguous(), data.to(torch.int8)):
        with pytest.raises(ValueError, match="data must be"):
            cpu.decode_units(wrong, codec, good)


# ------------------------------------------------------------------------------------ outliers


def outliers_one_by_one(rows):
    """Positions and elements of the outliers of a unit of rows, as the specification says it."""
    worth = []
    for r, row in enumerate(rows.tolist()):
        known = all(abs(x) <= 2.0**120 for x in row)
        order = sorted(range(len(row)), key=row.__getitem__)
        for end, (place, after) in enumerate((order[:2], (row.index(max(row)), order[-2]))):
            if known:
                gap = torch.tensor(row[place]) - torch.tensor(row[after])
                worth.append((-float(gap.abs()), r, end, place, row[place]))
            else:
                worth.append((0.0, r, end, 0, torch.nan))
    best = sorted(worth, key=lambda offer: offer[:3])[: outlier_count(*rows.shape)]
    best.sort(key=lambda offer: offer[1:3])
    return [r * rows.shape[1] + place for _, r, _, place, _ in best], [x[-1] for x in best]


@pytest.mark.parametrize("shape", [(16, 16), (64, 32), (32, 64), (80, 256)], ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["ties", "no ties"])
def test_outliers_are_those_of_most_worth(shape, wide):
    torch.manual_seed(3)
    rows = torch.randn(6, *shape) * 3 if wide else torch.randint(-3, 4, (6, *shape)).float()
    rows[1, 2, 3], rows[1, 4, 5], rows[1, 6, 7] = torch.nan, torch.inf, -(2.0**121)
    rows[2], rows[3] = torch.nan, 1.0
    rows[4, 1:] = -torch.inf
    found = find_outliers(rows)
    for unit, positions, elements in zip(rows, found.positions, found.elements, strict=True):
        expected = outliers_one_by_one(unit)
        assert positions.tolist() == expected[0]
        assert elements.equal(torch.tensor(expected[1])) or elements.isnan().any()
        assert elements.nan_to_num(9).equal(torch.tensor(expected[1]).nan_to_num(9))
    # What is left has a range that is smaller by the worth of what was taken.
    taken = torch.zeros(6, shape[0] * shape[1]).scatter(1, found.positions, 1).view_as(rows) > 0
    kept = rows.masked_fill(taken, torch.nan)
    for unit in (0, 5):
        for row, rest in zip(kept[unit], found.rest[unit], strict=True):
            left = row[~row.isnan()]
            assert (rest.amin(), rest.amax()) == (left.amin(), left.amax())


@sparse
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outliers_come_back_as_they_were(isa, codec, dtype):
    """And the other elements of their rows as if they had never been there."""
    torch.manual_seed(4)
    dense = CODECS[codec.name.removesuffix("_sparse")]
    for page_size, head_size in SHAPES:
        # Ends that there are several of are worth nothing.
        plain = []
        for shape in ((head_size, page_size), (page_size, head_size)):
            rows = torch.randint(-3, 4, shape).to(dtype)
            rows[:, :3], rows[:, 3:6], rows[:, 6] = -3, 3, 0
            plain.append(rows)
        given = [rows.clone() for rows in plain]
        for rows in given:
            for r in range(outlier_count(*rows.shape) // 2):
                rows[r, 7 + r % 9] = 40.0 + r if r % 2 else -77.7
        units = torch.cat([rows.flatten() for rows in given]).view(1, -1, head_size)
        data, back = cpu.encode_units(units, codec), torch.empty_like(units)
        assert data.equal(reference.encode_units(units, codec))
        cpu.decode_units(data, codec, back)
        data = dense.encode(plain[0].T[None], plain[1][None])
        keys, values = dense.decode(data, page_size, head_size, dtype)
        found = back.flatten().chunk(2)
        for x, rows, before, without in zip(
            found, given, plain, (keys[0].T, values[0]), strict=True
        ):
            x = x.view_as(rows)
            outliers = rows != before
            assert int(outliers.sum()) == outlier_count(*rows.shape) // 2
            assert x[outliers].equal(rows[outliers])
            # The places that are left in the list go to elements that are worth nothing.
            assert ((x == without) | (x == rows))[~outliers].all()
            assert (x != rows).any()


@sparse
def test_as_many_elements_as_positions(isa, codec):
    """The last of 65,536 is an outlier, too."""
    torch.manual_seed(6)
    keys, values = tokens(256, 256, torch.bfloat16, count=3)
    keys[:, -1, -1], values[:, -1, -1], keys[2, 0, 0] = 100.0, -100.0, torch.nan
    units = units_of(keys, values)
    data = reference.encode_units(units, codec)
    assert cpu.encode_units(units, codec).equal(data)
    back = torch.empty_like(units)
    cpu.decode_units(data, codec, back)
    for x in back.flatten(1).chunk(2, dim=1):
        assert x[:, -1].abs().eq(100).all()


@sparse
def test_wrong_positions_write_nowhere_else(isa, codec):
    """The file may hold anything: what is beside the unit stays, and what is in it is decoded."""
    torch.manual_seed(5)
    for page_size, head_size in ((16, 16), (32, 64), (16, 80)):
        units = units_of(*tokens(page_size, head_size, torch.float32))
        data = cpu.encode_units(units, codec)
        counts = [outlier_count(head_size, page_size), outlier_count(page_size, head_size)]
        begins = [data.shape[1] - 6 * sum(counts), data.shape[1] - 6 * counts[1]]
        for begin, count in zip(begins, counts, strict=True):
            places = torch.randint(page_size * head_size, 1 << 16, (5, count))
            places[0] = page_size * head_size
            places[1] = (1 << 16) - 1
            data[:, begin : begin + 2 * count : 2] = (places & 255).to(torch.uint8)
            data[:, begin + 1 : begin + 2 * count : 2] = (places >> 8).to(torch.uint8)
        around = torch.full((7, *units.shape[1:]), 123.0)
        cpu.decode_units(data, codec, around[1:6])
        assert around[[0, 6]].eq(123).all()
        expected = torch.empty_like(units)
        reference.decode_units(data, codec, expected)
        assert around[1:6].equal(expected)
        dense = torch.empty_like(units)
        plain = CODECS[codec.name.removesuffix("_sparse")]
        size = plain.unit_bytes(page_size, head_size, torch.float32)
        cpu.decode_units(data[:, :size].contiguous(), plain, dense)
        assert dense.equal(expected)


@sparse
def test_units_without_positions_are_refused(codec):
    """16 bits number 65,536 elements, all of which occur."""
    with pytest.raises(RetrievalConfigError, match=r"up to 65536 elements, not of 256 .* of 272"):
        cpu.encode_units(torch.randn(1, 512, 272), codec)
    shape = 256, 272, 0, 0, 0, True
    with pytest.raises(ValueError, match="outliers have no position in units of 256 tokens of 272"):
        _cpu.code_units(cpu.CODINGS[codec.name], 0, *shape)
