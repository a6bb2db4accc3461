"""Products with the weights of linear layers."""

import torch

from vllm_kvretrieval import _cpu
from vllm_kvretrieval.kernels.cpu.binding import DTYPES


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
