"""The choice of the file that serves a method."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from vllm_kvretrieval.kernels import Chooser
from vllm_kvretrieval.methods import dropping, filters, heads, scored
from vllm_kvretrieval.methods.base import (
    DeviceFacts,
    DeviceFilter,
    DeviceMethod,
    EngineFacts,
    Family,
    GroupFacts,
    GroupMethod,
    Layer,
    LayerFacts,
    LayerMethod,
    WorkSize,
)
from vllm_kvretrieval.methods.page_chunks import PageChunkPlanner
from vllm_kvretrieval.methods.prompt_chunks import ChunkPlanner
from vllm_kvretrieval.methods.token_chunks import TokenChunkPlanner
from vllm_kvretrieval.retrieval import families
from vllm_kvretrieval.retrieval.families import Method

FILES: Mapping[type[Method], Family] = {
    families.DroppingMethod: dropping,
    families.FilterMethod: filters,
    families.FixedMethod: scored,
    families.HeadMethod: heads,
    families.ScoredMethod: scored,
    families.WholeMethod: scored,
}
"""The file that serves the methods of each family."""


def family_of(method: Method) -> Family:
    """The file that serves a method."""
    return FILES[type(method)]


def group_methods(facts: GroupFacts) -> list[GroupMethod]:
    """The methods of an engine, for a group of layers."""
    methods = enumerate(facts.requests.config.methods.values())
    return [family_of(method).group_method(facts, n, method) for n, method in methods]


def layer_methods(facts: LayerFacts, choosers: Sequence[Chooser]) -> list[LayerMethod]:
    """The methods of an engine in a layer, and last the one of number ``WHOLE``.

    Args:
        facts: The layer.
        choosers: The layer's, by the number of the method.
    """
    methods = enumerate(facts.requests.config.methods.values())
    made = [family_of(method).layer_method(facts, n, method, choosers[n]) for n, method in methods]
    return [*made, scored.ScoredLayer(choosers[0])]


def device_methods(
    methods: Sequence[Method], choosers: Sequence[Chooser], facts: DeviceFacts
) -> list[DeviceMethod]:
    """The families of an engine's methods in a layer of a device, each once.

    Args:
        methods: The engine's. Methods of families that no device serves have been refused, and
            those that select unlike others. Methods that select nothing go with any family.
        choosers: The layer's, by the number of the method.
        facts: The layer.
    """
    selecting = [method for method in methods if method.selects] or methods[:1]
    files = {id(file): file for file in map(family_of, selecting)}.values()
    return [file.device_method(methods, choosers, facts) for file in files]  # type: ignore[attr-defined]


def device_filter(
    methods: Sequence[Method], cache: torch.Tensor, layout: str, scale: float
) -> DeviceFilter:
    """A layer of a device that selects for those after it.

    Args:
        methods: The engine's, the first of which selects so.
        cache: [pages, kv_heads, page_size, 2 * head_size]; the layer's.
        layout: How that lays out keys.
        scale: Softmax scale.
    """
    make = family_of(methods[0]).device_filter  # type: ignore[attr-defined]
    made: DeviceFilter = make(methods, cache, layout, scale)
    return made


def chunk_planner(facts: GroupFacts) -> ChunkPlanner | None:
    """The planner of chunks of prompts, for a group of layers; None: prefill is exact."""
    requests = facts.requests
    if requests.config.prefill_budget is None:
        return None
    if requests.config.own.prompts_select == "tokens":
        return TokenChunkPlanner(requests.config, facts.kv_heads)
    return PageChunkPlanner(requests.config, facts.kv_heads, requests.prompt_reads)


def connect_layers(facts: EngineFacts, layers: Mapping[int, Layer]) -> None:
    """Let layers know of each other, once all are attached.

    Args:
        facts: The engine.
        layers: Layers with plain full attention, by their numbers in the model.
    """
    for number, method in enumerate(facts.config.methods.values()):
        family_of(method).connect(facts, number, method, layers)


def scratch_bytes(methods: Iterable[Method], size: WorkSize) -> int:
    """Bytes in which the layers of a worker choose.

    Args:
        methods: The engine's.
        size: The largest work.
    """
    by_family: dict[int, tuple[Family, list[Method]]] = {}
    for method in methods:
        family = family_of(method)
        by_family.setdefault(id(family), (family, []))[1].append(method)
    return sum(family.scratch_bytes(own, size) for family, own in by_family.values())
