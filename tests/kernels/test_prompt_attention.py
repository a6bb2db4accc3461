"""Attention of prompts: the compiled kernel against its specification, by instruction set."""

import itertools
import random
from typing import Any

import pytest
import torch

from tests.spec import ops as reference
from vllm_kvretrieval.kernels import PromptLists, cpu

pytestmark = pytest.mark.threads

SEQUENCES = ((1, 1), (5, 700), (131, 131), (40, 2300), (17, 33), (1, 2049))
"""Queries, and tokens of their contexts: ends within pages, tiles and stretches."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Largest error, relative to the largest output."""


def make_case(dtype, head_size, kv_heads, group, page_size, sequences=SEQUENCES, per_head=False):
    """Queries, lists of scattered pages, and a cache that holds NaN where no list looks."""
    most = max(context for _, context in sequences)
    width, count = -(-most // page_size), len(sequences)
    pages = width * count + 3
    cache = torch.randn(pages, kv_heads, page_size, 2 * head_size)
    order = torch.randperm(pages, dtype=torch.int32)[: width * count].view(count, width)
    cache[list(set(range(pages)) - set(order.flatten().tolist()))] = torch.nan
    if per_head:
        heads = torch.arange(kv_heads, dtype=torch.int32)[:, None]
        order = (order[:, None] * kv_heads + heads).flatten(0, 1)
        # Every KV head has its pages in an order of its own.
        order = torch.stack([row[torch.randperm(width)] for row in order])
    queries = [n for n, _ in sequences]
    starts = [0, *itertools.accumulate(queries)]
    seen = [context - n + 1 for n, context in sequences]
    if per_head:  # the first one sees all, the next ones less
        seen = [max(1, all_seen // (1 + head)) for all_seen in seen for head in range(kv_heads)]
    query = 2 * torch.randn(starts[-1], kv_heads * group, head_size)
    as_int = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    lists = PromptLists(order.contiguous(), as_int(starts), as_int(seen), kv_heads, per_head)
    return query.to(dtype), lists, cache.to(dtype)


def attend(query, lists, cache, layout="vec", **options):
    """Output and log-sum-exp of the kernel."""
    output = torch.full_like(query, torch.nan)
    lse = torch.full(query.shape[:2], torch.nan)
    scale = query.shape[-1] ** -0.5
    cpu.attend_prompt(query, lists, cache, output, layout, scale, lse=lse, **options)
    return output, lse


def expected_of(query, lists, cache, layout="vec", **options):
    """The result of the specification, in float64."""
    output = torch.full(query.shape, torch.nan, dtype=torch.float64)
    lse = torch.full(query.shape[:2], torch.nan)
    scale = query.shape[-1] ** -0.5
    reference.attend_prompt(query, lists, cache, output, layout, scale, lse=lse, **options)
    return output, lse


def assert_close(actual, expected, tolerance):
    (output, lse), (right, right_lse) = actual, expected
    error = (output.double() - right).abs().max() / right.abs().max()
    assert error < tolerance
    assert (lse - right_lse).abs().max() < max(1e-4, 4 * tolerance)


def blank_unseen(lists, cache, layout):
    """Set NaN behind the last token that is seen of each list's last page, in keys and values."""
    page_size, size = cache.shape[-2], cache.shape[-1] // 2
    units = cache.flatten(0, 1)
    for s, (start, end) in enumerate(itertools.pairwise(lists.starts.tolist())):
        for head in range(lists.kv_heads):
            row = s * lists.kv_heads + head if lists.per_head else s
            tokens = int(lists.seen[row]) + end - start - 1
            last, kept = (tokens - 1) // page_size, (tokens - 1) % page_size + 1
            entry = int(lists.entries[row, last])
            unit = units[entry if lists.per_head else entry * lists.kv_heads + head]
            if layout == "token_major":
                unit[kept:] = torch.nan
            elif layout == "vec":
                flat = unit.flatten()
                flat[: size * page_size].view(size, page_size)[:, kept:] = torch.nan
                flat[size * page_size :].view(page_size, size)[kept:] = torch.nan


SHAPES = [(64, 3, 3, 32), (128, 2, 4, 16), (80, 1, 7, 64), (96, 2, 1, 128), (256, 1, 8, 32)]
SHAPES += [(192, 1, 2, 32), (16, 2, 16, 16), (64, 2, 5, 32), (112, 1, 6, 32), (64, 2, 3, 256)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 50},
    {"softcap": 5.0},
    {"sinks": True},
    {"window": 1000, "sinks": True},
]
CASES = [
    (dtype, layout, *shape)
    for dtype in TOLERANCE
    for layout in ("vec", "token_major", "amx")
    for shape in SHAPES
    if layout != "amx" or dtype != torch.float32
]


@pytest.mark.parametrize("number", range(0, len(CASES), 4))
def test_specification(number, isas):
    """Each element type, layout and shape, with options and kinds of lists in turn."""
    for i, case in enumerate(CASES[number : number + 4], number):
        dtype, layout, head_size, kv_heads, group, page_size = case
        torch.manual_seed(i)
        per_head, options = bool(i % 2), dict(OPTIONS[i % len(OPTIONS)])
        query, lists, cache = make_case(
            dtype, head_size, kv_heads, group, page_size, per_head=per_head
        )
        if options.get("sinks"):
            options["sinks"] = torch.randn(kv_heads * group)
        if layout != "amx":
            blank_unseen(lists, cache, layout)
        expected = expected_of(query, lists, cache.nan_to_num(), layout, **options)
        for isa in isas():
            actual = attend(query, lists, cache, layout, **options)
            try:
                assert_close(actual, expected, TOLERANCE[dtype])
            except AssertionError as e:
                raise AssertionError(f"{isa}, {case}, {options}") from e


@pytest.mark.parametrize("shape", ["rising", "falling", "alternating", "last", "equal", "low"])
def test_references(shape, isas):
    """Logits that differ by hundreds between tiles lose nothing, whatever their order."""
    torch.manual_seed(1)
    query, lists, cache = make_case(torch.float32, 64, 1, 3, 32, ((7, 1500), (20, 500)))
    cache = cache.nan_to_num()
    tiles = torch.arange(48) // 4
    height = {
        "rising": 40.0 * tiles,
        "falling": -40.0 * tiles,
        "alternating": 200.0 * (tiles % 2),
        "last": 500.0 * (tiles == 11),
        "equal": torch.zeros(48),
        "low": torch.full((48,), -900.0),
    }[shape]
    # One channel of the keys raises all logits of a page, since that of the queries is the same.
    query[..., 0] = 8.0
    if shape == "equal":
        query[:] = 0
    pages = lists.entries[0].long()
    cache[pages, 0].flatten(1).view(-1, 2, 64 * 32)[:, 0].view(-1, 64, 32)[:, 0] = height[
        : len(pages), None
    ]
    expected = expected_of(query, lists, cache)
    for _ in isas():
        assert_close(attend(query, lists, cache), expected, 2e-5)


def test_nan_stays_in_its_row(isas):
    torch.manual_seed(2)
    query, lists, cache = make_case(torch.float32, 64, 2, 3, 32, ((30, 300),))
    expected, _ = expected_of(query, lists, cache.nan_to_num())
    query[11, 4] = torch.nan
    for _ in isas():
        output, _ = attend(query, lists, cache)
        assert output[11, 4].isnan().all()
        output[11, 4] = expected[11, 4]
        torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "size"), [*((dtype, 80) for dtype in TOLERANCE), (torch.bfloat16, 64)], ids=str
)
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_token_reaches_only_those_who_see_it(dtype, size, window, value, isas):
    """Others have the same bits as without its value, in one chunk or several."""
    torch.manual_seed(6)
    seen, count = 261, 41
    query, lists, clean = make_case(dtype, size, 2, 3, 32, ((count, seen + count - 1),))

    def attend_to(cache, first, last):
        starts = torch.tensor([0, last - first], dtype=torch.int32)
        part = PromptLists(lists.entries, starts, lists.seen + first, 2)
        return attend(query[first:last], part, cache, window=window)

    for token in (212, 231, 261, 271, 272, 300):
        cache = clean.clone()
        unit = cache[int(lists.entries[0, token // 32]), 1].flatten()
        unit[size * 32 :].view(32, size)[token % 32, 7] = value
        limits = seen + torch.arange(count)
        sees = (token < limits) & (token >= limits - (window or seen + count))
        expected, _ = expected_of(query, lists, cache, window=window)
        reached = ~expected.isfinite()
        assert reached[sees, 3:, 7].all()
        assert reached.sum() == 3 * sees.sum()
        for isa in isas():
            untouched, _ = attend_to(clean, 0, count)
            whole, lse = attend_to(cache, 0, count)
            assert whole.isfinite().equal(~reached), (isa, token)
            assert whole[~reached].equal(untouched[~reached])
            assert lse.isfinite().all()
            chunks = [attend_to(cache, *ends)[0] for ends in ((0, 7), (7, 11), (11, count))]
            torch.testing.assert_close(torch.cat(chunks), whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 777}], ids=["whole", "window"])
def test_company(dtype, options, isas):
    """A result has the same bits alone, in a batch, in other chunks, and with other threads."""
    torch.manual_seed(3)
    sequences = ((300, 5000), (33, 40100), (1, 4097))
    query, lists, cache = make_case(dtype, 64, 2, 3, 32, sequences)
    threads = torch.get_num_threads()
    for _ in isas():
        together, lse = attend(query, lists, cache, **options)
        for count in (1, 3):
            torch.set_num_threads(count)
            again = attend(query, lists, cache, **options)
            torch.set_num_threads(threads)
            assert torch.equal(again[0], together)
            assert torch.equal(again[1], lse)
        for s, (start, end) in enumerate(itertools.pairwise(lists.starts.tolist())):
            at, rest = start, random.Random(s)
            while at < end:
                chunk = min(rest.choice((1, 7, 64, 200)), end - at)
                part = PromptLists(
                    lists.entries[s : s + 1],
                    torch.tensor([0, chunk], dtype=torch.int32),
                    lists.seen[s : s + 1] + (at - start),
                    2,
                )
                output, _ = attend(query[at : at + chunk], part, cache, **options)
                assert torch.equal(output, together[at : at + chunk])
                at += chunk


def test_lists(isas):
    """A list of units answers as the block table of the same pages, bit by bit."""
    torch.manual_seed(4)
    query, lists, cache = make_case(torch.float32, 64, 3, 3, 32, ((40, 900), (5, 70)))
    heads = torch.arange(3, dtype=torch.int32)[:, None]
    units = (lists.entries[:, None] * 3 + heads).flatten(0, 1)
    seen = lists.seen.repeat_interleave(3)
    by_unit = PromptLists(units, lists.starts, seen, 3, per_head=True)
    for _ in isas():
        assert torch.equal(attend(query, lists, cache)[0], attend(query, by_unit, cache)[0])


def test_strides():
    """Queries and outputs may be parts of wider tensors, whose other parts stay as they are."""
    torch.manual_seed(5)
    query, lists, cache = make_case(torch.float32, 64, 2, 2, 32, ((40, 60),))
    wide = torch.randn(44, 9 * 64)
    wide[2:42, : 4 * 64] = query.flatten(1)
    output = torch.full((44, 6 * 64), -7.0)
    cpu.attend_prompt(
        wide[2:42, : 4 * 64].view(40, 4, 64),
        lists,
        cache,
        output[2:42, : 4 * 64].view(40, 4, 64),
        "vec",
        64**-0.5,
    )
    expected, _ = attend(query, lists, cache)
    assert torch.equal(output[2:42, : 4 * 64].view(40, 4, 64), expected)
    output[2:42, : 4 * 64] = -7
    assert (output == -7).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entry": -1}, "entry 2 is -1"),
        ({"entry": 1 << 30}, "entry 2 is 1073741824"),
        ({"seen": 0}, "the first of which sees 0"),
        ({"seen": 5000}, "a list holds"),
        ({"seen": 5000, "head": 1}, "a list holds"),
        ({"lists": 3}, "need 2 lists, and their numbers of seen tokens; got 2 and 3"),
        ({"starts": [0, 90]}, "of 40"),
        ({"starts": [-1, 40]}, "from token -1"),
        ({"starts": [0, 0]}, "0 queries"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"sinks": torch.zeros(3)}, "sinks must be"),
        ({"lse": torch.zeros(40, 3)}, "lse must be"),
        ({"dtype": torch.float16}, "query must be"),
        ({"page_size": 512}, "pages of 512"),
    ],
    ids=str,
)
def test_refusals(change, message):
    """Arguments that do not fit are refused before anything is read or written."""
    by_head = {"head", "lists"} & change.keys()
    query, lists, cache = make_case(torch.float32, 64, 2, 2, 32, ((40, 200),), bool(by_head))
    if "lists" in change:
        lists.seen = torch.ones(change["lists"], dtype=torch.int32)
    if "entry" in change:
        lists.entries[0, 2] = change["entry"]
    if "seen" in change:
        lists.seen[change.get("head", 0)] = change["seen"]
    if "starts" in change:
        lists.starts = torch.tensor(change["starts"], dtype=torch.int32)
    if "page_size" in change:
        cache = torch.zeros(3, 2, change["page_size"], 128)
    output = torch.full_like(query, -7.0)
    options = {name: change[name] for name in ("softcap", "sinks", "lse") if name in change}
    query = query.to(change.get("dtype", query.dtype))
    with pytest.raises(ValueError, match=message):
        cpu.attend_prompt(query, lists, cache, output, "vec", change.get("scale", 0.125), **options)
    assert (output == -7).all()
