"""What Triton's interpreter makes of two kernels, as JSON."""

import json

import torch
import triton
import triton.language as tl


@triton.jit
def _sum(source, target, size: tl.constexpr):
    tl.store(target, tl.sum(tl.load(source + tl.arange(0, size)), 0).to(tl.float32))


@triton.jit
def _cast(source, target, size: tl.constexpr):
    places = tl.arange(0, size)
    cast = tl.load(source + places).to(tl.float8e4nv)
    tl.store(target + places, cast.to(tl.float32))


def main() -> None:
    """Print the sum of four ones in bfloat16, and three values in float8."""
    made, ones = torch.zeros(1), torch.ones(4, dtype=torch.bfloat16)
    _sum[(1,)](ones, made, 4)
    values = torch.tensor([464.0, float("inf"), float("nan"), 1.0])
    cast = torch.zeros(4)
    _cast[(1,)](values, cast, 4)
    print(json.dumps({"sum": made.item(), "float8": cast.tolist()}))


if __name__ == "__main__":
    main()
