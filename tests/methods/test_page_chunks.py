"""How prompts are divided into chunks that select pages, and the options for it; no engine."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.spec import ops as reference
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import Chooser, IndexRecords, Selection, cpu
from vllm_kvretrieval.methods.page_chunks import PageChunkPlanner, PromptReads, is_late
from vllm_kvretrieval.methods.prompt_chunks import Prompts
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.retrieval.index import make_index
from vllm_kvretrieval.retrieval.pooling import Pooling
from vllm_kvretrieval.retrieval.prompt_shares import ONE_IN

pytestmark = pytest.mark.threads

BUDGET, CHUNK, PAGE = 256, 64, 32
EXACT = 320  # the first multiple of the chunk beyond the budget
PARTS = 1, 2, 5


def config(method="kvretrieval", **options):
    sparse = {"prefill_budget": BUDGET, "prefill_chunk": CHUNK, "sink": 32, "window": 64}
    return RetrievalConfig.from_options(method, {**sparse, **options})


def planned(*contexts, queries=4, budget=PARTS, share=0.0, more=1, **options):
    """The chunks of requests, given (tokens before, tokens of the step); their first token is 5.

    Their prompts have some more tokens.
    """
    before, new = np.array(contexts).T
    planner = PageChunkPlanner(config(prefill_queries=queries, **options), kv_heads=2)
    budgets = np.repeat(np.array(budget)[:, None], len(new), 1)
    table = torch.arange(len(new) * 32, dtype=torch.int32).view(len(new), 32)
    shares = np.full(len(new), share)
    division = planner.divide(before + new, new, budgets.sum(0) * PAGE, shares)
    tokens = before + new + more
    return planner.plan(Prompts(0, division, budgets[:2], tokens, table, 5, 0)), division


def seen_of(chunks):
    """Tokens that the first query of each chunk sees, the same for both KV heads."""
    first, second = chunks.lists.seen.view(-1, 2).T.tolist()
    assert first == second
    return first


def test_rows_have_their_chunk_as_window():
    chunks, division = planned((0, 430), (384, 64))
    rows = chunks.rows
    assert rows.seq_lens.tolist() == [320, 384, 430, 448]
    assert rows.sink.tolist() == [0, 1, 1, 1]
    assert rows.window.tolist() == [10, 4, 4, 4]
    assert rows.select.tolist() == [0, 5, 5, 5]
    assert rows.block_table[:, 0].tolist() == [0, 0, 0, 32]
    assert chunks.lists.starts.tolist() == [0, 320, 384, 430, 494]
    attended = [320, 256 + 64, 256 + 46, 256 + 64]
    assert division.attended.tolist() == attended
    assert seen_of(chunks) == [1, 257, 257, 257]


def test_the_last_query_of_each_part_of_a_chunk_selects():
    chunks, _ = planned((320, 64), (384, 3))
    assert chunks.queries.tolist() == [
        [5 + 15, 5 + 31, 5 + 47, 5 + 63],
        [69, 69 + 0, 69 + 1, 69 + 2],
    ]


def test_the_queries_least_like_their_mean_select():
    """Each query head has its own; a short chunk takes some more than once."""
    torch.manual_seed(0)
    query = torch.randn(80, 6, 64) * 0.1 + torch.randn(6, 64)
    odd = {(0, 0): [12, 25], (0, 1): [13, 14], (1, 5): [71]}  # (chunk, head): its odd queries
    for (_, head), places in odd.items():
        query[places, head] *= -1
    chunks, _ = planned((320, 64), (384, 3), queries=2, prefill_sampling="dissimilar")
    grouped = chunks.grouped(query, 2)
    assert grouped.shape == (2, 2 * 2 * 3, 64)
    of_heads = grouped.view(2, 2, 2, 3, 64).transpose(2, 3).flatten(1, 2)
    for (chunk, head), places in odd.items():
        same = (of_heads[chunk, head][:, None] == query[places, head]).all(-1)
        assert same.any(0).all()


def test_a_short_chunk_takes_each_query_once():
    """As long as there are others; those that are listed again do not count in the mean."""
    torch.manual_seed(1)
    query = torch.randn(30, 6, 64) + torch.randn(6, 64)
    chunks, _ = planned((320, 5), (384, 20), queries=4, prefill_sampling="dissimilar")
    of_heads = chunks.grouped(query, 2).view(2, 2, 4, 3, 64).transpose(2, 3).flatten(1, 2)
    for chunk, places in enumerate((range(5, 10), range(10, 30))):
        own = query[places.start : places.stop]
        cosines = torch.cosine_similarity(own, own.mean(0, keepdim=True), dim=-1)
        for head in range(6):
            least = own[cosines[:, head].argsort()[:4], head]
            assert torch.equal(of_heads[chunk, head], least)


def test_late_layers_select_for_the_last_chunk_alone():
    """The last one of a prompt, not of a step."""
    chunks, _ = planned((0, 430), (384, 64), prefill_depth=0.5, more=np.array([1, 0]))
    late, early = chunks.of_layer(True), chunks.of_layer(False)
    assert early is chunks
    assert early.rows.select.tolist() == [0, 5, 5, 5]
    assert late.rows.select.tolist() == [0, 0, 0, 5]
    assert late.rows.sink.tolist() == early.rows.sink.tolist()
    assert late.rows.window.tolist() == early.rows.window.tolist()
    assert seen_of(early) == [1, 257, 257, 257]
    assert seen_of(late) == [1, 97, 97, 257]
    assert late.lists.starts.tolist() == early.lists.starts.tolist()
    assert planned((320, 64), more=0)[0].late is None


def test_heads_with_shares_of_their_own():
    """Lists have the lengths that were planned, also where pages are laid out elsewhere, and room
    for the largest share. No head reads more than there is."""
    before, new = np.array([(384, 64), (384, 20)]).T
    planner = PageChunkPlanner(config(), 2, PromptReads(shares=np.full((1, len(ONE_IN)), 1.5)))
    budgets = np.repeat(np.array(PARTS)[:, None], 2, 1)
    table = torch.arange(64, dtype=torch.int32).view(2, 32)
    division = planner.divide(before + new, new)
    staged = torch.cat([torch.arange(64).flip(0), torch.tensor([-1])])
    # Five pages are selected of nine: one in two; others would select all.
    shares = torch.full((len(ONE_IN), 2), 9.0, dtype=torch.float64)
    shares[ONE_IN.index(2)] = torch.tensor([0.5, 1.5])
    for pages in (None, staged):
        chunks = planner.plan(Prompts(0, division, budgets[:2], before + new, table, 0, 0, pages))
        assert chunks.counts(shares).tolist() == [[2, 8]] * 2
        assert chunks.rows.lists.shape == (4, 13)
        chunks.rows.lists.copy_(torch.tensor([[10], [11], [70], [71]]))  # page 5, and page 35
        lengths = [7 * PAGE, 13 * PAGE, 6 * PAGE - 12, 12 * PAGE - 12]
        chunks.rows.lengths.copy_(torch.tensor(lengths))
        lists = chunks.listed()
        at = [*range(64)] if pages is None else [*range(63, -1, -1)]
        expected = [2 * at[5], 2 * at[5] + 1, 2 * at[35], 2 * at[35] + 1]
        assert lists.entries.tolist() == [[entry] * 13 for entry in expected]
        assert lists.seen.tolist() == [161, 353, 161, 353]
    of_heads = np.full((4, len(ONE_IN)), 9.0)
    of_heads[:, ONE_IN.index(2)] = [0.5, 1, 1.5, 4]  # select 2, 5, 8, and 9, which are all
    planner = PageChunkPlanner(config(), 2, PromptReads(0.25, of_heads))
    skipped = planner.skipped(division, budgets[:2], before + new + 1)
    late = 12 - 3  # which attend to sink and window
    assert skipped.tolist() == [(0.75 * (9 - 6) + 0.25 * late) * PAGE * n for n in (64, 20)]


@pytest.mark.parametrize(("depth", "first"), [(0.5, 12), (0.7, 17), (1.0, None)])
def test_the_first_late_layer(depth, first):
    of_depth = config(prefill_depth=depth)
    late = [number for number in range(24) if is_late(of_depth, number, 24)]
    assert late == ([] if first is None else [*range(first, 24)])
    assert not is_late(RetrievalConfig.from_options("kvretrieval", {}), 23, 24)


def test_a_budget_of_a_request():
    chunks, division = planned((320, 64), budget=(1, 1, 2))
    assert chunks.rows.select.tolist() == [2]
    assert chunks.rows.window.tolist() == [3]
    assert division.attended.tolist() == [128 + 64]


def test_a_share_of_the_context():
    """It counts where it is more than the budget, and is rounded up to pages."""
    chunks, division = planned((0, 1000), share=0.4)
    begins, ends = [*range(EXACT, 1000, CHUNK)], [*range(EXACT + CHUNK, 1000, CHUNK), 1000]
    pages = [max(8, -(-begin * 2 // (5 * PAGE))) for begin in begins]
    assert pages[:2] == [8, 8]
    assert pages[-1] == 12
    assert chunks.rows.select.tolist() == [0, *(count - 3 for count in pages)]
    assert chunks.rows.sink.tolist() == [0] + [1] * len(begins)
    assert chunks.rows.window.tolist() == [10] + [4] * len(begins)
    new = [end - begin for begin, end in zip(begins, ends, strict=True)]
    attended = [EXACT, *(PAGE * count + own for count, own in zip(pages, new, strict=True))]
    assert division.attended.tolist() == attended
    assert (chunks.lists.seen[::2] + chunks.lists.starts.diff() - 1).tolist() == attended


@pytest.mark.parametrize("percent", [7, 55, 29, 99])
def test_shares_are_those_that_are_written(percent):
    """A product of floats may lie above the whole number that is meant."""
    planner = PageChunkPlanner(config(prefill_share=percent / 100), kv_heads=2)
    division = planner.divide(np.array([3300]), np.array([3300]))
    begins = (division.ends - division.new)[division.sparse].tolist()
    pages = [max(BUDGET // PAGE, -(-begin * percent // (100 * PAGE))) for begin in begins]
    attended = (division.attended - division.new)[division.sparse]
    assert attended.tolist() == [PAGE * count for count in pages]


@pytest.mark.parametrize("share", [0.3, 0.55, 0.999])
@pytest.mark.parametrize("first", [350, 384, 400, 777])
def test_a_share_does_not_depend_on_where_steps_or_prefixes_end(share, first):
    """A chunk that begins behind a prefix in its middle attends to as much as the whole chunk, and
    to its tokens of the page in which it begins."""
    _, whole = planned((0, 1000), share=share)
    pieces = [planned(part, share=share)[1] for part in ((0, first), (first, 1000 - first))]

    def before(division):
        """Tokens in pages before a chunk that it attends to, by the border that the chunk begins
        at."""
        begins = division.ends - division.new
        tokens = division.attended - division.new - np.where(division.sparse, begins % PAGE, 0)
        found = zip((begins // CHUNK * CHUNK).tolist(), tokens.tolist(), strict=True)
        return {border: tokens for border, tokens in found if border >= EXACT}

    expected = before(whole)
    for piece in pieces:
        assert before(piece).items() <= expected.items()


def test_pairs_of_a_chunk_that_begins_within_a_page():
    """Such as behind an earlier input of a session. The first one has ten whole pages before it,
    the second one twelve, of which eight are attended to."""
    chunks, division = planned((350, 34), (384, 10))
    assert chunks.rows.select.tolist() == [5, 5]
    assert division.skipped(2).tolist() == [34 * 2 * PAGE, 10 * 4 * PAGE]
    assert seen_of(chunks) == [8 * PAGE + 350 - 320 + 1, 8 * PAGE + 1]


def test_selections_have_room_for_the_longest_context():
    planner = PageChunkPlanner(config(prefill_share=0.4), kv_heads=2)
    longest = 5000
    division = planner.divide(np.array([longest - 1]), np.array([longest - 1]))
    attended = (division.attended - division.new)[division.sparse]
    assert attended.max() <= planner.most_attended(longest) * PAGE <= attended.max() + 2 * PAGE
    assert planner.most_attended(100) == BUDGET // PAGE


@pytest.mark.parametrize(
    ("begin", "share"), [(320, 0), (352, 0), (350, 0), (352, 0.85), (350, 0.999)]
)
def test_selection_and_attention_equal_reference(begin, share):
    """Also of chunks that begin in the middle of a page, or attend to all that is before them."""
    torch.manual_seed(begin)
    chunks, _ = planned((begin, 384 - begin), (384, 40), share=share)
    shape = {"kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    cache = torch.randn(64, 2, PAGE, 128)
    query = torch.randn(5 + 384 - begin + 40, 6, 64)
    outputs, lists = [], []
    for ops in (cpu, reference):
        store = IndexRecords.empty(
            make_index("mean"), pages=64, page_size=PAGE, cache=cache, layout="vec", **shape
        )
        ops.index_pages(torch.arange(64).int(), torch.full((64,), PAGE).int(), store)
        selection = Selection.empty(seats=2, group=3 * 4, most_selected=9, **shape)
        chooser = Chooser(store, selection, Pooling.MEAN_SOFTMAX, 0.125)
        grouped = chunks.grouped(query, 2)
        assert torch.equal(grouped[1, 12 + 3], query[chunks.queries[1, 1], 3])
        chunks.rows.handle = None
        ops.plan_decode(grouped, chunks.rows, chooser)
        output = torch.zeros(len(query) - 5, 6, 64)
        ops.attend_prompt(query[5:], chunks.lists, cache, output, "vec", 0.125)
        outputs.append(output)
        lists.append([*zip(chunks.rows.lengths.tolist(), chunks.rows.lists.tolist(), strict=True)])
    assert lists[0] == lists[1]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    seen = chunks.lists.seen[::2] + chunks.lists.starts.diff() - 1
    assert chunks.rows.lengths[::2].tolist() == seen.tolist()


def test_defaults():
    made = RetrievalConfig.from_options("kvretrieval", {"prefill_budget": 1024})
    assert (made.prefill_chunk, made.prefill_queries) == (128, 8)
    assert RetrievalConfig.from_options("kvretrieval", {}).prefill_queries is None


def test_requests_choose():
    served = config(also=["freekv", "fier", "h2o"])
    for options, tokens in [
        ({}, 256),
        ({"prefill_budget": 128}, 128),
        ({"prefill_budget": 0}, None),
        ({"exact": True}, None),
        ({"method": "freekv"}, 256),
        ({"method": "fier"}, None),
        ({"method": "h2o"}, None),
        ({"method": "streamingllm"}, None),
    ]:
        parsed = RequestOptions.parse({"kv_retrieval": options}, served)
        assert (parsed.prefill_budget and parsed.prefill_budget.total * PAGE) == tokens, options
        assert parsed.prefill_share == 0


def test_requests_choose_a_share():
    served = config(also=["freekv", "fier", "h2o"], prefill_share=0.25)
    cases: list[tuple[dict[str, Any], float]] = [
        ({}, 0.25),
        ({"prefill_budget": 128}, 0.25),
        ({"prefill_share": 0.125}, 0.125),
        ({"prefill_share": 0, "prefill_budget": 128}, 0),
        ({"method": "freekv"}, 0.25),
        ({"prefill_budget": 0}, 0),
        ({"exact": True}, 0),
        ({"exact": True, "prefill_share": 0}, 0),
        ({"method": "fier"}, 0),
        ({"method": "h2o", "prefill_share": 0}, 0),
    ]
    for options, share in cases:
        nested = RequestOptions.parse({"kv_retrieval": options}, served)
        flat = {f"kv_retrieval_{key}": value for key, value in options.items()}
        assert RequestOptions.parse(flat, served) == nested
        assert nested.prefill_share == share, options


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"prefill_budget": 512}, "prefill_budget=512 exceeds the server's 256"),
        ({"prefill_budget": 100}, "prefill_budget=100 must be a positive multiple"),
        ({"prefill_budget": 96}, "prefill_budget=96 is too small"),
        ({"prefill_budget": -32}, "prefill_budget=-32 must be a positive multiple"),
        ({"prefill_budget": True}, "prefill_budget=True must be a whole number"),
        ({"prefill_budget": 128, "exact": True}, "prefill_budget=128 has no effect with a request"),
        ({"prefill_budget": 128, "method": "fier"}, "prefill_budget=128 has no effect with fier"),
        ({"prefill_share": 0.5}, "prefill_share=0.5 exceeds the server's 0.25"),
        ({"prefill_share": 1}, "prefill_share=1 must be from 0 on and less than 1"),
        ({"prefill_share": -0.1}, "prefill_share=-0.1 must be from 0 on"),
        ({"prefill_share": float("nan")}, "prefill_share=nan must be a number"),
        ({"prefill_share": float("inf")}, "prefill_share=inf must be a number"),
        ({"prefill_share": True}, "prefill_share=True must be a number"),
        ({"prefill_share": False}, "prefill_share=False must be a number"),
        ({"prefill_share": "0.1"}, "prefill_share='0.1' must be a number"),
        ({"prefill_share": None}, "prefill_share=None must be a number"),
        ({"prefill_share": [0.1]}, r"prefill_share=\[0.1\] must be a number"),
        ({"prefill_share": 0.1, "exact": True}, "prefill_share=0.1 has no effect with a request"),
        ({"prefill_share": 0.1, "prefill_budget": 0}, "prefill_share=0.1 .* with prefill_budget=0"),
        ({"prefill_share": 0.1, "method": "fier"}, "prefill_share=0.1 has no effect with fier"),
        ({"prefill_share": 0.1, "method": "h2o"}, "prefill_share=0.1 has no effect with h2o"),
    ],
)
def test_refused_to_requests(options, why):
    served = config(also=["fier", "h2o"], prefill_share=0.25)
    with pytest.raises(RetrievalConfigError, match=f"kv_retrieval.{why}"):
        RequestOptions.parse({"kv_retrieval": options}, served)


def test_refused_to_requests_where_prompts_are_exact():
    exactly = RetrievalConfig.from_options("kvretrieval", {})
    with pytest.raises(RetrievalConfigError, match="prefill_budget=128 is not served"):
        RequestOptions.parse({"kv_retrieval": {"prefill_budget": 128}}, exactly)
    with pytest.raises(RetrievalConfigError, match=r"prefill_share=0\.1 is not served"):
        RequestOptions.parse({"kv_retrieval": {"prefill_share": 0.1}}, exactly)


def test_a_share_is_refused_to_requests_without_one_of_the_server():
    for served in (config(), config(prefill_share=0)):
        with pytest.raises(
            RetrievalConfigError,
            match=r"prefill_share=0\.1 is not served, since the server has none",
        ):
            RequestOptions.parse({"kv_retrieval": {"prefill_share": 0.1}}, served)


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("kvretrieval", {"prefill_chunk": 64}, "prefill_chunk=64 has no effect without"),
        ("kvretrieval", {"prefill_queries": 4}, "prefill_queries=4 has no effect without"),
        (
            "streamingllm",
            {"prefill_budget": 1024},
            "prefill_budget=1024 cannot be used",
        ),
        ("snapkv", {"prefill_budget": 1024}, "prefill_budget=1024 cannot be used with snapkv"),
        (
            "kvretrieval",
            {"prefill_budget": 1000},
            "prefill_budget=1000 must be a positive multiple",
        ),
        (
            "kvretrieval",
            {"prefill_budget": 1024, "prefill_chunk": 48},
            "prefill_chunk=48 must be a positive multiple of page_size=32",
        ),
        (
            "kvretrieval",
            {"prefill_budget": 1024, "prefill_queries": 65},
            "prefill_queries=65 must be from 1 to 64",
        ),
        (
            "omnikv",
            {"prefill_budget": 1024, "home": "disk"},
            "prefill_budget=1024 needs home=device with omnikv",
        ),
        ("omnikv", {"prefill_budget": 1024, "prefill_queries": 4}, "prefill_queries=4 has no eff"),
        ("omnikv", {"prefill_budget": 1024, "prefill_pooling": "max"}, "prefill_pooling='max' has"),
        ("kvretrieval", {"prefill_pooling": "max"}, "prefill_pooling='max' has no effect without"),
        ("kvretrieval", {"prefill_share": 0.1}, "prefill_share=0.1 has no effect without"),
        (
            "omnikv",
            {"prefill_budget": 1024, "prefill_share": 0.1},
            "prefill_share=0.1 has no effect with omnikv, whose prompts select no pages",
        ),
        ("fier", {"prefill_budget": 1024, "prefill_share": 0.1}, "prefill_budget=1024 cannot be"),
        (
            "kvretrieval",
            {"prefill_budget": 1024, "prefill_share": 1.0},
            "prefill_share=1.0 must be from 0 on and less than 1",
        ),
        (
            "kvretrieval",
            {"prefill_budget": 1024, "prefill_share": float("nan")},
            "prefill_share=nan must be a number",
        ),
        (
            "kvretrieval",
            {"prefill_budget": 1024, "prefill_pooling": "mean"},
            "prefill_pooling='mean' is unknown; use one of mean_softmax",
        ),
    ],
)
def test_refused(method, options, why):
    with pytest.raises(RetrievalConfigError, match=f"kv_retrieval.{why}"):
        RetrievalConfig.from_options(method, options)
