"""Linear layers in 16 bits on CPUs without instructions for them: PyTorch's products, and ours.

    python -m benchmarks.ops linear --tokens 1 4 16 32

All layers of a model's depth, over random weights, so that these come from memory and not from a
cache. PyTorch multiplies 16 bits where vLLM has nothing else. Ours are a kernel for few tokens, and
products in float32 of converted weights, for many. The yardstick is vLLM's own product of float32
weights, which take twice the memory. Times are medians of rounds, which all take in turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from vllm import _custom_ops as ops

from benchmarks.cli import add_output, add_tokens
from benchmarks.common import Stopwatch
from benchmarks.ops.setup import DTYPES, keep, medians
from vllm_kvretrieval.upstream.linear import converted, multiply

LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
"""Outputs and inputs of a layer's products, and how many layers: SmolLM2-135M's."""
PRIMITIVES = 32
"""Products with different numbers of tokens that vLLM keeps prepared, as in its layers."""


def _all(
    product: Callable[[torch.Tensor, Any], torch.Tensor],
    weights: Sequence[Sequence[Any]],
    tokens: Sequence[torch.Tensor],
) -> None:
    """All products of a step, one after the other."""
    for layer in weights:
        for weight, x in zip(layer, tokens, strict=True):
            product(x, weight)


def _packed(x: torch.Tensor, weight: Any) -> torch.Tensor:
    return ops.onednn_mm(weight, x, None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add_tokens(parser, "--tokens", [1, 2, 4, 8, 16, 32, 48, 64], "tokens of a step")
    add(
        "--dtypes",
        nargs="+",
        choices=("bfloat16", "float16"),
        default=["bfloat16", "float16"],
        help="elements of tokens and weights",
    )
    add("--rounds", type=int, default=9, metavar="N", help="runs, of which medians are shown")
    add_output(parser, "linear.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    clock, found = Stopwatch(), []
    torch.manual_seed(0)
    wide = [[torch.randn(shape) for shape in SHAPES] for _ in range(LAYERS)]
    packed = [[ops.create_onednn_mm(weight.t(), PRIMITIVES) for weight in layer] for layer in wide]
    for dtype in args.dtypes:
        weights = [[weight.to(DTYPES[dtype]) for weight in layer] for layer in wide]
        for count in args.tokens:
            floats = [torch.randn(count, inputs) for _, inputs in SHAPES]
            tokens = [x.to(DTYPES[dtype]) for x in floats]
            runs = [
                partial(_all, product, weights, tokens)
                for product in (functional.linear, multiply, converted)
            ]
            runs.append(partial(_all, _packed, packed, floats))
            times = medians(runs, args.rounds, time.perf_counter, warm=1)
            names = ("pytorch_ms", "kernel_ms", "converted_ms", "float32_ms")
            row: dict[str, Any] = {"dtype": dtype, "tokens": count}
            row |= {name: round(1e3 * t, 2) for name, t in zip(names, times, strict=True)}
            print(f"[{clock}] {row}", flush=True)
            found.append(row)
    keep(args, found)
    return 0
