"""Products with weights of 8 and 4 bits, against their specification in plain torch."""

import itertools

import pytest
import torch

from tests.spec import quantised as reference
from tests.support.isas import visited
from vllm_kvretrieval.quantization.packing import pack, unpack
from vllm_kvretrieval.quantization.product import multiply, rows_of
from vllm_kvretrieval.quantization.rounding import GROUP_OF_8, rounded

SHAPES = [(1, 1), (7, 40), (33, 96), (49, 290), (130, 576)]
TOKENS = (0, 1, 3, 8, 13, 15, 16, 17, 33, 37, 64)


def weights_of(outputs, inputs, bits, group):
    """Numbers over their whole range, scales of several sizes, offsets where there are groups."""
    low, high = (-128, 128) if bits == 8 else (0, 16)
    groups = 1 if group is None else -(-inputs // group)
    scales = torch.randn(outputs, groups).exp() / 100
    offsets = None if group is None else torch.randn(outputs, groups) * scales * high / 2
    numbers = torch.randint(low, high, (outputs, inputs))
    return numbers, scales, offsets, bits, group or inputs


def check(found, x, packed, bias, tiles):
    """The result is rounded once, and sums of blocks in float32."""
    exact = reference.quantised_linear(x, packed, bias, tiles)
    tokens, weights = reference.factors(x, packed, tiles)
    size = tokens.abs() @ weights.abs().T
    bound = torch.finfo(x.dtype).eps * exact.abs() / 2 * 1.01 + 4e-6 * size + 1e-9
    return found.dtype == x.dtype and bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(
    ("bits", "group", "dtype"),
    [
        *itertools.product((8,), (None, 32, 64, 128), (torch.bfloat16,)),
        *itertools.product((4,), (None, 32, 128, 192), (torch.bfloat16,)),
        *((8, None, dtype) for dtype in (torch.float16, torch.float32)),
        *((4, 32, dtype) for dtype in (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_products(bits, group, dtype):
    """Any shape, any number of tokens, by any instruction set."""
    torch.manual_seed(0)
    for outputs, inputs in SHAPES:
        packed = pack(*weights_of(outputs, inputs, bits, group))
        bias = torch.randn(outputs).to(dtype)
        for tokens, given in itertools.product(TOKENS, (None, bias)):
            x = torch.randn(tokens, inputs).to(dtype)
            for isa in visited():
                tiles = reference.by_tiles(isa, tokens)
                right = check(multiply(x, packed, given), x, packed, given, tiles)
                assert right, (isa, outputs, inputs, tokens)


@pytest.mark.parametrize("bits", [8, 4])
def test_prompts(bits):
    """Tokens that do not fit a near cache together."""
    torch.manual_seed(1)
    outputs, inputs = 40, 4136
    packed = pack(*weights_of(outputs, inputs, bits, 32))
    for tokens in (128, 129, 161, 288):
        x = torch.randn(tokens, inputs).bfloat16()
        for isa in visited():
            if isa != "portable":
                tiles = reference.by_tiles(isa, tokens)
                assert check(multiply(x, packed), x, packed, None, tiles), (isa, tokens)


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 128), (4, 32)], ids=str)
def test_bfloat16_is_nearer_than_8_bits(bits, group):
    """How far results are from those of exact tokens and weights, by AMX and without."""
    torch.manual_seed(2)
    packed = pack(*weights_of(64, 576, bits, group))
    x = torch.randn(40, 576)
    exact = x.double() @ unpack(packed).double().T
    for isa in visited():
        error = (multiply(x, packed).double() - exact).norm() / exact.norm()
        assert error < (0.003 if reference.by_tiles(isa, len(x)) else 0.01), isa


@pytest.mark.parametrize("bits", [8, 4])
def test_extremes(bits):
    """The largest products of a block do not overflow, and blocks of zeros are zero."""
    inputs = 4864
    number = -128 if bits == 8 else 15
    numbers = torch.full((16, inputs), number)
    packed = pack(numbers, torch.ones(16, 1), None, bits, inputs)
    x = torch.ones(5, inputs)
    x[1] = -1
    x[2] = 0
    x[3, ::2] = -1
    x[4, :32] = 3e38
    for isa in visited():
        for times in (1, 4):
            found = multiply(x.repeat(times, 1), packed)[-5:-1, 0]
            assert torch.equal(found, torch.tensor([1.0, -1, 0, 0]) * number * inputs), isa
            assert torch.isfinite(multiply(x[4:].repeat(4 * times, 1) / 1e6, packed)).all(), isa


def test_what_is_no_number_stays_none():
    """A token with an infinite or undefined input has no defined result; others have theirs."""
    packed = rounded(torch.randn(40, 64), 8)
    for tokens, isa in itertools.product((3, 20), visited()):
        x = torch.randn(tokens, 64)
        expected = multiply(x, packed)
        x[0, 5], x[2, 40] = torch.inf, torch.nan
        found = multiply(x, packed)
        assert not torch.isfinite(found[[0, 2]]).any(), isa
        assert torch.equal(found[1], expected[1]), isa


@pytest.mark.parametrize(("bits", "by_outputs"), [(4, False), (8, False), (8, True)], ids=str)
def test_a_token_depends_on_no_other(bits, by_outputs):
    """Bits of a row are the same whatever is beside it, and by any number of threads.

    Where AMX multiplies in bfloat16 they are so among steps of many tokens, and among those of few.
    """
    torch.manual_seed(2)
    packed = rounded(torch.randn(500, 296), bits, by_outputs)
    x = torch.randn(300, 296).bfloat16()
    for isa in visited():
        least = reference.FEWEST_BY_TILES if reference.by_tiles(isa, len(x)) else 1
        together, few = multiply(x, packed), multiply(x[: reference.FEWEST_BY_TILES - 1], packed)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            for row in (0, 5, 255, 256, 300 - least):
                part = slice(row, row + least)
                assert torch.equal(multiply(x[part], packed), together[part]), isa
            for row in range(len(few)):
                assert torch.equal(multiply(x[row : row + 1], packed)[0], few[row]), isa
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(5, 7), (33, 96), (48, 200)], ids=str)
def test_rounding(shape, bits):
    """Weights are off by half a step at most, those of 4 bits where their range is not cut."""
    torch.manual_seed(3)
    weight = torch.randn(shape) * torch.randn(shape[0], 1).exp()
    weight[1] = 0
    weight[2] = 0.5
    found = unpack(rounded(weight.bfloat16(), bits))
    exact = weight.bfloat16().float()
    if bits == 8:
        for by_outputs in (False, True):
            found = unpack(rounded(weight.bfloat16(), bits, by_outputs))
            size = shape[1] if by_outputs else GROUP_OF_8
            for group, own in zip(exact.split(size, 1), found.split(size, 1), strict=True):
                steps = group.abs().amax(1, keepdim=True) / 127
                assert ((own - group).abs() <= steps * 0.501).all()
    else:
        groups = torch.nn.functional.pad(exact, (0, -shape[1] % 32)).unflatten(1, (-1, 32))
        steps = (groups.amax(2) - groups.amin(2)) / 15
        wide = steps.repeat_interleave(32, 1)[:, : shape[1]]
        assert ((found - exact).abs() <= wide * 2.1 + exact.abs() * 1e-3).all()
        assert (found - exact).square().mean() <= (wide.square() / 12).mean() * 1.1
    torch.testing.assert_close(found[1:3], exact[1:3], rtol=1e-3, atol=0)


