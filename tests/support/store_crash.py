"""A server with a store, to be killed: front end, engine core and worker in processes of their own.

Every chunk of a prompt is a block, and one request runs at a time: whatever is found and whatever
is computed, the same tokens have the same bytes.
"""

import dataclasses
import itertools
import os
import random
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from vllm import LLM

from tests.support.engine import DTYPE, Request, drive, engine, prompt
from vllm_kvretrieval.upstream.defaults import all_cores

BLOCK = 128
LENGTH, GENERATED = 6 * BLOCK + 20, BLOCK + 20
SEEDS = range(8)
OPTIONS = {
    "attention_backend": "kvretrieval",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 1280,
    "max_num_seqs": 1,
    "max_num_batched_tokens": BLOCK,
    "kv_cache_memory_bytes": 64 << 20,
}


def retrieval(directory):
    """Options of a store that has room for a few of the prompts."""
    room = 40 * 3 * 2 * 2 * BLOCK * 64 * 2
    store = {"home": "disk", "store": directory, "home_bytes": room}
    return {"kv_retrieval": store | {"budget": 512, "attention": "vllm"}}


def start(model, directory):
    """The same engine with its scheduler in this process."""
    return engine(model, **OPTIONS, additional_config=retrieval(directory))


def ask(llm, seed):
    (answer,) = drive(llm, [Request(prompt(LENGTH, seed), GENERATED, cache=True)])
    return dataclasses.replace(answer, steps=[])


def serve(model: str, directory: str, ready: Connection, prompts: Sequence[int], seed: int) -> None:
    """Be the front end, and ask at random, by ``seed``, until the end; SIGTERM is an orderly one.

    What is asked are ``prompts``, by their seeds.

    To be run in a process of :func:`tests.support.workers.context`, which forks the others, too.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    os.environ |= all_cores() | {"TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    llm = LLM(
        model,
        dtype=DTYPE,
        distributed_executor_backend="mp",
        disable_log_stats=True,
        additional_config=retrieval(directory),
        **OPTIONS,
    )
    try:
        ready.send(True)
        chance = random.Random(seed)
        for _ in itertools.count():
            ask(llm, chance.choice(prompts))
    finally:
        llm.llm_engine.engine_core.shutdown()
