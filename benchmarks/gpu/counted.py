"""The launches of a retrieval layer's decode step, counted as the engine's own classes make them.

Nothing runs: tensors are on no device, and Triton's launches are noted instead of made. So the
sizes are those of a GPU, and it takes milliseconds. It needs vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from triton.runtime import JITFunction

from vllm_kvretrieval.attention.cuda import refusals
from vllm_kvretrieval.attention.cuda.impl import RetrievalAttentionImpl
from vllm_kvretrieval.attention.cuda.metadata import RetrievalMetadata
from vllm_kvretrieval.engine.cuda import layers
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import triton as kernels
from vllm_kvretrieval.kernels.device import DeviceRequests, DeviceRows
from vllm_kvretrieval.methods.kept_prompts import LocalHeads, kept_prompts
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.capacity import Capacity
from vllm_kvretrieval.retrieval.presets import preset_names

DTYPE = torch.bfloat16
NOWHERE = torch.device("meta")
HOMES = "device", "host"
DENSE_HALF = "dense half"
"""vLLM's attention over whole contexts, which is two launches: see ``predict``."""
LAYER = "model.layers.9.self_attn.attn"
BUDGETS = 2
"""Slots of a KV head, in budgets."""


@dataclass(frozen=True)
class Attention:
    """The attention of a model's layer, by default Llama-3.1-8B's."""

    kv_heads: int = 8
    group: int = 4
    head_size: int = 128


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        kernel: Its name.
        grid: Programs.
        values: What it is given by name, constants of the kernel and ``num_warps``.
        side: Whether it is beside the model.
    """

    kernel: str
    grid: tuple[int, ...]
    values: dict[str, Any] = field(repr=False)
    side: bool = False


def served(method: str, home: str, budget: int = 2048) -> RetrievalConfig | None:
    """Options of an engine with a preset on a GPU; None: it is refused there, or its steps are no
    graphs, which are those that bring whole contexts to the device."""
    try:
        config = RetrievalConfig(method=method, home=home, budget=budget)
        refusals.check_options(config)
        refusals.check_home(config, sleeps=False)
        refusals.check_methods(config)
    except RetrievalConfigError:
        return None
    return None if config.own.whole and config.home == "host" else config


def presets() -> Iterator[tuple[str, str, RetrievalConfig]]:
    """What GPUs serve: presets, their homes, and options."""
    for name in preset_names():
        for home in HOMES:
            if (config := served(name, home)) is not None:
                yield name, home, config


class _Noted:
    """Launches so far; work is submitted to it as to a side stream."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._side = False

    def submit(self, work: Callable[[], object]) -> None:
        self._side = True
        try:
            work()
        finally:
            self._side = False

    def wait(self) -> None:
        """Nothing is left to do."""

    def note(self, kernel: str, grid: tuple[int, ...], values: dict[str, Any]) -> None:
        self.launches.append(Launch(kernel, grid, values, self._side))

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Stand in for ``JITFunction.run``."""
        values = dict(zip(kernel.arg_names, args, strict=False)) | options
        self.note(kernel.__name__, tuple(grid), values)


def decode_step(
    config: RetrievalConfig,
    *,
    batch: int,
    context: int,
    units: int,
    shape: Attention | None = None,
    selects: bool = True,
) -> list[Launch]:
    """The launches of a layer in a step of a batch of requests that decode.

    Args:
        config: Options of the engine.
        batch, context: Requests, and tokens of each.
        units: Multiprocessors of the GPU.
        shape: Of the layer.
        selects: Whether all of them attend to selections; else none does.
    """
    shape = shape or Attention()
    noted = _Noted()
    with _nowhere(noted, units):
        impl = _attached(config, shape, noted, batch, context)
        pages = -(-context // config.page_size)
        rows = _rows(batch, pages)
        lead = 0 if selects else batch
        tokens = 0 if selects else None
        step = RetrievalMetadata(None, SimpleNamespace(), lead, tokens, rows, sparse=selects)
        heads = shape.kv_heads * shape.group
        with NOWHERE:
            fused = torch.empty(batch, heads + 2 * shape.kv_heads, shape.head_size, dtype=DTYPE)
        query, key, value = fused.split([heads, shape.kv_heads, shape.kv_heads], 1)
        cache = impl.units.unflatten(0, (-1, shape.kv_heads))
        noted.launches.clear()
        impl.do_kv_cache_update(None, key, value, cache, rows.slot_mapping)
        impl.forward(None, query, key, value, cache, step, torch.empty_like(query))
    return noted.launches


@contextmanager
def _nowhere(noted: _Noted, units: int) -> Iterator[None]:
    """Launches are noted, and a GPU has so many multiprocessors."""

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        noted.run(kernel, *args, **options)

    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(layers, "num_compute_units", return_value=units),
    ):
        yield


def _attached(
    config: RetrievalConfig, shape: Attention, noted: _Noted, batch: int, context: int
) -> Any:
    """A layer that retrieves, by the classes of the engine."""

    class Half:
        """What a dense half is asked for; vLLM's is two launches."""

        alibi_slopes = logits_soft_cap = sinks = kv_sharing_target_layer_name = None

        def __init__(self, *args: Any, **options: Any) -> None:
            pass

        def forward(self, *args: Any) -> None:
            noted.note(DENSE_HALF, (), {})

    dense = SimpleNamespace(get_impl_cls=lambda: Half)
    kind = type("Impl", (RetrievalAttentionImpl,), {"dense": dense})
    impl: Any = kind(shape.kv_heads * shape.group, shape.head_size, 1.0, shape.kv_heads)
    pages = batch * -(-context // config.page_size)
    size = pages, shape.kv_heads, config.page_size, 2 * shape.head_size
    cache = torch.empty(size, dtype=DTYPE, device=NOWHERE)
    room = Capacity(config, [shape.kv_heads], context)
    selected = torch.zeros(batch, shape.kv_heads, dtype=torch.int32)
    prompts = kept_prompts(config, LocalHeads([slice(0, shape.kv_heads)]), selected, room)
    requests: Any = SimpleNamespace(
        capacity=batch,
        room=room,
        counts_of=lambda name: None if prompts is None else selected,
        heads_of=lambda name: slice(None),
        number_of=lambda name: 0,
        drafts=0,
        kept=prompts,
        ends=None if prompts is None else torch.zeros(batch, dtype=torch.int32),
    )
    kept = layers.RetrievalLayers(kernels, config, requests, context, NOWHERE)
    builder: Any = SimpleNamespace(
        attach=lambda *args: None,
        table=DeviceRequests.empty(batch, NOWHERE),
        make_dense=lambda: None,
        device=NOWHERE,
    )
    tiers: Any = None
    if config.home == "host":
        slots = BUDGETS * config.budget_limit // config.slot_tokens
        tiers = SimpleNamespace(staged=1, seats=batch, capacity=slots)
    layer = SimpleNamespace(impl=impl, kv_cache=cache)
    kept.attach([(builder, [LAYER])], {LAYER: layer}, noted, tiers)
    return impl


def _rows(batch: int, pages: int) -> DeviceRows:
    with NOWHERE:
        of_row = [torch.empty(batch, dtype=torch.int32) for _ in range(7)]
        return DeviceRows(
            of_row[0],
            of_row[1],
            torch.empty(batch + 1, dtype=torch.int32),
            of_row[2],
            torch.empty(batch, dtype=torch.int64),
            torch.empty(batch, pages, dtype=torch.int32),
            *of_row[3:],
        )
