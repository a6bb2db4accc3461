"""Predicted decode steps on an H100: counted launches and bytes, and what these are taken to cost.

    python -m benchmarks.gpu.predict

Llama-3.1-8B's shapes in bf16, all steps replays of CUDA graphs. Launches, grids and constants of
kernels are those that the engine's classes make today (`benchmarks.gpu.counted`), bytes are those
that each op must move. What a launch costs beside its bytes is a guess, until a GPU has been
measured: expect +-25 %. The results have the names of those of `benchmarks.gpu.engine_decode`.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, result_header, write_json
from benchmarks.gpu.counted import DENSE_HALF, DTYPE, Attention, Launch, decode_step, presets
from benchmarks.gpu.launches import QUANTISED
from benchmarks.gpu.layer_step import AHEAD, MISSED
from benchmarks.models import read_config
from vllm_kvretrieval.engine.cuda.requests import exact_below
from vllm_kvretrieval.kernels.device import RECORD_ALIGNMENT
from vllm_kvretrieval.kernels.triton.index import EXACT, LOW_RANK
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.codec import RAW
from vllm_kvretrieval.retrieval.families.scored import CORRECTION_THRESHOLD
from vllm_kvretrieval.retrieval.needs import Need

MODULE = "benchmarks.gpu.predict"
MODEL = Path(__file__).parent / "llama-3.1-8b"
OUTPUT = RESULTS / "gpu_predicted.json"
LENGTHS, BATCHES = (2048, 16384, 32768, 131072), (1, 8)
METHOD, ENCODED, BUDGET = "freekv", "ttkv", 2048
"""The method of all steps, one whose pages are encoded, and the budget."""
LONGEST = LENGTHS[-1]

UNITS = 132
"""Multiprocessors of an H100 SXM."""
AT_ONCE = 2
"""Programs that select on one at once: as many as their registers are limited for."""
MEMORY_GIB, RESERVED = 80, 0.92
"""Of the GPU; the share that vLLM takes by default (``--gpu-memory-utilization``)."""
HBM = 2.7e12
"""Bytes of device memory per second that a good kernel moves: 0.9 of the 3.0 TB/s at which torch
has copied on such a GPU, by its own count of bytes read and written."""
BUS = 50e9
"""Bytes from pinned host memory per second: PCIe 5.0 x16 has 63e9. A guess."""
GAP = 1.3
"""us from a kernel in a graph to the next, which depends on it. A guess."""
IDLE = 2.0
"""us of a kernel whose programs find nothing to do. A guess."""
SMALL = 6, 1.6
"""Small kernels of a model's layer (norms, rotation, activation), and us of each. Guesses."""
CROWD = 0.02
"""What these take more for each request. A guess."""
AROUND = 150.0
"""us of a step beside the layers: logits, sampling, metadata. A guess."""
DENSE_SHARE, DENSE_LEAST, COMBINE = 0.92, 5.0, 2.6
"""FlashAttention 3: its share of HBM, its least us, and us of the launch that merges. Guesses."""
STOCK_WRITE = 2.0
"""us of vLLM's write to the cache. A guess."""
SCORE_SHARE = {LOW_RANK: 0.8, EXACT: 0.8}
"""Share of HBM by index, of others 0.9: a record of low_rank has several short fields, and keys
come in short tiles. Guesses."""
RANK, READS_OF_RANK, OF_UNIT = 10.0, 5, 100e9
"""us of ranking tokens beside its reads, how often it reads the scores, and the bytes per second
that a multiprocessor reads of the L2 cache. Guesses."""
BOOKS_OF_DROP = 6
"""Numbers of a token that a step reads or writes which drops another one, beside its scores: its
rating three times, its position, and both of what follows the dropped one, half of all, twice."""
CORRECTED = {0.9: 0.63, 0.8: 0.25}
"""Share of KV heads that select before attention, by the threshold below which they do: as measured
with small models on CPUs (docs/papers.md)."""
SELECT = 4.0, 6.5
"""us of pooling and ranking few pages, and more for 4,096 by 16 warps: what threads of a program do
some 18 times, which is to wait for each other or for a read. Guesses."""
ATTEND, ATTEND_SHARE, MERGE = 4.0, 0.85, 0.45
"""us of sparse attention beside its bytes, its share of HBM, us of a read of the L2 cache that the
next one waits for, as those of parts that are merged. Guesses."""
OF_PROGRAM = 10e9
"""Bytes per second that a program of attention reads over the bus: a third of two tiles of 32 KiB
on their way at any time, if an answer takes 2 us. A guess."""
FIXED = {
    "_write_kernel": 2.5,
    "_build_kernel": 2.5,
    "_build_bits_kernel": 2.5,
    "_cut_kernel": 3.0,
    "_list_kept_kernel": 3.0,
    "_drop_kernel": 6.0,
    "_write_open_kernel": 3.0,
}
"""us of launches that move little. Guesses."""
RESOLVE, FEW_SLOTS = 12.0, 256
"""us of finding slots among few; among more, ranking those that are given away takes what ranking
of as many pages does. Guesses."""
RECALLS = "_recall_kernel", "_recall_encoded_kernel"
SCORE, RECALL = 3.0, 3.0
"""us of scores and of recall beside their bytes, whoever recalls. Guesses."""


