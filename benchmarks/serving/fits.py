"""What fits: contexts of widely used models in the memory of a machine, by arithmetic alone.

    python -m benchmarks.serving fits
    python -m benchmarks.serving fits --models Qwen3-8B --machines 24 --contexts 16384 40960

No engine starts, and no weights are read. vLLM builds each model without memory, from the
``config.json`` of a checkpoint; weights are the bytes of its parameters, or of what
``--quantization`` makes of them. Sizes of the KV cache, of the page index, of slots and of the file
are those that a worker plans when it starts. One request runs at a time.

A worker gets vLLM's share of the machine's memory (``--gpu-memory-utilization``), and a start needs
the weights in 16 bits within it. What a worker has beside weights and KV cache was measured once,
by `capacity`: see ``--beside``.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from benchmarks.cli import add_output, add_tokens
from benchmarks.common import RESULTS, ROOT, result_header, settings, write_json
from vllm_kvretrieval.compat import configured_block_size
from vllm_kvretrieval.doctor.lengths import own_length
from vllm_kvretrieval.doctor.logs import quiet
from vllm_kvretrieval.doctor.options import read_options
from vllm_kvretrieval.engine.cpu.planner import Planner
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.table import DEFAULT_METHOD
from vllm_kvretrieval.quantization.layers import RoundedLinear, RoundedVocabulary
from vllm_kvretrieval.quantization.packing import PANEL
from vllm_kvretrieval.retrieval.presets import preset_names
from vllm_kvretrieval.storage.tier_sizes import Cache, Tiers, most_of

GIB = 1 << 30
CONFIGS = ROOT / "benchmarks" / "configs"
MODELS = {
    "SmolLM2-135M": CONFIGS / "SmolLM2-135M-Instruct",
    "Qwen2.5-Coder-0.5B": CONFIGS / "Qwen2.5-Coder-0.5B-Instruct",
    "Llama-3.2-1B": CONFIGS / "Llama-3.2-1B-Instruct",
    "Qwen2.5-1.5B": CONFIGS / "Qwen2.5-1.5B-Instruct",
    "Llama-3.2-3B": CONFIGS / "Llama-3.2-3B-Instruct",
    "Gemma-3-4B": CONFIGS / "gemma-3-4b-it",
    "Qwen3-4B": CONFIGS / "Qwen3-4B",
    "Qwen2.5-7B": CONFIGS / "Qwen2.5-7B-Instruct",
    "Llama-3.1-8B": ROOT / "benchmarks" / "gpu" / "llama-3.1-8b",
    "Qwen3-8B": CONFIGS / "Qwen3-8B",
}
"""Folders with the ``config.json`` of a checkpoint, by size; of Gemma the part that reads text."""
WEIGHTS = {"16 bits": None, "kvr_int8": "kvr_int8", "kvr_int4": "kvr_int4"}
"""Values of ``--quantization``, by their names in the table."""
HOMES = ("device", "disk")
MOST = 1 << 45
"""Bytes of memory that no request needs."""


class Served:
    """A model as one worker serves it to one request at a time.

    Args:
        model: Folder of its ``config.json``.
        method: Value of ``--attention-backend``.
        home: Where its KV cache lies.
        weights: Value of ``--quantization``; None: 16 bits.

    Attributes:
        config: Options of the engine.
        longest: Tokens of the longest context that the model takes.
        share: Of a machine's memory, what vLLM's worker takes.
    """

    def __init__(self, model: Path, method: str, home: str, weights: str | None = None) -> None:
        arguments = [str(model), "--attention-backend", method, "--kv-retrieval.home", home]
        arguments += ["--max-num-seqs", "1", "--dtype", "bfloat16"]
        arguments += ["--skip-tokenizer-init", "--enforce-eager"]
        arguments += [] if weights is None else ["--quantization", weights]
        self.vllm_config = read_options(arguments)
        config = RetrievalConfig.from_vllm(self.vllm_config)
        assert config is not None, "a retrieval method is named"
        self.config, cache = config, self.vllm_config.cache_config
        cache.block_size = configured_block_size(self.vllm_config)
        cache.kv_cache_layout = "LBHNC"  # as the engine core finds out on a CPU
        self.longest = own_length(self.vllm_config.model_config)
        self.share: float = cache.gpu_memory_utilization

    @functools.cached_property
    def model(self) -> torch.nn.Module:
        """vLLM's model, without memory."""
        known, config = rotary_embedding._ROPE_DICT, self.vllm_config
        kept, dtype = {**known}, set_default_torch_dtype(config.model_config.dtype)
        try:
            with set_current_vllm_config(config), dtype, torch.device("meta"):
                known.clear()
                return initialize_model(config)
        finally:  # vLLM shares rotations among all models of a process
            known.clear()
            known.update(kept)

    @functools.cached_property
    def specs(self) -> dict[str, Any]:
        """vLLM's KV cache specs of the layers."""
        assert self.model is not None
        layers = self.vllm_config.compilation_config.static_forward_context.items()
        found = {
            name: layer.get_kv_cache_spec(self.vllm_config)
            for name, layer in layers
            if isinstance(layer, AttentionLayerBase)
        }
        return {name: spec for name, spec in found.items() if spec is not None}

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights once they are loaded."""
        loaded = {id(weight): weight.nbytes for weight in self.model.parameters()}
        panels = dict[tuple[type, int], int]()
        for layer in self.model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, RoundedLinear | RoundedVocabulary):
                weight = layer.get_parameter("weight")
                outputs, inputs = weight.shape
                if (kind := (type(method), inputs)) not in panels:
                    panels[kind] = _panel_bytes(method, inputs)
                loaded[id(weight)] = panels[kind] * -(-outputs // PANEL)
        return sum(loaded.values())

    @property
    def packed_bytes(self) -> int:
        """Bytes of the copies that vLLM's products keep of embeddings and output layer.

        They do so where they multiply by oneDNN in 16 bits, which takes AVX-512 BF16 or AMX.
        """
        return sum(
            layer.get_parameter("weight").nbytes
            for layer in self.model.modules()
            if type(getattr(layer, "quant_method", None)) is UnquantizedEmbeddingMethod
        )

    def planner(self, context: int) -> Planner:
        """What plans the memory of a worker for contexts of so many tokens."""
        self.vllm_config.model_config.max_model_len = context
        return Planner(self.config, self.vllm_config, lambda: self.specs, 0)

    @functools.cache  # noqa: B019 - as many as contexts are asked about
    def planned(self, context: int) -> tuple[Cache, int, int]:
        """The KV cache that it plans, bytes of its staging buffer, and of what layers choose in."""
        planner = self.planner(context)
        with quiet():
            cache = planner.cache_at_home()
        assert cache is not None, "home is not auto"
        return cache, planner.staging_bytes(), planner.scratch_bytes()

    def tiers(self, context: int, memory: int) -> Tiers:
        """The division of memory with ``home=disk``.

        Raises:
            RetrievalConfigError: A request of so many tokens does not fit.
        """
        cache, staging, scratch = self.planned(context)
        return Tiers.plan(self.config, cache, memory - scratch, staging)

    def fits(self, context: int, memory: int) -> bool:
        """Whether a request of so many tokens fits in bytes beside weights."""
        if not self.config.slow_home:
            cache, staging, scratch = self.planned(context)
            return cache.fits_in(memory - scratch - staging, self.config)
        try:
            self.tiers(context, memory)
        except RetrievalConfigError:
            return False
        return True

    def needed(self, context: int) -> int:
        """The fewest bytes beside weights in which a request of so many tokens fits."""
        return bisect_left(range(MOST), True, key=functools.partial(self.fits, context))

    def most(self, memory: int) -> int:
        """Tokens of the longest context that fits in bytes beside weights, in whole blocks."""
        block = self.vllm_config.cache_config.block_size
        return block * most_of(self.longest // block, lambda n: self.fits(n * block, memory))


def _panel_bytes(method: RoundedLinear | RoundedVocabulary, inputs: int) -> int:
    """Bytes of a panel of rounded weights, as a worker makes it of 16 bits."""
    layer = torch.nn.Module()
    weight = torch.zeros(PANEL, inputs, dtype=torch.bfloat16)
    layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    method.process_weights_after_loading(layer)
    return sum(each.nbytes for each in (*layer.parameters(), *layer.buffers()))


@contextmanager
def alone() -> Iterator[None]:
    """vLLM's groups of processes, of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with set_current_vllm_config(VllmConfig()):
                init_distributed_environment(1, 0, f"file://{folder}/world", 0, "gloo")
                initialize_model_parallel(1, 1)
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def measured_beside() -> int:
    """Bytes of a worker beside weights and KV cache: what `capacity` measured, less those two.

    Call it in :func:`alone`.
    """
    (row,) = json.loads((RESULTS / "capacity.json").read_text())["rows"]
    served = Served(MODELS["Qwen2.5-Coder-0.5B"], "freekv", "disk")
    resident = row["memory"]["own"] + row["memory"]["mapped"]
    counted = sum(row["allocated"].values()) + served.weight_bytes + served.packed_bytes
    return int(resident - counted)


