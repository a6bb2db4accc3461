"""An engine with a store, to be killed: ``python -m tests.store_crash MODEL DIR``.

Every chunk of a prompt is a block, and one request runs at a time: whatever is found and whatever
is computed, the same tokens have the same bytes.
"""

import dataclasses
import itertools
import random
import sys

from tests.engine import Request, drive, engine, prompt

BLOCK = 128
LENGTH, GENERATED = 6 * BLOCK + 20, 2 * BLOCK
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


def start(model, directory):
    """An engine whose store has room for a few of the prompts."""
    room = 40 * 3 * 2 * 2 * BLOCK * 64 * 2
    retrieval = {"home": "disk", "store": directory, "budget": 512, "home_bytes": room}
    return engine(model, **OPTIONS, additional_config={"kv_retrieval": retrieval})


def ask(llm, seed):
    (answer,) = drive(llm, [Request(prompt(LENGTH, seed), GENERATED, cache=True)])
    return dataclasses.replace(answer, steps=[])


def main():
    model, directory = sys.argv[1:]
    with start(model, directory) as llm:
        print("ready", flush=True)
        for _ in itertools.count():
            ask(llm, random.choice(SEEDS))


if __name__ == "__main__":
    main()
