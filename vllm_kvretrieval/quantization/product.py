"""Products with quantised weights, as an op that torch.compile takes."""

import torch
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_kvretrieval import _cpu
from vllm_kvretrieval.kernels.cpu.binding import DTYPES
from vllm_kvretrieval.quantization.packing import BITS, BLOCK, PANEL, QUAD, Packed

_library = torch.library.Library("kv_retrieval", "FRAGMENT")


def multiply(x: torch.Tensor, packed: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weights.T + bias``, by :func:`quantised_linear` as an op."""
    weights, scales, groups, outputs, _, bits, group = packed
    return torch.ops.kv_retrieval.quantised_linear(
        x, weights, scales, groups, bias, outputs, bits, group
    )


def rows_of(packed: Packed, outputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights of single outputs, for embeddings, by :func:`quantised_rows` as an op."""
    if packed.bits != 8 or packed.groups is not None:
        raise ValueError("rows are taken from weights of 8 bits without groups")
    return torch.ops.kv_retrieval.quantised_rows(
        packed.weights, packed.scales, outputs, packed.inputs, dtype
    )


def quantised_linear(
    x: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
    bits: int,
    group: int,
) -> torch.Tensor:
    """``x @ weights.T + bias``; tokens are rounded to 8 bits, blocks of inputs by their largest.

    With AMX many tokens (csrc/cpu/amx/quantised.cpp says how many) and their weights are rounded to
    bfloat16 instead. Beyond that choice the result for a token does not depend on the others.
    ``tests/spec/quantised.py`` is the reference. Bytes moved: the weights once for every 256
    tokens, or with AMX for as many as 1 MiB holds, and for 128 at least.

    Args:
        x: [..., inputs].
        weights: See :class:`~vllm_kvretrieval.quantization.packing.Packed`, as the rest.
        bias: [outputs], in the type of ``x``.

    Returns:
        [..., outputs], in the type of ``x``. Tokens that are not finite have results that are
        none.

    Raises:
        ValueError: Shapes or types do not fit each other.
    """
    inputs = x.shape[-1]
    blocks, panels = -(-inputs // BLOCK), -(-outputs // PANEL)
    if bits not in BITS or group <= 0 or group % BLOCK or x.dtype not in DTYPES:
        raise ValueError(f"weights of {bits} bits in groups of {group}, and tokens of {x.dtype}")
    expected = {
        "weights": (
            weights,
            torch.uint8,
            (panels, blocks * BLOCK * bits // 8 // QUAD, PANEL, QUAD),
        ),
        "scales": (scales, torch.float32, (panels * PANEL,)),
        "groups": (groups, torch.float16, (panels, -(-inputs // group), 2, PANEL)),
        "bias": (bias, x.dtype, (outputs,)),
    }
    for name, (tensor, dtype, shape) in expected.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be {dtype} {shape} and contiguous for tokens {tuple(x.shape)} and "
                f"{outputs} outputs; got {tensor.dtype} {tuple(tensor.shape)}"
            )
    tokens = x.contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    _cpu.multiply_quantised(
        x=tokens.data_ptr(),
        weights=weights.data_ptr(),
        scales=scales.data_ptr(),
        groups=0 if groups is None else groups.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        tokens=tokens.numel() // inputs,
        inputs=inputs,
        outputs=outputs,
        bits=bits,
        group=group,
        dtype=DTYPES[x.dtype],
    )
    return out


def _shape_of(
    x: torch.Tensor,
    weights: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor | None,
    bias: torch.Tensor | None,
    outputs: int,
    bits: int,
    group: int,
) -> torch.Tensor:
    """An empty result of :func:`quantised_linear`, of which the compiler takes shape and dtype."""
    return x.new_empty(*x.shape[:-1], outputs)


direct_register_custom_op(
    "quantised_linear",
    quantised_linear,
    fake_impl=_shape_of,
    target_lib=_library,
    dispatch_key="CPU",
)


def quantised_rows(
    weights: torch.Tensor,
    scales: torch.Tensor,
    outputs: torch.Tensor,
    inputs: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Weights of single outputs, of 8 bits without groups.

    It is an op for the compiler's sake, which otherwise takes it into the kernels of the layers
    that read the result, and computes it in each, one number at a time.

    Args:
        weights: See :class:`~vllm_kvretrieval.quantization.packing.Packed`, as the scales.
        outputs: int64, any shape; those whose weights are wanted.
        inputs: Weights of each.
        dtype: Of the result.

    Returns:
        [*outputs.shape, inputs].
    """
    numbers = weights.view(torch.int8)[outputs // PANEL, :, outputs % PANEL]
    values = numbers.flatten(-2)[..., :inputs].float()
    return (values * scales[outputs].unsqueeze(-1)).to(dtype)


def _shape_of_rows(
    weights: torch.Tensor,
    scales: torch.Tensor,
    outputs: torch.Tensor,
    inputs: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """An empty result of :func:`quantised_rows`, of which the compiler takes shape and dtype."""
    return scales.new_empty(*outputs.shape, inputs, dtype=dtype)


direct_register_custom_op(
    "quantised_rows",
    quantised_rows,
    fake_impl=_shape_of_rows,
    target_lib=_library,
    dispatch_key="CPU",
)