def examine(
    model: Path, method: str, contexts: Sequence[int], gibs: Sequence[int], beside: int
) -> dict[str, Any]:
    """What a model takes, and what machines hold of it; call it in :func:`alone`.

    Args:
        model: Folder of its ``config.json``.
        method: Value of ``--attention-backend``.
        contexts: Numbers of tokens; those that the model does not take are left out.
        gibs: Memory of machines, in GiB.
        beside: Bytes of a worker beside weights and KV cache.
    """
    homes = {home: Served(model, method, home) for home in HOMES}
    taken = {}
    for name, quantization in WEIGHTS.items():
        served = Served(model, method, "device", quantization)
        taken[name] = {"weights": served.weight_bytes, "packed": served.packed_bytes}
    longest = homes["device"].longest
    return {
        "longest": longest,
        "page_size": {home: served.config.page_size for home, served in homes.items()},
        "weights": taken,
        "contexts": [_context(homes, each) for each in contexts if each <= longest],
        "machines": [row for gib in gibs for row in _machine(homes, taken, beside, gib)],
    }


def _context(homes: Mapping[str, Served], context: int) -> dict[str, int]:
    """Bytes that a context of so many tokens takes in each home."""
    device, disk = homes["device"], homes["disk"]
    cache = device.planned(context)[0]
    layers, blocks = cache.retrieval_layers + cache.dense_layers, cache.blocks_per_request
    fewest = disk.needed(context)
    return {
        "context": context,
        "kv": layers * cache.block_bytes * blocks,
        "index": cache.index_bytes(blocks, device.config),
        "device": device.needed(context),
        "disk": fewest,
        "file": disk.tiers(context, fewest).home,
    }


