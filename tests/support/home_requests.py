"""Requests to engines whose KV cache is on disk, and what these report.

Tokens per request and the cache are chosen so that requests outgrow it, and meet in it.
"""

from itertools import count
from typing import Any

import torch

from tests.support.engine import Request, drive, prompt

BUDGET = {"budget": 128, "sink": 32, "window": 32}  # in pages: 1, 1, and 2 selected
ALSO: dict[str, Any] = {
    "kvretrieval": {},
    "sums": {"index": "one_bit", "pooling": "sum", "summary_size": 16},
}
LAYERS, KV_HEADS, HEAD_SIZE = 4, 4, 64
SEQUENCES = 4
REQUESTS, LONG = 48, 185  # of a random life
BLOCKS = 26
CHUNK = 256
LEAST_SLOTS = SEQUENCES * KV_HEADS * 4
SLOT_BYTES = (LAYERS - 1) * (2 * 32 * HEAD_SIZE * 4 + 24)
OPTIONS: dict[str, Any] = {
    "attention_backend": "freekv",
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": SEQUENCES,
    "max_num_batched_tokens": CHUNK,
    "num_gpu_blocks_override": BLOCKS,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "worker_extension_cls": "tests.support.home_worker.HomeWorker",
}


DOCUMENT = prompt(700, 100)


def crowd():
    """Different lengths, options, arrivals and ends; some exact, some within the budget."""
    return [
        Request(prompt(600, 0), 40, {}),
        Request(prompt(60, 1), 90, {}),
        Request(prompt(1100, 2), 24, {"budget": 96}, arrives=3),
        Request(prompt(500, 3), 12, {"method": "streamingllm"}, arrives=5),
        Request(prompt(700, 4), 30, {"correction_threshold": 1.0}, arrives=14),
        Request(prompt(500, 5), 20, {"exact": True}, arrives=20),
        Request(prompt(650, 6), 16, {"correction_threshold": -1.0}, arrives=21),
        Request(prompt(30, 7), 9, {"exact": False}, arrives=30),
        Request(prompt(385, 8), 9, {}, arrives=31),
    ]


def shared():
    """Prefix hits, on pages of requests that run and of requests that are gone, and aborts."""
    question = prompt(50, 101)
    return [
        Request(DOCUMENT, 30, {}, cache=True),
        Request(DOCUMENT, 40, {"correction_threshold": 1.0}, arrives=8, cache=True),
        Request(DOCUMENT + question, 20, {}, arrives=9, cache=True, aborts=16),
        Request(DOCUMENT + question, 30, {}, arrives=20, cache=True),
        Request(prompt(900, 9), 30, {}, arrives=22, aborts=24),
        Request(DOCUMENT[:400], 20, {}, arrives=60, cache=True),
    ]


def outgrowing():
    """Three requests that outgrow the cache; one is preempted and resumed."""
    return [Request(prompt(n, n), 40, {}) for n in (1011, 1010, 950)]


def life(count):
    """Thousands of steps of random requests: they come, share beginnings, outgrow the cache, go."""
    random = torch.Generator().manual_seed(200)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=random))

    options: list[dict[str, Any]] = [
        {},
        {"method": "kvretrieval"},
        {"correction_threshold": 1.0},
        {"budget": 96},
        {"method": "streamingllm"},
        {"exact": True},
    ]
    requests, step = [], 0
    for i in range(count):
        shared = DOCUMENT[: integer(0, 2) * integer(1, len(DOCUMENT))]
        step += integer(0, 24)
        requests.append(
            Request(
                shared + prompt(integer(1, 1000), 300 + i),
                integer(2, 90),
                options[integer(0, len(options))],
                arrives=step,
                aborts=step + integer(1, 60) if integer(0, 6) == 0 else None,
                cache=bool(shared),
            )
        )
    return requests


def methods():
    """Several in one batch, on pages of one document and on their own, within budget and not."""
    return [
        Request(DOCUMENT, 30, {"method": "kvretrieval"}, cache=True),
        Request(DOCUMENT, 30, {}, arrives=6, cache=True),
        Request(DOCUMENT, 30, {"method": "sums"}, arrives=7, cache=True),
        Request(prompt(60, 10), 40, {"method": "kvretrieval"}, arrives=8),
        Request(prompt(500, 11), 20, {"method": "kvretrieval", "budget": 96}, arrives=30),
        Request(prompt(400, 12), 20, {"method": "streamingllm"}, arrives=32),
        Request(DOCUMENT, 20, {"method": "kvretrieval", "exact": True}, arrives=36, cache=True),
    ]


SCENARIOS = {"methods": methods, "crowd": crowd, "shared": shared, "outgrowing": outgrowing}


def settle(llm):
    """Run one more step, in which the worker learns which requests have finished."""
    drive(llm, [Request(prompt(40, 0), 1, {})])


def metrics(llm):
    """vLLM's Prometheus metrics: what is there of ours."""
    found = {m.name: m.value for m in llm.get_metrics() if "kv_retrieval" in m.name}
    return {name.removeprefix("vllm:kv_retrieval_"): value for name, value in found.items()}


def counted(llm):
    """How a request that corrects every head changes the metrics, and its heads and steps."""
    settle(llm)
    before = metrics(llm)
    request = Request(prompt(700, 40), 12, {"correction_threshold": 1.0})
    drive(llm, [request])
    after = metrics(llm)
    change = {name: after[name] - before[name] for name in after}
    return change, (LAYERS - 1) * KV_HEADS * (request.tokens - 1)


def compared_with_home(llm):
    """How many tokens the home holds as the model made them, and what each request has written."""
    llm.reset_prefix_cache()
    llm.collective_rpc("record_writes")
    requests = [Request(prompt(700, 50), 40, {}), Request(prompt(60, 51), 20, {}, arrives=4)]
    drive(llm, requests)
    (compared,) = llm.collective_rpc("compare_home")
    return compared, [len(r.prompt) + r.tokens - 1 for r in requests]


def lose_home_after(llm, *moments):
    """A home is lost after each of these numbers of steps.

    Requests fail then, whatever they do with it: read prompts, attend to all, to what is selected,
    to a short text. The same ones to a new home are answered as before.
    """
    requests = {
        "sparse": Request(prompt(700, 62), 30, {}),
        "exact": Request(prompt(600, 63), 30, {"exact": True}),
        "short": Request(prompt(34, 64), 30, {}),
        "late": Request(prompt(1900, 65), 30, {}),
    }
    alone = [drive(llm, [request]) for request in requests.values()]
    for steps in moments:
        reasons = reasons_to_finish(llm, requests, {steps: "lose_home"})
        assert reasons == dict.fromkeys(requests, "error"), steps
        llm.collective_rpc("renew_home")
        settle(llm)
        assert [drive(llm, [request]) for request in requests.values()] == alone, steps


def reasons_to_finish(llm, requests, faults):
    """The reasons of requests to finish, while faults occur after given numbers of steps."""
    core = llm.llm_engine
    reasons = {}
    for name, request in requests.items():
        core.add_request(name, {"prompt_token_ids": request.prompt}, request.params())
    for step in count():
        if step in faults:
            llm.collective_rpc(faults[step])
        for output in core.step():
            if output.finished:
                reasons[output.request_id] = output.outputs[0].finish_reason
        if not core.has_unfinished_requests():
            return reasons
