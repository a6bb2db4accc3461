"""An engine as on a GPU, on the CPU: vLLM's V2 model runner, kernels in Triton's interpreter.

It lives in a process of its own, where Triton interprets and vLLM finds a platform of ours in place
of its own. From the request to the token everything is vLLM's and the package's; what stands in is
vLLM's own for the CPU (streams, events, pinned memory), and attention to whole contexts.
"""

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from tests.support import device_launches, device_server, interpreter, workers


def start() -> ProcessPoolExecutor:
    """The process; functions of this module can be submitted to it."""
    return interpreter.started(mp_context=device_server.Context())


def pretend_triton():
    """Before a process imports vLLM: let it find Triton with a backend for the CPU."""
    os.environ |= {
        "TORCHDYNAMO_DISABLE": "1",  # its compiler takes the stub below for a GPU
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # kernels are Python; the rest is small
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "DEBUG"),
    }
    from triton.backends import Backend, backends

    class Driver:
        """vLLM asks whether Triton has one for the CPU."""

        @staticmethod
        def is_active():
            return True

    backends["cpu"] = Backend(compiler=None, driver=Driver)


def prepare():
    """Before a process imports vLLM, in its environment's interpreter of Triton."""
    pretend_triton()
    from vllm_kvretrieval import platforms, plugin

    platforms.PLATFORMS["cpu"] = "tests.support.device_platform.DevicePlatform"
    plugin.BACKENDS["cpu"] = "tests.support.device_worker"
    from vllm.v1.worker.cpu import shm

    shm._EventPlaceholder.query = lambda self: True
    device_launches.watch()


_engine: Any = None

SELECTIONS, WHOLE, BOTH = KINDS = (
    ("selections", True, True), ("whole contexts", False, False), ("both", True, False),
)  # fmt: skip
"""What the graphs of steps are for, and what the device then finds out; see ``graphs_taken``."""


def open_engine(model, options):
    """Start the engine of this process."""
    global _engine
    from vllm import LLM
    from vllm.v1.sample.ops import topk_topp_sampler

    # vLLM's kernel asks for methods of a loop's variable, an int in the interpreter.
    topk_topp_sampler.HAS_TRITON = False
    workers.freeze()  # vLLM collects garbage around everything that it captures, too
    defaults = {
        "kv_cache_memory_bytes": 1 << 24,
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
    }
    given = options.get("additional_config", {}).get("kv_retrieval", {})  # contexts are short
    options = options | {"additional_config": {"kv_retrieval": {"exact_below": 0} | given}}
    if {"tensor_parallel_size", "pipeline_parallel_size"} & options.keys():
        from tests.support.device_executor import DeviceExecutor

        defaults["distributed_executor_backend"] = DeviceExecutor
    _engine = LLM(model=model, **defaults | options)


def close_engine():
    """Stop its workers."""
    _engine.llm_engine.engine_core.shutdown()


def drive(requests):
    """See ``tests.support.engine.drive``."""
    from tests.support.engine import drive

    return drive(_engine, requests)


def alone(request):
    """See ``tests.support.engine.alone``."""
    from tests.support.engine import alone

    return alone(_engine, request)


def in_worker(function):
    """What a function of a module returns that the worker has called with itself."""
    return _engine.collective_rpc(function)[0]


def describe():
    """The parts of the engine."""
    runner = _runner()
    groups = [group for groups in runner.attn_groups for group in groups]
    builders = [group.get_metadata_builder() for group in groups]
    ours = [builder for builder in builders if hasattr(builder, "page_size")]
    return {
        "runner": type(runner).__name__,
        "scheduler": type(_engine.llm_engine.engine_core.engine_core.scheduler).__name__,
        "state": type(runner.model_state).__name__,
        "builders": [type(builder).__name__ for builder in builders],
        "retrieving": sorted(runner.retrieval_layers.impls),
        "block": runner.cache_config.block_size,
        "blocks": [builder.page_size for builder in ours],
        "graphs": runner.cudagraph_manager.captured_token_counts(),
    }


def describe_workers():
    """The state of each worker of the engine, and its counts."""
    return _engine.collective_rpc(_describe_worker)