def _machine(
    homes: Mapping[str, Served], taken: Mapping[str, Mapping[str, int]], beside: int, gib: int
) -> Iterator[dict[str, Any]]:
    """The longest contexts that a machine holds: a row for each precision of weights."""
    for name, each in taken.items():
        room = int(gib * GIB * homes["device"].share) - beside
        starts = taken["16 bits"]["weights"] <= room
        row: dict[str, Any] = {"gib": gib, "weights": name, "starts": starts}
        for home, served in homes.items():
            row[home] = served.most(room - sum(each.values())) if starts else 0
        if context := row["disk"]:
            row["fast"] = homes["disk"].needed(context)
            row["file"] = homes["disk"].tiers(context, row["fast"]).home
        yield row


def report(name: str, row: Mapping[str, Any]) -> str:
    """What one model takes, and what machines hold of it, as text."""
    each = (f"{kind} {sum(taken.values()) / GIB:.2f}" for kind, taken in row["weights"].items())
    lines = [f"{name}: up to {row['longest']:,} tokens; GiB of weights: {', '.join(each)}"]
    for size in row["contexts"]:
        lines.append(
            f"  {size['context']:>7,} tokens: in memory {size['device'] / GIB:.2f} GiB; from disk "
            f"{size['disk'] / GIB:.2f} GiB, and a file of {size['file'] / GIB:.2f} GiB"
        )
    for held in row["machines"]:
        longest = f"in memory {held['device']:,}, from disk {held['disk']:,} tokens"
        found = longest if held["starts"] else "does not start"
        lines.append(f"  {held['gib']} GiB, {held['weights']}: {found}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--models", nargs="+", default=[*MODELS], choices=MODELS, help="models")
    add("--method", default=DEFAULT_METHOD, choices=preset_names(), help="retrieval method")
    add_tokens(parser, "--contexts", [8192, 32768, 131072], "tokens of a context")
    add("--machines", type=int, nargs="+", default=[16, 32, 64], metavar="GIB",
        help="memory of machines")  # fmt: skip
    add("--beside", type=int, metavar="MIB", help="memory of a worker beside weights and KV cache; "
        "by default what `capacity` measured with Qwen2.5-Coder-0.5B")  # fmt: skip
    add_output(parser, "fits.json")


def run(args: argparse.Namespace) -> int:
    """Compute, print and store."""
    rows = {}
    with alone():
        beside = measured_beside() if args.beside is None else args.beside << 20
        for name in args.models:
            sizes = args.method, args.contexts, args.machines, beside
            rows[name] = examine(MODELS[name], *sizes)
            print(report(name, rows[name]), flush=True)
    found = {"settings": settings(args), "beside": beside, "models": rows}
    write_json(args.output, result_header("benchmarks.serving") | found)
    print(f"results: {args.output}")
    return 0
