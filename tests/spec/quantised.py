"""The specification of products with quantised weights, in plain torch."""

import torch
from torch.nn import functional

from vllm_kvretrieval.quantization.packing import BLOCK, Packed, unpack


def rounded_tokens(x):
    """Tokens as the kernel takes them: whole numbers in each block, by its largest input."""
    inputs = x.shape[-1]
    blocks = functional.pad(x.float(), (0, -inputs % BLOCK)).unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True)
    largest = torch.full_like(most, 127)  # of a number torch would multiply the reciprocal
    inverse = torch.where(most > 0, largest / most, 0)
    return ((blocks * inverse).round() * (most / 127)).flatten(-2)[..., :inputs]


def quantised_linear(x, packed: Packed, bias=None):
    """``x @ weights.T + bias`` in float64, of rounded tokens."""
    product = rounded_tokens(x).double() @ unpack(packed).double().T
    return product if bias is None else product + bias.double()
