"""Prompts that retrieve, served: an independent replay of chunks, company, and the prefix cache.

One engine with its KV cache in memory, two with it in a file. The model runs in float32, so that
rounding leaves next to nothing open.
"""

import math
from contextlib import contextmanager

import pytest

from tests.support.engine import (
    Request,
    alone,
    assert_same,
    attended_share,
    difference,
    drive,
    engine,
    novel,
    shortened,
)
from tests.support.recorder_scores import Method

pytestmark = [pytest.mark.engine, pytest.mark.model]

LAYERS = 5
BUDGET, OWN = 512, 256
SHARE, OWN_SHARE = 0.75, 0.4375  # of the tokens before a chunk
PAGE, SINK, WINDOW = 32, 1, 2  # tokens, and pages
LAYERS_REPLAYED = [0, 3]  # counted from the first behind the dense one
CHUNK, QUERIES = 64, 4
EXACT = 576  # the first multiple of the chunk beyond the budget
SHARES: list[list[float]] = [
    [3, 0, 1],
    [0.5, 1, 1],
    [1, 2.5, 0],
    [1.5, 0, 0.5],
]  # of KV heads, by layer
STEP = 350
CACHE = 128  # tokens of a block of the prefix cache
TOLERANCE = 2e-4

ERRORS = {"device": 1e-4, "raw": 1e-4, "k8v4": 7e-2}
"""Of attention relative to the largest value, by home or codec: values of 4 bits are off by up to a
fifteenth."""


@contextmanager
def serving(directory, **home):
    """An engine whose prompts retrieve."""
    with engine(
        shortened(directory, "SmolLM2-135M-Instruct", LAYERS),
        attention_backend="kvretrieval",
        additional_config={
            "kv_retrieval": {
                "budget": 256,
                "max_budget": 2048,
                "sink": 32,
                "window": 64,
                "also": ["freekv", "shadowkv", "snapkv"],
                "prefill_budget": BUDGET,
                "prefill_share": SHARE,
                "prefill_chunk": CHUNK,
                "prefill_queries": QUERIES,
                "attention": "own",
                **home,
            }
        },
        worker_extension_cls="tests.support.page_chunk_recorder.PageChunkRecorder",
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=STEP,
        enforce_eager=True,
        num_gpu_blocks_override=100,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("model")) as llm:
        yield llm


