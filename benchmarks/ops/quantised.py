"""Linear layers with weights of 8 and 4 bits: ours and PyTorch's, beside 16 bits.

    python -m benchmarks.ops quantised --tokens 1 4 16 256

All layers of a model's depth, over random weights, so that these come from memory and not from a
cache. Beside them, in bfloat16: vLLM's product (oneDNN; PyTorch where that has none) and our own
for CPUs that are slow in it. VLLM's products of few bits are those of W8A8 and W4A16, PyTorch's
`_weight_int8pack_mm` and, with groups of 32, `_weight_int4pack_mm_for_cpu`. Times are medians of
rounds, which all take in turn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from vllm import _custom_ops as ops

from benchmarks.cli import add_output, add_tokens
from benchmarks.common import Stopwatch
from benchmarks.ops.setup import keep, medians
from vllm_kvretrieval.quantization.product import multiply
from vllm_kvretrieval.quantization.rounding import GROUP, rounded
from vllm_kvretrieval.upstream.linear import linear

MODELS = {
    "smollm2-135m": (30, ((960, 576), (576, 576), (3072, 576), (576, 1536))),
    "qwen2.5-0.5b": (24, ((1152, 896), (896, 896), (9728, 896), (896, 4864))),
}
"""Layers, and outputs and inputs of a layer's products."""
PRIMITIVES = 32
"""Products with different numbers of tokens that vLLM keeps prepared, as in its layers."""

Product = Callable[[torch.Tensor, Any], object]


def _products(weights: Sequence[torch.Tensor]) -> Iterator[tuple[str, Product, list[Any]]]:
    """Names, functions of tokens and a weight, and the weights as each of them takes them."""
    try:
        packed = [ops.create_onednn_mm(weight.t(), PRIMITIVES) for weight in weights]
        yield "vllm_16_ms", lambda x, w: ops.onednn_mm(w, x, None), packed
    except RuntimeError:  # a CPU without products of 16 bits
        yield "vllm_16_ms", functional.linear, [*weights]
    yield "ours_16_ms", linear, [*weights]
    for bits in (8, 4):
        yield f"ours_{bits}_ms", multiply, [rounded(weight, bits) for weight in weights]
    outputs = [torch.ones(len(weight), 1) for weight in weights]
    handlers = [
        ops.create_onednn_scaled_mm(
            weight.to(torch.int8).t(), scales, weight.dtype, True, False, PRIMITIVES
        )
        for weight, scales in zip(weights, outputs, strict=True)
    ]
    yield "vllm_8_ms", _scaled, handlers
    if hasattr(torch.ops._C, "cpu_gemm_wna16"):  # not in the build for AVX2
        words = [torch.randint(1 << 31, (len(w) // 16, 2 * w.shape[1])).int() for w in weights]
        of_groups = [torch.ones(w.shape[1] // GROUP, len(w), dtype=w.dtype) for w in weights]
        wna16 = partial(_wna16, isa="amx" if torch.cpu._is_amx_tile_supported() else "vec")
        yield "vllm_4_ms", wna16, list(zip(words, of_groups, strict=True))
    int8 = torch.ops.aten._weight_int8pack_mm
    whole = [(w.to(torch.int8), torch.ones(len(w), dtype=w.dtype)) for w in weights]
    yield "pytorch_8_ms", lambda x, w: int8(x, *w), whole
    int4 = torch.ops.aten._weight_int4pack_mm_for_cpu
    groups = []
    for weight in weights:
        numbers = torch.randint(16, weight.shape, dtype=torch.int32)
        laid = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 2)
        scales = torch.ones(weight.shape[1] // GROUP, len(weight), 2, dtype=weight.dtype)
        groups.append((laid, scales))
    yield "pytorch_4_ms", lambda x, w: int4(x, w[0], GROUP, w[1]), groups


def _scaled(x: torch.Tensor, handler: Any) -> None:
    """VLLM's product of W8A8."""
    rounded_x, scales, _ = ops.onednn_scaled_int8_quant(x)
    out = x.new_empty(len(x), handler.n)
    ops.onednn_scaled_mm(handler, rounded_x, out, scales, None, None, None)


def _wna16(x: torch.Tensor, weight: Any, isa: str) -> torch.Tensor:
    """VLLM's product of W4A16."""
    return ops.cpu_gemm_wna16(x, *weight, None, None, 8, isa)


def _all(product: Product, weights: Sequence[Any], tokens: Sequence[torch.Tensor]) -> None:
    """All products of a step, one after the other."""
    for number, weight in enumerate(weights):
        product(tokens[number % len(tokens)], weight)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=[*MODELS], help="whose shapes")
    add_tokens(parser, "--tokens", [1, 2, 4, 8, 16, 64, 256, 1024], "tokens of a step")
    add("--rounds", type=int, default=9, metavar="N", help="runs, of which medians are shown")
    add_output(parser, "quantised.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    clock, found = Stopwatch(), []
    torch.manual_seed(0)
    for model in args.models:
        layers, shapes = MODELS[model]
        weights = [torch.randn(shape).bfloat16() for _ in range(layers) for shape in shapes]
        products = list(_products(weights))
        for count in args.tokens:
            tokens = [torch.randn(count, inputs).bfloat16() for _, inputs in shapes]
            runs = [partial(_all, product, own, tokens) for _, product, own in products]
            times = medians(runs, args.rounds, time.perf_counter, warm=1)
            row: dict[str, Any] = {"model": model, "tokens": count}
            names = (name for name, *_ in products)
            row |= {name: round(1e3 * t, 2) for name, t in zip(names, times, strict=True)}
            print(f"[{clock}] {row}", flush=True)
            found.append(row)
    keep(args, found)
    return 0
