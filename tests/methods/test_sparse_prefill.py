"""Sparse prefill served: an independent replay of chunks, company, and the prefix cache.

One engine. Its model runs in float32, so that rounding leaves next to nothing open. Its steps have
room for more than whole chunks.
"""

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
    preemptions,
    shortened,
)

pytestmark = [pytest.mark.engine, pytest.mark.model]

LAYERS = 10
FILTERS = [1, 5]
REPLAYED = [3, 4, 7, 9]
BUDGET = 256
PARTS = 32, 64, 160  # sink, window and selection of it
CHUNK = 96
EXACT = 288  # the first multiple of the chunk beyond the budget
STEP = 350
BLOCK = 128
BOTH = 384  # the least tokens that are whole chunks and whole blocks
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with engine(
        shortened(tmp_path_factory.mktemp("model"), "SmolLM2-135M-Instruct", LAYERS),
        attention_backend="omnikv",
        additional_config={
            "kv_retrieval": {
                "budget": 256,
                "max_budget": 2048,
                "prefill_budget": BUDGET,
                "prefill_chunk": CHUNK,
                "filters": FILTERS,
            }
        },
        worker_extension_cls="tests.support.token_chunk_recorder.TokenChunkRecorder",
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=STEP,
        num_gpu_blocks_override=26,
        enforce_eager=True,
    ) as llm:
        yield llm


def recorded(llm, requests):
    llm.collective_rpc("start_recording_chunks", args=(FILTERS, REPLAYED, PARTS, CHUNK))
    answers = drive(llm, requests)
    (summary,) = llm.collective_rpc("recording_of_chunks")
    assert summary["differ"] == summary["left"] == 0
    assert summary["near_ties"] < 1e-3 * summary["selected"]
    assert summary["worst_error"] < 1e-4
    assert summary["sparse"] > 0
    return answers, summary


def test_a_replay_of_the_paper_gives_the_same(llm):
    """Prompts of different lengths, of which some are exact, that come while others decode."""
    requests = [
        Request(novel(llm, 500, 50), 6, {}),
        Request(novel(llm, 800, 100), 6, {"budget": 512}, arrives=1),
        Request(novel(llm, 450, 150), 6, {"exact": True}, arrives=2),
        Request(novel(llm, 230, 10), 6, {}, arrives=3),
        Request(novel(llm, 500, 10), 6, {"method": "streamingllm"}, arrives=9),
    ]
    answers, summary = recorded(llm, requests)
    assert summary["exact"] > 0
    exact = alone(llm, requests[2])
    assert_same(answers[2], exact, TOLERANCE)


def test_prompts_within_the_budget_are_exact(llm):
    """Decoding is, too: requests may raise their budgets."""
    for length, same in ((EXACT, True), (EXACT + 100, False)):
        prompt = novel(llm, length, 50)
        exact = alone(llm, Request(prompt, 4, {"exact": True}))
        sparse = alone(llm, Request(prompt, 4, {"budget": 1024}))
        if same:
            assert_same(sparse, exact, TOLERANCE)
        else:
            assert difference(sparse, exact) > TOLERANCE


def test_exact_requests_read_only_exact_chunks_of_sparse_ones(llm):
    prompt = novel(llm, 700, 200)

    def ask(options):
        return drive(llm, [Request(prompt, 8, options, cache=True)])[0]

    exact = alone(llm, Request(prompt, 8, {"exact": True}))
    llm.reset_prefix_cache()
    sparse = ask({"budget": 1024})
    assert difference(sparse, exact) > TOLERANCE
    full, shared = 700 // BLOCK * BLOCK, EXACT // BLOCK * BLOCK
    for cached in (shared, full):  # at first the exact chunks of the other, then its own
        answer = ask({"exact": True})
        assert answer.cached == cached
        assert_same(answer, exact, TOLERANCE)
    assert ask({"budget": 1024}).cached == BOTH, "sparse prefill goes on from exact blocks"


def test_company_changes_nothing(llm):
    """Nor does a prefix in the cache: steps and hits end with a chunk, which may be a token."""
    others = [Request(novel(llm, n, n), 20, {}, arrives=a) for n, a in ((333, 0), (701, 1))]
    prompt = novel(llm, 769, 50)
    expected = alone(llm, Request(prompt, 4, {}))
    llm.reset_prefix_cache()
    for cached in (0, 768):
        answer = drive(llm, [*others, Request(prompt, 4, {}, arrives=2, cache=True)])[-1]
        assert answer.cached == cached
        assert_same(answer, expected, TOLERANCE)


def test_prefix_hits_are_replayed(llm):
    """Chunks go on where the hit ends, at the border of one."""
    prompt = novel(llm, 800, 250)
    requests = [Request(prompt + novel(llm, n, 400), 4, {}, cache=True) for n in (0, 300)]
    llm.reset_prefix_cache()
    answers, _ = recorded(llm, requests[:1])
    answers += recorded(llm, requests[1:])[0]
    assert [answer.cached for answer in answers] == [0, 800 // BOTH * BOTH]


def test_preempted_prompts_are_replayed(llm, monkeypatch):
    """The cache holds three prompts, and not what they decode: requests start anew."""
    preempted = preemptions(llm, monkeypatch)
    requests = [Request(novel(llm, 1020, 100 * i), 12, {}) for i in range(3)]
    answers, _ = recorded(llm, requests)
    assert preempted
    assert all(len(answer.tokens) == 12 for answer in answers)


def test_what_prefill_attended_to_is_counted(llm):
    assert attended_share(llm, 900, {"exact": True}) == 1
    for length in (900, 865):  # the latter in steps of 288 tokens, and a last one of a single token
        # Tokens attend to the budget, and to those of their chunk.
        parts = [min(CHUNK, length - begin) for begin in range(EXACT, length, CHUNK)]
        pairs = EXACT * (EXACT + 1) // 2 + sum(n * BUDGET + n * (n + 1) // 2 for n in parts)
        assert attended_share(llm, length, {}) == pairs / (length * (length + 1) // 2)
