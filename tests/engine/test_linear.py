"""Linear layers in 16 bits on CPUs without instructions for it, against float64."""

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.utils import cpu_unquantized_gemm, dispatch_cpu_unquantized_gemm

from tests.support.isas import visited
from vllm_kvretrieval.upstream import linear
from vllm_kvretrieval.upstream.linear import AT_ONCE, MANY, multiply, widen_linear_layers


class Layer(torch.nn.Module):
    """The attributes of a layer that vLLM's products read."""

    def __init__(self, outputs, inputs, dtype, bias):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs).to(dtype), False)
        self.bias = torch.nn.Parameter(torch.randn(outputs).to(dtype), False) if bias else None


@pytest.fixture
def avx2(monkeypatch):
    """A CPU with AVX2 only, where oneDNN has no products of 16 bits."""

    def refuse(*_):
        raise RuntimeError("could not create a primitive descriptor for the matmul primitive")

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(ops, "create_onednn_mm", refuse)
    monkeypatch.setattr(linear, "slow_bfloat16", lambda: True)


def loaded(*shape, head=False):
    """A linear layer as vLLM loads it, or the head of a language model, which keeps its weight."""
    layer = Layer(*shape)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=not head)
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(1, MANY - 1), (MANY,), (2, 3, 40)], ids=str)
def test_products(avx2, monkeypatch, shape, bias, dtype):
    """Products of many tokens are PyTorch's in float32, those of few our kernel's."""
    plain, multiplied = torch.nn.functional.linear, []

    def multiply(x, weight, bias):
        multiplied.append(x.dtype)
        return plain(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", multiply)
    torch.manual_seed(0)
    layer = loaded(96, 200, dtype, bias)
    assert widen_linear_layers(torch.nn.Sequential(layer, torch.nn.ReLU())) == 1
    x = torch.randn(*shape, 200).to(dtype)
    found = cpu_unquantized_gemm(layer, x, layer.weight, layer.bias)
    exact = x.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0)
    assert found.dtype == dtype
    assert found.shape == exact.shape
    assert multiplied == ([torch.float32] if x.numel() >= MANY * 200 else [])
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-3)


def test_halves_are_rounded_once():
    """Numbers half-way between two float16, and the floats beside them: also subnormal ones."""
    number = torch.arange(0x7BFF, dtype=torch.int16).view(torch.float16).double()
    exponent = number.log2().floor()
    middle = 2.0 ** (exponent.clamp(min=-14) - 11)
    beside = 2.0 ** (exponent.clamp(min=-15) - 23)
    weight = torch.tensor([[1, 2.0**-10, 2.0**-20]]).half()
    for side in (-1, 0, 1):
        x = torch.stack([number, middle * 2.0**10, side * beside * 2.0**20], 1).half()
        exact = x.double() @ weight.double().T
        assert exact.float().double().equal(exact)
        expected = exact.float().numpy().astype(np.float16)
        for isa in visited():
            assert (multiply(x, weight, None).numpy() == expected).all(), isa


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_multiply(dtype):
    """The kernel rounds the exact products once, by any instruction set, whatever the shape."""
    torch.manual_seed(1)
    for isa in visited():
        for outputs, inputs in [(1, 1), (7, 40), (33, 77), (200, 576)]:
            weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
            for tokens in (0, 1, 2, 3, 4, 5, 11):
                x = torch.randn(tokens, inputs).to(dtype)
                for given in (None, bias):
                    exact = x.double() @ weight.double().T
                    exact += 0 if given is None else given.double()
                    found = multiply(x, weight, given).double()
                    step = torch.finfo(dtype).eps * exact.abs() / 2
                    assert ((found - exact).abs() <= step * 1.01 + inputs * 2e-6).all(), isa


def test_multiply_of_a_token_depends_on_no_other():
    """Bits of a row are the same alone, in a batch, and by any number of threads."""
    torch.manual_seed(2)
    weight, x = torch.randn(500, 96).bfloat16(), torch.randn(7, 96).bfloat16()
    together, threads = multiply(x, weight), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for row in range(7):
            assert torch.equal(multiply(x[row : row + 1], weight)[0], together[row])
    finally:
        torch.set_num_threads(threads)


def test_multiply_takes_tokens_that_lie_apart():
    """Tokens may be a part of wider rows; weights may not."""
    x, weight = torch.randn(3, 128).bfloat16(), torch.randn(64, 64).bfloat16()
    assert torch.equal(multiply(x[:, :64], weight), multiply(x[:, :64].clone(), weight))
    with pytest.raises(ValueError, match="contiguous"):
        multiply(x[:, :64], weight.T)
    with pytest.raises(ValueError, match="contiguous"):
        multiply(x[:, :64].float(), weight)
    with pytest.raises(ValueError, match="fit neither"):
        multiply(x, weight)
    with pytest.raises(ValueError, match="fit neither"):
        multiply(x[:, :64], weight, torch.zeros(1).bfloat16())


def test_weights_are_converted_in_parts(avx2, monkeypatch):
    """Weights with many outputs are converted in parts, of which the last one is shorter."""
    monkeypatch.setattr(linear, "AT_ONCE", 64 * 50)
    layer, x = loaded(170, 64, torch.bfloat16, True), torch.randn(MANY + 8, 64).bfloat16()
    expected = torch.nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())
    found = linear.linear(x, layer.weight, layer.bias)
    assert torch.equal(found, expected.bfloat16())
    assert AT_ONCE > 1 << 20


def test_what_is_fast_stays(avx2, monkeypatch):
    """Products that vLLM has packed weights for, float32, and CPUs that multiply 16 bits."""
    monkeypatch.setattr(linear, "slow_bfloat16", lambda: False)
    assert widen_linear_layers(loaded(32, 32, torch.bfloat16, False)) == 0
    monkeypatch.setattr(linear, "slow_bfloat16", lambda: True)
    assert widen_linear_layers(loaded(32, 32, torch.float32, False)) == 0
    monkeypatch.setattr(ops, "create_onednn_mm", lambda *_: object())
    for head in (False, True):
        assert widen_linear_layers(loaded(32, 32, torch.bfloat16, False, head=head)) == 0


def test_a_compiled_model_takes_any_number_of_tokens(avx2):
    """One graph serves them, whatever number it was compiled with."""
    layer = loaded(48, 32, torch.bfloat16, False)
    widen_linear_layers(layer)
    compiled = torch.compile(
        lambda x: cpu_unquantized_gemm(layer, x, layer.weight, None) * 2,
        fullgraph=True,
        dynamic=True,
        backend="eager",
    )
    for tokens in (3, 300, 7):
        x = torch.randn(tokens, 32).bfloat16()
        assert torch.equal(compiled(x), linear.linear(x, layer.weight) * 2)
