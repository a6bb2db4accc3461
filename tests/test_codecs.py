"""Codecs: their error bounds, and the compiled ones against their specification, byte by byte."""

import pytest
import torch

from vllm_kvretrieval.kernels import cpu, reference
from vllm_kvretrieval.retrieval.codec import CODECS

pytestmark = pytest.mark.threads

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((16, 32), (32, 64), (32, 80), (64, 112), (128, 256), (256, 64))
SHIPPED = [CODECS[name] for name in ("raw", "k8v4", "k4v4", "k2v2")]  # tests may have added theirs
QUANTISED = SHIPPED[1:]
by_name = pytest.mark.parametrize("codec", SHIPPED, ids=lambda codec: codec.name)
quantised = pytest.mark.parametrize("codec", QUANTISED, ids=lambda codec: codec.name)


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
                largest = ((found.float() - x.float()).abs() / bound).amax()
                assert largest > 0.9
        assert codec.decode(codec.encode(*returned), *shape, dtype)[1][2, 6].eq(0).all()


@quantised
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_is_never_made_one(codec, dtype):
    """A channel of a page, or a token's value, that has one is NaN; the others are as they were."""
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
    for x, expected, lost in zip(found, clean, gone, strict=True):
        assert x.isnan().equal(lost)
        assert x[~lost].equal(expected[~lost])
    assert codec.error_bounds(keys, values)[0].isnan().equal(gone[0])
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
    """Where the lowest numbers are zeros of both signs, in any order."""
    keys, values = tokens(16, 16, dtype)
    keys[0] = 0.0
    keys[0].fill_diagonal_(-0.0)
    keys[1] = -0.0
    keys[1].fill_diagonal_(0.0)
    keys[:2, 1, 2:] = 3.0
    values[:2] = keys[:2]
    units = units_of(keys, values)
    data = reference.encode_units(units, codec)
    assert cpu.encode_units(units, codec).equal(data)
    assert reference.encode_units(units + 0.0, codec).equal(data)


def test_sizes():
    """Bytes per token of a KV head of 64 channels in bfloat16, which raw takes 256 of."""
    sizes = [codec.bytes_per_token(32, 64, torch.bfloat16) for codec in SHIPPED]
    assert sizes == [256, 102, 74, 42]


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