def test_weights_that_are_no_numbers_are_refused():
    """A checkpoint with infinite weights is broken."""
    with pytest.raises(ValueError, match="cannot be rounded"):
        rounded(torch.tensor([[1.0, torch.inf]]), 8)


def test_scales_of_16_bits_are_kept():
    """Group scales of a checkpoint, in bfloat16 or float16, lose nothing, whatever their size."""
    torch.manual_seed(4)
    for dtype in (torch.bfloat16, torch.float16):
        scales = (torch.rand(20, 3) / 1000 + 1e-4).to(dtype)
        numbers = torch.randint(0, 16, (20, 96))
        packed = pack(numbers, scales, -8 * scales.float(), 4, 32)
        wide = scales.double().repeat_interleave(32, 1)
        assert torch.equal(unpack(packed).double(), wide * (numbers - 8))


def test_rows_serve_as_embeddings():
    """Rows are those of the unpacked weights."""
    weight = torch.randn(50, 200).bfloat16()
    packed = rounded(weight, 8, by_outputs=True)
    ids = torch.tensor([[0, 49], [17, 16]])
    assert torch.equal(rows_of(packed, ids, torch.float32), unpack(packed)[ids])
    for bits in (8, 4):
        with pytest.raises(ValueError, match="8 bits without groups"):
            rows_of(rounded(weight, bits), ids, torch.float32)


def test_what_does_not_fit_is_refused():
    """Shapes are checked before the kernel reads an address."""
    packed, x = rounded(torch.randn(40, 64), 4), torch.randn(2, 64)
    for wrong in (x[:, :32], torch.randn(2, 96), x.double()):
        with pytest.raises(ValueError, match=r"must be|tokens of"):
            multiply(wrong, packed)
    for name in ("weights", "scales", "groups"):
        with pytest.raises(ValueError, match=name):
            multiply(x, packed._replace(**{name: getattr(packed, name)[:1]}))
    for fields in ({"outputs": 400}, {"bits": 8}, {"bits": 3}, {"group": 40}, {"group": 64}):
        with pytest.raises(ValueError, match=r"must be|bits"):
            multiply(x, packed._replace(**fields))
    with pytest.raises(ValueError, match="bias"):
        multiply(x, packed, torch.zeros(39))
    with pytest.raises(ValueError, match="groups of 40"):
        pack(torch.zeros(4, 80), torch.ones(4, 2), None, 4, 40)
    with pytest.raises(ValueError, match="groups of 4 outputs"):
        pack(torch.zeros(4, 64), torch.ones(4, 3), None, 4, 32)


def test_a_compiled_model_takes_any_number_of_tokens():
    """One graph serves them, whatever number it was compiled with."""
    packed = rounded(torch.randn(48, 32), 8)
    compiled = torch.compile(
        lambda x: multiply(x, packed) * 2, fullgraph=True, dynamic=True, backend="eager"
    )
    for tokens in (3, 300, 7):
        x = torch.randn(tokens, 32).bfloat16()
        assert torch.equal(compiled(x), multiply(x, packed) * 2)