def us(nbytes: float, speed: float = HBM) -> float:
    """Microseconds that bytes take."""
    return nbytes / speed * 1e6


@dataclass(frozen=True)
class Sizes:
    """A layer's step.

    Attributes:
        config: Options of the engine.
        batch, context: Requests, and tokens of each.
        shape: Of the layer.
        corrected: Share of the KV heads that select before attention, with methods that speculate;
            None: as in ``CORRECTED``.
    """

    config: RetrievalConfig
    batch: int
    context: int
    shape: Attention
    corrected: float | None = None

    @property
    def token_bytes(self) -> int:
        """Of keys and values of a token in all KV heads."""
        return self.shape.kv_heads * 2 * self.shape.head_size * DTYPE.itemsize

    @property
    def home_bytes(self) -> float:
        """The same as they lie at home."""
        codec, shape = self.config.encoding, self.shape
        if codec is None:
            return self.token_bytes
        of_head = codec.bytes_per_token(self.config.page_size, shape.head_size, DTYPE)
        return shape.kv_heads * of_head

    @property
    def pages(self) -> int:
        """Of a context."""
        return -(-self.context // self.config.page_size)

    @property
    def budget(self) -> int:
        """Pages that a KV head attends to, at most."""
        return self.config.page_budget().total

    @property
    def selects(self) -> bool:
        """Whether rows attend to a part of their contexts."""
        least = exact_below(self.config, self.token_bytes, self.batch)
        near = self.config.home == "device" and self.context < least
        return self.pages > self.budget and not self.config.own.whole and not near

    @property
    def listed(self) -> int:
        """Tokens that all KV heads of all rows attend to by lists."""
        rows = self.batch if self.selects or self.config.home == "host" else 0
        return rows * self.shape.kv_heads * min(self.context, self.budget * self.config.page_size)

    @property
    def tokens(self) -> int:
        """Tokens that KV heads rank, where these select single tokens."""
        if not self.selects or not self.config.own.per_token:
            return 0
        return self.batch * self.shape.kv_heads * self.context

    @property
    def entries(self) -> int:
        """Entries that are scored, of all rows and KV heads."""
        own = self.config.own
        if not self.selects or own.index is None:
            return 0
        return self.lists * (self.context // own.entry_tokens)

    @property
    def lists(self) -> int:
        """Of all rows and KV heads."""
        return self.batch * self.shape.kv_heads

    def choosing(self, launch: Launch) -> float:
        """The share of the KV heads that select by a launch."""
        own, corrected = self.config.own, self.corrected
        if not own.speculates:
            corrected = 1.0
        elif corrected is None:
            corrected = CORRECTED[CORRECTION_THRESHOLD.of(own)]
        return 1 - corrected if launch.side else corrected


def record_bytes(sizes: Sizes) -> int:
    """Bytes by which an entry is scored: its record, or its keys."""
    own, size = sizes.config.own, sizes.shape.head_size
    assert own.index is not None
    if own.index.reads_keys:
        return own.entry_tokens * size * DTYPE.itemsize
    return int(own.index.record_bytes(size, own.entry_tokens, DTYPE, RECORD_ALIGNMENT))


def must_move(launch: Launch, sizes: Sizes) -> float:
    """Bytes that a launch must read and write, each once; those of recall cross the bus.

    Not counted: queries, tables, and what is fixed per program.
    """
    group, shape, values = sizes.shape.group, sizes.shape, launch.values
    match launch.kernel:
        case "_write_kernel":
            written = 2 * sizes.batch * sizes.token_bytes * values["WRITES"]
            return written + 2 * sizes.batch * sizes.token_bytes * values["GROWS"]
        case "_select_kernel" if values["NUMBER"] == 0 and sizes.entries:
            beside = 8 * (group + (values["OUTLIERS"] > 0))
            return sizes.choosing(launch) * sizes.entries * (record_bytes(sizes) + beside)
        case "_score_bits_kernel":
            return sizes.entries * (record_bytes(sizes) + 4 * group * values["ENTRY"])
        case "_pool_kernel":
            return sizes.entries * values["ENTRY"] * 4 * (group + 1)
        case "_rank_kernel":
            return READS_OF_RANK * 4 * sizes.tokens
        case "_list_kept_kernel":
            return 12 * sizes.listed
        case "_drop_kernel":
            return 4 * (group + BOOKS_OF_DROP) * sizes.listed
        case "_sparse_decode_kernel":
            parts = 2 * math.prod(launch.grid) * group * 4 * (shape.head_size + 1)
            keys = sizes.listed * 2 * shape.head_size * DTYPE.itemsize
            keys += 4 * group * sizes.listed * values["SCORED"]
            return keys + (parts if values["SPLITS"] > 1 else 0)
        case "_resolve_kernel":
            slots = math.prod(launch.grid) * values["capacity"]
            books = 16 * slots + 16 * sizes.listed / sizes.config.slot_tokens
            return books + (0 if launch.side else 2 * sizes.batch * sizes.token_bytes)
        case "_write_open_kernel":
            return 2 * sizes.batch * sizes.token_bytes + sizes.batch * sizes.home_bytes
        case "_recall_kernel" | "_recall_encoded_kernel":
            return recalled(launch, sizes)
    return 0


def recalled(launch: Launch, sizes: Sizes) -> float:
    """Bytes that a launch brings over the bus; attention those of units that no slot holds."""
    if launch.kernel not in RECALLS and not launch.values.get("FAR"):
        return 0
    if sizes.config.keeps_tokens:  # all but the new ones are in slots
        return sizes.batch * sizes.home_bytes
    share = AHEAD if launch.side else MISSED
    return share * sizes.listed * sizes.home_bytes / sizes.shape.kv_heads


def over_the_bus(sizes: Sizes) -> float:
    """Bytes of a retrieval layer's step that cross the bus: units that are recalled, and tokens,
    which cross it as they are written, or with the rest of a page that is encoded."""
    return sizes.batch * sizes.home_bytes + sum(recalled(e, sizes) for e in launches_in(sizes))


def _score(launch: Launch, sizes: Sizes) -> float:
    share = SCORE_SHARE.get(launch.values.get("KIND"), 0.9)
    return SCORE + us(sizes.choosing(launch) * sizes.entries * record_bytes(sizes)) / share


def _select(launch: Launch, sizes: Sizes) -> float:
    values = launch.values
    pages, warps = values["PAGES"] * values["TILES"], values["num_warps"]
    few, many = SELECT
    rankings = 1 + (values["OUTLIERS"] > 0)
    wave = few + rankings * many * pages / 4096 * (16 / warps) ** 0.5
    share = sizes.choosing(launch)
    some = 1 - (1 - share) ** sizes.lists  # how likely it is that any does
    waves = math.ceil(share * sizes.lists / (UNITS * AT_ONCE))
    return IDLE + some * (_score(launch, sizes) + wave * waves - IDLE)


def _resolve(launch: Launch, sizes: Sizes) -> float:
    slots, warps = launch.values["SLOTS"], launch.values["num_warps"]
    more = SELECT[1] * slots / 4096 * (16 / warps) ** 0.5 if slots > FEW_SLOTS else 0
    return RESOLVE + more


def _pool(launch: Launch, sizes: Sizes) -> float:
    return SCORE + us(must_move(launch, sizes)) / 0.9


def _rank(launch: Launch, sizes: Sizes) -> float:
    lists = math.prod(launch.grid)
    return RANK + us(must_move(launch, sizes) / lists, OF_UNIT) * -(-lists // UNITS)


def _attend(launch: Launch, sizes: Sizes) -> float:
    tiles = -(-sizes.budget * sizes.config.page_size // launch.values["TILE"])
    keys = sizes.listed * 2 * sizes.shape.head_size * DTYPE.itemsize
    splits = launch.values["SPLITS"]
    reads = -(-splits // launch.values["AT_ONCE"]) if splits > 1 else 0
    missing = recalled(launch, sizes)
    there = us(keys + missing) / ATTEND_SHARE  # and written
    if missing:  # it comes meanwhile, to the programs of the heads that select before attention
        lists = max(1, sizes.choosing(launch) * sizes.lists)
        speed = min(BUS, OF_PROGRAM * lists * min(splits, tiles))
        there = max(there, RECALL + us(missing, speed))
    return ATTEND + there + MERGE * reads


def dense_us(sizes: Sizes) -> float:
    """FlashAttention over whole contexts, its second launch included."""
    nbytes = sizes.batch * sizes.context * sizes.token_bytes
    return max(us(nbytes) / DENSE_SHARE, DENSE_LEAST) + COMBINE


def launch_us(launch: Launch, sizes: Sizes) -> float:
    """A launch of a retrieval layer, without the gap before it."""
    if launch.kernel == DENSE_HALF:
        return dense_us(sizes)
    if launch.kernel in FIXED:
        return FIXED[launch.kernel]
    if launch.kernel in RECALLS:
        return RECALL + us(must_move(launch, sizes), BUS)
    if launch.kernel == "_resolve_kernel":
        return _resolve(launch, sizes)
    works = sizes.entries if launch.kernel != "_sparse_decode_kernel" else sizes.listed
    if not works or launch.values.get("NUMBER"):
        return IDLE
    ops: dict[str, Callable[[Launch, Sizes], float]] = {
        "_select_kernel": _select,
        "_score_bits_kernel": _score,
        "_pool_kernel": _pool,
        "_rank_kernel": _rank,
        "_sparse_decode_kernel": _attend,
    }
    return ops[launch.kernel](launch, sizes)


def launches_of(launch: Launch) -> int:
    """How many launches stand behind one that is noted."""
    return 2 if launch.kernel == DENSE_HALF else 1


def launches_in(sizes: Sizes) -> list[Launch]:
    """The launches of a retrieval layer."""
    return decode_step(
        sizes.config,
        batch=sizes.batch,
        context=sizes.context,
        units=UNITS,
        shape=sizes.shape,
        selects=sizes.listed > 0,
    )


def layer_us(sizes: Sizes) -> tuple[float, float, float]:
    """A retrieval layer: on the path, and beside the model, where it takes device memory's time
    from the model, the last one."""
    launches = launches_in(sizes)
    path, beside = (
        sum(launch_us(e, sizes) + GAP * launches_of(e) for e in launches if e.side == side)
        for side in (False, True)
    )
    shared = (e for e in launches if e.side and e.kernel not in RECALLS)
    return path, beside, sum(us(must_move(e, sizes)) for e in shared)


OPS = {
    ("_write_kernel", False): "write_kv",
    ("_build_kernel", False): "write_kv",
    ("_build_bits_kernel", False): "write_kv",
    ("_select_kernel", False): "plan_decode",
    ("_cut_kernel", False): "plan_decode",
    ("_select_kernel", True): "select_ahead",
    ("_resolve_kernel", False): "resolve",
    ("_resolve_kernel", True): "resolve_ahead",
    ("_recall_kernel", True): "recall_ahead",
    ("_sparse_decode_kernel", False): "sparse_decode",
}
"""The op of `benchmarks.gpu.decode_layer` that a launch belongs to, on the path or beside it."""


def op_us(home: str, batch: int, context: int) -> dict[str, float]:
    """Microseconds of each op of a retrieval layer's step, by the names of `decode_layer`, where
    no query turns.

    Args:
        home: Where the KV cache is.
        batch, context: Requests, and tokens of each.
    """
    served = {(name, at): config for name, at, config in presets()}
    sizes = Sizes(served[METHOD, home], batch, context, Attention(), corrected=0.0)
    launches = launches_in(sizes)
    found: dict[str, float] = {}
    for launch in launches:
        if (op := OPS.get((launch.kernel, launch.side))) is not None:
            found[op] = found.get(op, 0) + launch_us(launch, sizes)
    return found


@dataclass(frozen=True)
class Model:
    """What counts of a model.

    Attributes:
        layers: Of attention.
        shape: Of each.
        weights: Bytes that a step reads.
    """

    layers: int
    shape: Attention
    weights: int

    @classmethod
    def read(cls, path: Path) -> Model:
        """Of a Llama's configuration."""
        known = read_config(path)
        heads, kv_heads, size = known.num_attention_heads, known.num_key_value_heads, known.head_dim
        layer = 2 * size * (heads + kv_heads) + 3 * known.intermediate_size
        elements = known.hidden_size * (known.num_hidden_layers * layer + known.vocab_size)
        shape = Attention(kv_heads, heads // kv_heads, size)
        return cls(known.num_hidden_layers, shape, elements * DTYPE.itemsize)

    def step_us(self, config: RetrievalConfig | None, batch: int, context: int) -> float:
        """A decode step; of stock vLLM without options.

        What is beside the model costs what it moves in device memory, and nothing else as long as
        all of it takes less than the step.
        """
        number, each = SMALL
        small = self.layers * number * (each + GAP) * (1 + CROWD * batch)
        around = us(self.weights) + small + AROUND
        sizes = Sizes(config or RetrievalConfig(method=METHOD), batch, context, self.shape)
        dense = STOCK_WRITE + GAP + dense_us(sizes) + 2 * GAP
        if config is None:
            return around + self.layers * dense
        path, beside, shared = layer_us(sizes)
        retrieving = self.layers - config.dense_layers
        taken = around + retrieving * (path + shared) + config.dense_layers * dense
        return max(taken, retrieving * beside)

    def cache_gib(self, batch: int, context: int) -> float:
        """The KV cache of requests."""
        sizes = Sizes(RetrievalConfig(method=METHOD), batch, context, self.shape)
        return self.layers * batch * context * sizes.token_bytes / 2**30


def predicted() -> dict[str, Any]:
    """Steps by engine, context and batch; and each preset's launches and step at the longest."""
    model = Model.read(MODEL)
    served = {(name, home): config for name, home, config in presets()}
    engines = {"stock": None} | {home: served[METHOD, home] for home in ("device", "host")}
    room = RESERVED * MEMORY_GIB - model.weights / 2**30
    results: dict[str, Any] = {}
    for context in LENGTHS:
        for batch in BATCHES:
            cache = model.cache_gib(batch, context)
            for engine, config in engines.items():
                step = model.step_us(config, batch, context)
                results[f"{engine}, decode {context}, batch {batch}"] = {
                    "ms": round(step / 1e3, 2),
                    "cache_gib": round(cache, 2),
                    "fits": engine == "host" or cache < room,
                }
    return {
        "results": results,
        "presets": of_presets(model, served),
        "bus": of_codecs(model),
        "dense_layers": of_dense_layers(model, served),
    }


def of_dense_layers(
    model: Model, served: Mapping[tuple[str, str], RetrievalConfig]
) -> dict[str, dict[str, float]]:
    """Milliseconds of a step at the longest, by home and batch, by how many layers are dense."""
    return {
        f"{home}, batch {batch}": {
            str(number): round(
                model.step_us(replace(served[METHOD, home], dense_layers=number), batch, LONGEST)
                / 1e3,
                2,
            )
            for number in (1, 0)
        }
        for home in ("device", "host")
        for batch in BATCHES
    }


def of_codecs(model: Model) -> dict[str, dict[str, dict[str, float]]]:
    """By preset and codec: bytes over the bus per step of a retrieval layer, of one request of the
    longest context, their share of those without a codec, and the step."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in (METHOD, ENCODED):
        for codec in (RAW, *QUANTISED):
            config = RetrievalConfig(method=name, home="host", budget=BUDGET, codec=codec)
            moved = over_the_bus(Sizes(config, 1, LONGEST, model.shape))
            of_preset = found.setdefault(name, {})
            of_preset[codec] = {
                "bytes": round(moved),
                "share": round(moved / of_preset.get(RAW, {"bytes": moved})["bytes"], 3),
                "ms": round(model.step_us(config, 1, LONGEST) / 1e3, 2),
            }
    return found


def of_presets(
    model: Model, served: Mapping[tuple[str, str], RetrievalConfig]
) -> dict[str, dict[str, Any]]:
    """Per preset and home: launches of a layer on the path and beside it, and the bytes that they
    must move for one request of the longest context."""
    found: dict[str, dict[str, Any]] = {}
    for (name, home), config in served.items():
        sizes = Sizes(config, 1, LONGEST, model.shape)
        launches = launches_in(sizes)
        found.setdefault(name, {})[home] = {
            "path": _listed(launches, sizes, side=False),
            "beside": _listed(launches, sizes, side=True),
            "ms": _step_ms(model, config),
        }
    return found


def _step_ms(model: Model, config: RetrievalConfig) -> float | None:
    """None: its layers or heads are not alike, and which do what is measured of each model."""
    if config.own.selects_for_others or Need.HEADS in config.own.needs:
        return None
    return round(model.step_us(config, 1, LONGEST) / 1e3, 2)


def _listed(launches: Sequence[Launch], sizes: Sizes, *, side: bool) -> dict[str, list[int]]:
    """How often each kernel is launched, and bytes."""
    counts: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for launch in launches:
        if launch.side == side:
            counts[launch.kernel] += launches_of(launch)
            moved[launch.kernel] += round(must_move(launch, sizes))
    return {name: [count, moved[name]] for name, count in counts.items()}


def main() -> None:
    """Predict everything; print the table."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="result file (JSON)")
    output = parser.parse_args().output
    data = predicted()
    write_json(output, result_header(MODULE) | data)
    from benchmarks.tables.gpu import predicted as table

    print(table({output.name: data}, {}), f"results: {output}", sep="\n")


if __name__ == "__main__":
    main()