def _describe_worker(worker):
    runner = worker.model_runner
    impls, tiers = runner.retrieval_layers.impls, worker.tiers
    caches = [layer.kv_cache for layer in runner.compilation_config.static_forward_context.values()]
    return {
        "retrieving": sorted(impls),
        "kv_heads": {impl.num_kv_heads for impl in impls.values()},
        "blocks": {len(cache) // (worker.cache_config.block_size // 16) for cache in caches},
        "pages": {store.pages for store in runner.retrieval_layers.indexes},
        "planned": None if tiers is None else tiers.blocks,
        "slots": 0 if tiers is None else tiers.capacity,
        "replays": sum(graph.count for graph in runner.cudagraph_manager.graphs.values()),
    }


def replay(wanted):
    """Whether steps that have a graph are replays of it, from now on."""
    _runner().cudagraph_manager.replays = wanted


def exact_below(tokens):
    """The option of that name, from now on."""
    running = _runner().running
    running.config = replace(running.config, exact_below=tokens)


def sparse_steps():
    """Steps of requests in which they attended to a part of their contexts, as the host counts."""
    return int(_runner().running.counts[1])


def replays_by_rows():
    """How many steps have been replays, by the rows of their graphs."""
    counts: Counter[int] = Counter()
    for descriptor, graph in _runner().cudagraph_manager.graphs.items():
        counts[descriptor.num_reqs] += graph.count  # of some rows there is one for adapters, too
    return dict(counts)


def graphs_taken():
    """See ``ReplayManager.taken``; from now on anew."""
    taken = list(_runner().cudagraph_manager.taken)
    _runner().cudagraph_manager.taken.clear()
    return taken


def _runner():
    core = _engine.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


def corrected_by(request):
    """KV heads that selected anew for a request, by seat."""
    corrected = _runner().running.corrected
    before = corrected.clone()
    drive([request])
    return (corrected - before).tolist()


def reset_prefix_cache():
    assert _engine.reset_prefix_cache()


def load(late, short):
    """How a ``LateConnector`` loads from now on; see there."""
    connector = _engine.llm_engine.engine_core.engine_core.scheduler.connector
    connector.late, connector.short = late, short


def drive_preempting(requests):
    """The answers, and which requests were preempted, by number."""
    import pytest

    from tests.support.engine import preemptions

    with pytest.MonkeyPatch.context() as patch:
        preempted = preemptions(_engine, patch)
        answers = drive(requests)
    return answers, [request_id.split("-")[0] for request_id in preempted]


def assert_resumed(*args):
    """See ``tests.support.engine.assert_resumed``."""
    from tests.support.engine import assert_resumed

    assert_resumed(_engine, *args)


def plant(name):
    """Plant a fault of ``support/device_faults.py`` in the engine's ops; None: there is none."""
    from tests.support import device_faults

    device_faults.plant(name)


def follow(*args, **options):
    """See ``tests.support.drafter.Scripted.follow``; the drafts so far."""
    scripted = _runner().speculator.scripted
    drafted = scripted.drafted
    scripted.follow(*args, **options)
    return drafted


def trace(tokens):
    """What the last request, which was alone, has left, of ``tokens`` tokens in its context.

    Keys, values and records of the pages that it has filled, and what layers remember of it.
    """
    import torch

    from vllm_kvretrieval.retrieval.index import unpack

    runner, left = _runner(), []
    states, size = runner.req_states, runner.cache_config.block_size
    seat = next(iter(states.req_id_to_index.values()), states.free_indices[-1])
    blocks = runner.block_tables.input_block_tables[0][0, : -(-tokens // size)].long()
    for impl in runner.retrieval_layers.impls.values():
        chooser, held = impl.choosers[0], impl.choosers[0].selection
        parts = size // chooser.store.page_size
        pages = (blocks[:, None] * parts + torch.arange(parts)).flatten()
        pages = pages[: tokens // chooser.store.page_size]
        left.append(impl.units.unflatten(0, (-1, impl.num_kv_heads))[pages].clone())
        for store in impl.indexes:
            records = store.records.unflatten(0, (-1, store.parts))[pages].flatten(0, 2)
            layout = store.index.fields(store.head_size, store.entry_tokens)
            left += unpack(layout, records, store.dtype, store.alignment).values()
        left += [of[seat].clone() for of in (held.query, held.chosen, held.corrected)]
    return left


def metrics():
    """See ``tests.support.home_requests.metrics``; for an engine that keeps statistics."""
    from tests.support.home_requests import metrics

    return metrics(_engine)


def selections():
    """See ``tests.support.device_specification.selections``."""
    from tests.support.device_specification import selections

    return selections()


def kept():
    """Positions of the tokens kept of the prompt of the last request, which was alone: by layer and
    KV head."""
    runner = _runner()
    states = runner.req_states
    seat = next(iter(states.req_id_to_index.values()), states.free_indices[-1])
    held = [impl.choosers[0].selection for impl in runner.retrieval_layers.impls.values()]
    return [
        [
            of.chosen[seat, head, :count].tolist()
            for head, count in enumerate(of.counts[seat].tolist())
        ]
        for of in held
    ]


def launched_late():
    """See ``tests.support.device_launches.late``."""
    return device_launches.late()


def limits():
    """Most requests that the scheduler runs at once, and how many vLLM's runner has numbers for."""
    scheduler = _engine.llm_engine.engine_core.engine_core.scheduler
    states = _runner().req_states
    return scheduler.max_num_running_reqs, len(states.free_indices) + len(states.req_id_to_index)


def idle():
    """Whether nothing is beside the model between steps."""
    tier = _runner().retrieval_layers.tier
    return tier is None or tier.side.idle