def pages_before(begin, options):
    """Pages that a chunk attends to before it, given its first token and a request's options."""
    tokens, share = options.get("prefill_budget", BUDGET), options.get("prefill_share", SHARE)
    return max(tokens // PAGE, math.ceil(share * begin / PAGE))


def budgets(requests, depth):
    """The method, first token and budget in pages of each chunk behind the exact ones, in each
    layer."""

    def selected(request, begin, layer):
        last = begin + CHUNK >= len(request.prompt)
        if 1 + layer >= depth * LAYERS and not last:
            return 0
        return pages_before(begin, request.options) - SINK - WINDOW

    return [
        (
            request.options.get("method", "kvretrieval"),
            begin,
            (SINK, WINDOW, selected(request, begin, layer)),
        )
        for request in requests
        if request.options.get("method") != "snapkv" and not request.options.get("exact")
        for begin in range(EXACT, len(request.prompt), CHUNK)
        for layer in LAYERS_REPLAYED
    ]


def replay(llm, error, exact, sampling="spread", pooling=None, depth=1.0, shares=()):
    """Prompts of different lengths and options, of which some are exact, while others decode."""
    own = pooling or "mean_softmax"
    methods = {"kvretrieval": Method("low_rank", own), "freekv": Method(pooling=own)}
    marks = Method("landmark", pooling or "max_softmax", entry_tokens=8, outliers=0.158)
    methods["shadowkv"] = marks
    own_share = {"prefill_share": OWN_SHARE}
    requests = [
        Request(novel(llm, 897, 50), 6, {}),
        Request(novel(llm, 1100, 100), 6, own_share | {"prefill_budget": OWN}, arrives=1),
        Request(novel(llm, 700, 150), 6, {"exact": True}, arrives=2),
        Request(novel(llm, 230, 10), 6, {}, arrives=3),
        Request(novel(llm, 800, 10), 6, {"method": "freekv", "prefill_share": 0}, arrives=9),
        Request(novel(llm, 700, 30), 6, exact, arrives=10),
        Request(novel(llm, 750, 70), 6, {"method": "shadowkv"}, arrives=11),
    ]
    rule = LAYERS_REPLAYED, CHUNK, QUERIES, EXACT, sampling
    llm.collective_rpc("start_recording_chunks", args=rule)
    drive(llm, requests)
    early = {n: row for n, row in enumerate(shares) if 1 + n < depth * LAYERS}
    expected = methods, budgets(requests, depth), early
    (summary,) = llm.collective_rpc("check_chunks", args=expected)
    assert summary["sparse"] == 2 * (6 + 9 + 4 + 3)
    assert summary["of another budget"] == 0
    assert summary["exact"] > 0
    assert summary["wrong"] == 0
    # The other index rounds what it holds, which the replay only bounds.
    assert summary["near ties of freekv"] == 0 < summary["selected by freekv"]
    assert summary["selected by shadowkv"] > 0
    assert summary["worst_error"] < error


def test_a_replay_gives_the_same(llm):
    replay(llm, ERRORS["device"], {"method": "snapkv"})


@pytest.mark.parametrize(
    ("codec", "sampling", "pooling", "depth"),
    [("raw", "dissimilar", "max", 0.8), ("k8v4", "spread", "mean_softmax", 1.0)],
)
def test_a_replay_from_a_file_gives_the_same(tmp_path, codec, sampling, pooling, depth):
    """Its pages are read where they are mapped, or decoded first."""
    options = {"home": "disk", "codec": codec, "home_path": str(tmp_path)}
    options |= {"prefill_sampling": sampling, "prefill_pooling": pooling, "prefill_depth": depth}
    options |= {"prefill_budget_shares": SHARES}
    with serving(tmp_path, **options, also=["freekv", "shadowkv"]) as llm:
        replay(llm, ERRORS[codec], {"exact": True}, sampling, pooling, depth, SHARES)
        late = [1 + n >= depth * LAYERS for n in range(len(SHARES))]
        expected = [
            share_of(900, {}, late=True) if behind else share_of(900, {}, share)
            for behind, row in zip(late, SHARES, strict=True)
            for share in row
        ]
        assert attended_share(llm, 900, {}) == pytest.approx(sum(expected) / 12, rel=1e-5)


@pytest.mark.parametrize("length", [pytest.param(1200, marks=pytest.mark.slow), 1281])
def test_company_changes_nothing(llm, length):
    """Steps end with a chunk, however many tokens the other requests leave to a prompt; and a chunk
    is one that has a single token, alone in its step or not."""
    first = Request(novel(llm, length, 50), 8, {})
    expected = alone(llm, first)
    others = [Request(novel(llm, n, n), 20, {}, arrives=a) for n, a in ((333, 0), (901, 1))]
    for arrives in (0, 2):
        request = Request(first.prompt, first.tokens, {}, arrives=arrives)
        answers = drive(llm, [*others, request])
        assert_same(answers[-1], expected, TOLERANCE)


def test_prompts_within_the_budget_are_exact(llm):
    """And all that ask for it; decoding is, too: requests may raise their budgets."""
    whole = {"budget": 2048}
    for length, same in ((EXACT, True), (EXACT + 300, False)):
        prompt = novel(llm, length, 50)
        exact = alone(llm, Request(prompt, 4, {"exact": True}))
        sparse = alone(llm, Request(prompt, 4, whole))
        if same:
            assert_same(sparse, exact, TOLERANCE)
        else:
            assert difference(sparse, exact) > TOLERANCE
            own = alone(llm, Request(prompt, 4, whole | {"prefill_budget": OWN}))
            assert difference(own, sparse) > TOLERANCE
        assert_same(alone(llm, Request(prompt, 4, whole | {"prefill_budget": 0})), exact, TOLERANCE)


def test_an_answer_after_a_hit_is_the_same(llm):
    """Of the prefix cache; chunks go on behind it."""
    prompt = novel(llm, 1000, 250)
    request = Request(prompt + novel(llm, 300, 400), 6, {}, cache=True)
    expected = alone(llm, request)
    llm.reset_prefix_cache()
    drive(llm, [Request(prompt, 2, {}, cache=True)])
    (answer,) = drive(llm, [request])
    assert answer.cached == 1000 // CACHE * CACHE
    assert_same(answer, expected, TOLERANCE)


def test_a_prompt_that_is_found_is_answered_as_before(llm):
    """Its last token, which is computed anew, is a chunk."""
    request = Request(novel(llm, 1025, 150), 6, {}, cache=True)
    llm.reset_prefix_cache()
    cold, found = (drive(llm, [request])[0] for _ in range(2))
    assert (cold.cached, found.cached) == (0, 1024)
    assert_same(found, cold, TOLERANCE)
    exact = alone(llm, Request(request.prompt, 6, {"exact": True}))
    assert difference(cold, exact) > TOLERANCE


def test_a_small_budget_of_one_request_is_not_that_of_others(llm):
    """What it has read is read anew for those that ask for more, and shared with its like."""
    prompt, after = novel(llm, 1000, 300), novel(llm, 60, 500)
    small = {"prefill_budget": OWN, "prefill_share": 0}
    request = Request(prompt + after, 4, {}, cache=True)
    expected = alone(llm, request)
    llm.reset_prefix_cache()
    drive(llm, [Request(prompt, 1, small, cache=True)])
    again = drive(llm, [Request(prompt + after[:5], 1, small, cache=True)])[0]
    answer = drive(llm, [request])[0]
    assert (again.cached, answer.cached) == (1000 // CACHE * CACHE, EXACT // CACHE * CACHE)
    assert_same(answer, expected, TOLERANCE)
    poorer = alone(llm, Request(request.prompt, 4, small))
    assert difference(poorer, expected) > TOLERANCE


def test_exact_requests_read_only_exact_blocks_of_sparse_ones(llm):
    prompt = novel(llm, 1000, 200)

    def ask(options):
        return drive(llm, [Request(prompt, 4, options, cache=True)])[0]

    exact = alone(llm, Request(prompt, 4, {"exact": True}))
    llm.reset_prefix_cache()
    ask({})
    assert ask({"exact": True}).cached == EXACT // CACHE * CACHE
    answer = ask({"exact": True})
    assert answer.cached == 1000 // CACHE * CACHE
    assert_same(answer, exact, TOLERANCE)


def share_of(length, options, share=1.0, late=False):
    """The share of the pairs of tokens of a prompt that a KV head attends to."""
    pairs = EXACT * (EXACT + 1) // 2
    for begin in range(EXACT, length, CHUNK):
        new = min(CHUNK, length - begin)
        selects = not late or begin + new == length
        select = round(share * (pages_before(begin, options) - SINK - WINDOW)) * selects
        pages = min(SINK + WINDOW + select, begin // PAGE)
        pairs += new * PAGE * pages + new * (new + 1) // 2
    return pairs / (length * (length + 1) // 2)


def test_pairs_attended_to_are_counted(llm):
    assert attended_share(llm, 900, {"exact": True}) == 1
    for options in ({}, {"prefill_budget": OWN, "prefill_share": 0}):
        for length in (900, 961):  # in steps of 320 tokens
            assert attended_share(llm, length, options) == share_of(length, options)
