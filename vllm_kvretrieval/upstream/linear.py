"""Linear layers in 16 bits on CPUs that have no instructions for them: products in float32.

vLLM multiplies by oneDNN, which refuses 16 bits on a CPU with AVX2 only, and then by PyTorch, which
is slow there. A kernel of our own multiplies few tokens. For many, the weights are converted, and
PyTorch multiplies in float32. Both round a sum once, at the end.
"""

import torch
from torch.nn import functional
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_kvretrieval import _cpu
from vllm_kvretrieval.kernels.cpu.binding import DTYPES
from vllm_kvretrieval.upstream.defaults import slow_bfloat16

MANY = 48
"""Tokens from which on the conversion of weights pays."""
AT_ONCE = 1 << 22
"""Elements of weights that are converted at a time, so that they take little memory."""

NARROW = (torch.bfloat16, torch.float16)

_library = torch.library.Library("kv_retrieval", "FRAGMENT")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, with products and sums in float32.

    Args:
        x: [..., inputs], of 16 bits.
        weight: [outputs, inputs], contiguous.
        bias: [outputs].

    Returns:
        [..., outputs], in the type of ``x``.
    """
    few = x.numel() < MANY * weight.shape[1]
    return (multiply if few else converted)(x, weight, bias)


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias`` for few tokens, in the time that it takes to read the weights.

    Products and sums are in float32. The result for a token does not depend on the others.
    ``torch.nn.functional.linear`` in float32 is the reference.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs], contiguous.
        bias: [outputs], contiguous.

    Returns:
        [..., outputs].

    Raises:
        ValueError: Shapes or types do not fit each other, or weights are not contiguous.
    """
    outputs, inputs = weight.shape
    if x.shape[-1] != inputs or (bias is not None and bias.shape != (outputs,)):
        raise ValueError(
            f"weights {tuple(weight.shape)} fit neither {tuple(x.shape)} nor a bias "
            f"{None if bias is None else tuple(bias.shape)}"
        )
    given = [weight] if bias is None else [weight, bias]
    if x.dtype not in DTYPES or any(t.dtype != x.dtype or not t.is_contiguous() for t in given):
        raise ValueError(
            f"weights and bias must be contiguous and {x.dtype}, one of {list(DTYPES)}; got "
            + ", ".join(f"{t.dtype} with strides {t.stride()}" for t in given)
        )
    tokens = x.contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    _cpu.multiply(
        x=tokens.data_ptr(),
        weights=weight.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        tokens=tokens.numel() // inputs,
        inputs=inputs,
        outputs=outputs,
        dtype=DTYPES[x.dtype],
    )
    return out


def converted(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See :func:`linear`; by PyTorch, which multiplies weights that are converted in parts."""
    outputs, inputs = weight.shape
    result = x.new_empty(*x.shape[:-1], outputs)
    wide = x.float()
    rows = max(AT_ONCE // inputs, 1)
    for first in range(0, outputs, rows):
        part = slice(first, first + rows)
        own = None if bias is None else bias[part].float()
        result[..., part] = functional.linear(wide, weight[part].float(), own)
    return result


def _shape_of(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """An empty result of :func:`linear`, of which the compiler takes shape and dtype."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


# An op of its own: what is compiled is one graph for any number of tokens.
direct_register_custom_op(
    "linear", linear, fake_impl=_shape_of, target_lib=_library, dispatch_key="CPU"
)


def widen_linear_layers(model: torch.nn.Module) -> int:
    """Let a model's linear layers use :func:`linear` where vLLM left them to PyTorch.

    Args:
        model: The model as vLLM has loaded it.

    Returns:
        How many do.
    """
    if not slow_bfloat16():
        return 0
    found = 0
    for module in model.modules():
        chosen, weight = getattr(module, "cpu_linear", None), getattr(module, "weight", None)
        # vLLM's faster products are closures over what they have packed; its last resort is none.
        if chosen is None or getattr(chosen, "__closure__", None) is not None:
            continue
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            continue
        if weight.dtype in NARROW and weight.is_contiguous():
            module.cpu_linear = torch.ops.kv_retrieval.linear
            found += 1
    return found
