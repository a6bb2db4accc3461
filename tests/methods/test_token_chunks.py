"""How prompts are divided for sparse prefill, and what each chunk attends to; no engine."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.bare_engine import BareEngine
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.methods.prompt_chunks import Prompts
from vllm_kvretrieval.methods.token_chunks import TokenChunkPlanner
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions

pytestmark = pytest.mark.threads

BUDGET, CHUNK = 256, 100
EXACT = 300  # the first multiple of the chunk beyond the budget


def config(**options):
    sparse = {"prefill_budget": BUDGET, "prefill_chunk": CHUNK}
    return RetrievalConfig.from_options("omnikv", {"filters": [1, 9], **sparse, **options})


def divided(*contexts):
    """(request, end, new, sparse) of each chunk, given (tokens before, tokens of the step)."""
    before, new = np.array(contexts).T
    return list(zip(*TokenChunkPlanner(config(), 2).divide(before + new, new)[:4], strict=True))


def test_chunks_begin_at_multiples_of_their_length():
    assert divided((0, 512)) == [
        (0, 300, 300, False),
        (0, 400, 100, True),
        (0, 500, 100, True),
        (0, 512, 12, True),
    ]


@pytest.mark.parametrize("step", [1, 7, 64, 130, 299, 1000])
def test_a_division_depends_on_the_step_only_where_it_ends(step):
    """The borders of chunks do not depend on other requests, except that a step may end within a
    chunk."""
    ends = set()
    for before in range(0, 1000, step):
        new = min(step, 1000 - before)
        chunks = divided((before, new))
        assert sum(count for _, _, count, _ in chunks) == new
        for _, end, count, sparse in chunks:
            assert sparse == (end - count >= EXACT)
            assert count <= (CHUNK if sparse else EXACT)
            ends.add(int(end))
    assert ends == {*range(EXACT, 1001, CHUNK), *range(step, 1001, step), 1000}


@pytest.mark.parametrize("method", ["kvretrieval", "omnikv"])
def test_a_chunk_of_one_token_is_one(method):
    """The last one of a prompt, alone in a step, and beside others that decode."""
    options: dict[str, Any] = {
        "page_size": 32,
        "budget": 256,
        "prefill_budget": 256,
        "prefill_chunk": 128,
    }
    options |= {"filters": [1]} if method == "omnikv" else {"attention": "own"}
    others = [(300, 6), (340, 6)]
    exact, length = 384, 641

    def pairs(prompt):
        begins = range(exact, prompt, 128)
        parts = [(256, min(128, prompt - begin)) for begin in begins]
        return min(prompt, exact) * (min(prompt, exact) + 1) // 2 + sum(
            new * before + new * (new + 1) // 2 for before, new in parts
        )

    for company, steps in ((0, 640), (0, 384), (2, 642)):
        engine = BareEngine(method, options, seats=3, max_model_len=700, step_tokens=steps)
        for prompt, generates in others[:company]:
            engine.add({}, prompt, generates)
            engine.step()
        engine.add({}, length, 2)
        while engine.left:
            engine.step()
        counts = engine.worker.requests.counts()
        prompts = [length, *(prompt for prompt, _ in others[:company])]
        assert counts.prompt == sum(n * (n + 1) // 2 for n in prompts)
        assert counts.prompt_attended == sum(map(pairs, prompts))


def test_prompts_within_the_budget_are_one_exact_chunk_each():
    assert divided((0, 40), (250, 30), (40, 200)) == [
        (0, 40, 40, False),
        (1, 280, 30, False),
        (2, 240, 200, False),
    ]


def test_what_is_skipped_is_counted():
    lens, new = np.array([512, 280]), np.array([512, 30])
    # Before each of the sparse chunks lies more than the budget.
    skipped = 100 * (300 - 256) + 100 * (400 - 256) + 12 * (500 - 256)
    division = TokenChunkPlanner(config(), 2).divide(lens, new)
    assert division.skipped(2).tolist() == [skipped, 0]


def test_a_part_of_a_division_is_that_of_its_prompts():
    by, lens, new = (
        TokenChunkPlanner(config(), 2),
        np.array([512, 280, 460]),
        np.array([512, 30, 110]),
    )
    part = by.divide(lens, new).of(slice(1, 3))
    for ours, expected in zip(part, by.divide(lens[1:], new[1:]), strict=True):
        assert ours.tolist() == expected.tolist()


def test_rows_have_their_chunk_as_window():
    by, staging = TokenChunkPlanner(config(), 2), PrefillStaging(32, 2, 32, torch.float32, 1024)
    division = by.divide(np.array([512, 460]), np.array([512, 110]))
    table = torch.arange(2 * 16, dtype=torch.int32).view(2, 16)
    always, tokens = np.zeros((2, 2), int), np.array([512, 460])
    prompts = Prompts(0, division, always, tokens, table, 5, 3)
    blocks = -(-division.attended // staging.block_size)
    turns = staging.turns(blocks)
    made = [prompts.chunks(turn) for turn in turns]
    first, second, third = (by.plan(some) for some in made)
    assert [len(some.division.new) for some in made] == [2, 2, 2]  # 3 + 3, 3 + 1 of 8 blocks, ...
    assert [some.start for some in made] == [5, 405, 517]
    assert first.rows.seats.tolist() == [3, 4]
    assert third.rows.seats.tolist() == [7, 8]
    assert first.rows.block_table[:, 0].tolist() == [0, 0]
    assert third.rows.block_table[:, 0].tolist() == [16, 16]
    assert first.rows.seq_lens.tolist() == [300, 400]
    assert first.rows.select.tolist() == [0, by.select]
    assert first.rows.sink.tolist() == [0, by.sink]
    assert first.rows.window.tolist() == [300, by.window + 100]
    assert by.sink + by.window + by.select == BUDGET
    assert first.lists.lengths.tolist() == [300, 300, 356, 356]
    assert staging.block_table(blocks[turns[0]]).tolist() == [[0, 1, 2], [3, 4, 5]]
    queries = second.queries.view(2, 16)
    assert queries[0].tolist() == list(range(405 + 84, 405 + 100))
    assert queries[1, 4:].tolist() == list(range(505, 517))
    assert second.weights[1].tolist() == [0] * 4 + [1] * 12


def test_who_prefills_sparsely():
    served = config(also=["freekv"])
    exactly = config(also=["freekv"], prefill_budget=None, prefill_chunk=None)
    assert served.prefill_chunk == CHUNK
    for options, sparse in [
        ({}, True),
        ({"budget": 512}, True),
        ({"exact": True}, False),
        ({"method": "freekv"}, False),
        ({"method": "streamingllm"}, False),
    ]:
        parsed = RequestOptions.parse({"kv_retrieval": options}, served)
        assert (parsed.prefill_budget is not None) == sparse
        assert RequestOptions.parse({"kv_retrieval": options}, exactly).prefill_budget is None


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("omnikv", {"prefill_chunk": 64}, "prefill_chunk=64 has no effect without prefill_budget"),
        ("fier", {"prefill_budget": 1024}, "prefill_budget=1024 cannot be used with fier"),
        ("omnikv", {"prefill_budget": "1k"}, "prefill_budget='1k' must be a whole number"),
        ("omnikv", {"prefill_budget": 1000}, "prefill_budget=1000 must be a positive multiple"),
        ("omnikv", {"prefill_budget": 64}, "prefill_budget=64 is too small"),
        (
            "omnikv",
            {"prefill_budget": 1024, "prefill_chunk": 8},
            "prefill_chunk=8 must be 16 or more",
        ),
        (
            "omnikv",
            {"prefill_budget": 1024, "prefill_chunk": 0.5},
            "prefill_chunk=0.5 must be a whole number",
        ),
    ],
)
def test_refused(method, options, why):
    with pytest.raises(RetrievalConfigError, match=f"kv_retrieval.{why}"):
        RetrievalConfig.from_options(method, options)
