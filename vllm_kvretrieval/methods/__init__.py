"""How the methods of an engine come to what rows attend to: the files that run the families.

A family says what a row attends to, and knows neither vLLM nor where the KV is. Its group object
plans the rows of a step once for all layers that share metadata. Its layer object chooses in each
layer. A new family is a file here and a line in :data:`registry.FILES`.
"""

from vllm_kvretrieval.methods.base import (
    DecodePlan,
    DeviceFacts,
    DeviceFilter,
    DeviceMethod,
    EngineFacts,
    GroupFacts,
    GroupMethod,
    Layer,
    LayerFacts,
    LayerMethod,
    LayerWatcher,
    LayerWeigher,
    Sees,
    Step,
    StepRows,
    WorkSize,
)
from vllm_kvretrieval.methods.prompt_chunks import ChunkPlanner, Chunks, Prompts
from vllm_kvretrieval.methods.registry import (
    chunk_planner,
    connect_layers,
    device_filter,
    device_methods,
    group_methods,
    layer_methods,
    scratch_bytes,
)
from vllm_kvretrieval.methods.whole import plan_whole

__all__ = [
    "ChunkPlanner",
    "Chunks",
    "DecodePlan",
    "DeviceFacts",
    "DeviceFilter",
    "DeviceMethod",
    "EngineFacts",
    "GroupFacts",
    "GroupMethod",
    "Layer",
    "LayerFacts",
    "LayerMethod",
    "LayerWatcher",
    "LayerWeigher",
    "Prompts",
    "Sees",
    "Step",
    "StepRows",
    "WorkSize",
    "chunk_planner",
    "connect_layers",
    "device_filter",
    "device_methods",
    "group_methods",
    "layer_methods",
    "plan_whole",
    "scratch_bytes",
]
