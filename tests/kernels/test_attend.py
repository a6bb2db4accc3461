"""Attention over lists of tokens and pages, against plain torch, per instruction set."""

from contextlib import nullcontext

import pytest
import torch

from benchmarks.ops.attention import Case, measure
from benchmarks.ops.setup import Shape
from tests.spec import ops as reference
from tests.support.kernel_checks import DTYPES, specified
from vllm_kvretrieval.kernels import Remainder, TokenLists, cpu

pytestmark = pytest.mark.threads

TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 2e-3, torch.float32: 2e-5}


def cache_of(pages, kv_heads, page_size, head_size, dtype):
    return torch.randn(pages, kv_heads, page_size, 2 * head_size).to(dtype)


def token_lists(lengths, cache, run):
    """Different tokens, in no order; stretches of them where ``run`` is more than 1."""
    pages, kv_heads, page_size, _ = cache.shape
    count = pages * kv_heads * page_size // run
    width = -(-max(lengths) // run) + 2
    entries = torch.full((len(lengths), width), -1, dtype=torch.int32)
    for unit, length in enumerate(lengths):
        entries[unit, : -(-length // run)] = torch.randperm(count)[: -(-length // run)]
    return TokenLists(entries, torch.tensor(lengths, dtype=torch.int32), run, kv_heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layout", "kv_heads", "group", "head_size", "page_size", "run", "lengths"),
    [
        ("token_major", 3, 3, 64, 32, 1, (1, 700, 31, 32, 33, 640)),
        ("token_major", 2, 7, 64, 32, 32, (1000, 90, 1024, 1)),
        ("token_major", 1, 4, 256, 32, 1, (300, 129)),
        ("token_major", 2, 1, 96, 32, 16, (77, 513)),
        ("token_major", 1, 11, 80, 128, 1, (257,)),
        ("token_major", 2, 8, 128, 64, 64, (2000, 64)),
        ("token_major", 2, 3, 64, 256, 1, (1000, 257)),
        ("vec", 3, 3, 64, 32, 32, (1, 700, 31, 32, 33, 640)),
        ("vec", 2, 7, 64, 32, 16, (1000, 90, 1024, 1)),
        ("vec16", 1, 4, 256, 16, 16, (300, 129)),
        ("vec", 2, 1, 96, 64, 64, (77, 513)),
        ("vec", 1, 11, 80, 128, 128, (257,)),
        ("vec", 2, 3, 64, 256, 256, (1000, 257)),
        ("vec", 2, 8, 128, 32, 32, (2000, 64)),
        ("amx", 3, 3, 64, 32, 32, (1, 700, 31, 32, 33, 640)),
        ("amx", 2, 7, 64, 32, 16, (1000, 90, 1024, 1)),
        ("amx", 1, 4, 256, 32, 32, (300, 129)),
        ("amx", 2, 1, 96, 64, 64, (77, 513)),
        ("amx", 1, 11, 80, 128, 128, (257,)),
        ("amx", 2, 3, 64, 256, 256, (1000, 257)),
    ],
)
def test_equals_reference(isa, dtype, layout, kv_heads, group, head_size, page_size, run, lengths):
    if layout == "amx" and dtype == torch.float32:
        pytest.skip("no layout for it")
    torch.manual_seed(len(lengths))
    cache = cache_of(2600 // page_size, kv_heads, page_size, head_size, dtype)
    lists, rows = token_lists(lengths, cache, run), len(lengths) // kv_heads
    # As in a model: queries are a strided view of the fused projection's output.
    query = torch.randn(rows + 1, kv_heads * group + 2, head_size).to(dtype)[:, : kv_heads * group]
    expected, actual = (torch.zeros_like(query) for _ in range(2))
    sums, ours = torch.zeros(rows, kv_heads * group), torch.zeros(rows, kv_heads * group)
    specified(reference.attend, query, lists, cache, expected, layout, 0.3, sums)
    cpu.attend(query, lists, cache, actual, layout, 0.3, ours)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(ours, sums, atol=2e-4, rtol=1e-5)
    assert actual[rows:].eq(0).all()
    cpu.attend(query, lists, cache, expected, layout, 0.3)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("layout", "run"), [("token_major", 1), ("vec", 32), ("amx", 32)])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(3.0, False), (0.0, True), (30.0, True)])
def test_soft_capping_and_sinks(isa, dtype, layout, run, softcap, with_sinks):
    """Logits far beyond the cap, sinks far above and below them, several parts of one list.

    Behind a context's last token lies whatever lay there before.
    """
    if layout == "amx" and dtype == torch.float32:
        pytest.skip("no layout for it")
    torch.manual_seed(4)
    kv_heads, group, size, lengths = 2, 5, 64, (1, 700, 31, 1029)
    cache = cache_of(120, kv_heads, 32, size, dtype)
    lists, heads = token_lists(lengths, cache, run), kv_heads * group
    if layout == "vec":
        last = min({*range(240)} - {*lists.entries.flatten().tolist()})
        lists.entries[1, 700 // 32] = last
        cache.view(-1, 2, size, 32)[last, 0, :, 700 % 32 :] = float("nan")
    query = (3 * torch.randn(2, heads, size)).to(dtype)
    sinks = torch.linspace(-40, 40, heads) if with_sinks else None
    expected, actual = torch.empty_like(query), torch.empty_like(query)
    sums, ours = torch.empty(2, heads), torch.empty(2, heads)
    weights, given = torch.zeros(2, heads, 1030), torch.zeros(2, heads, 1030)
    known = query, lists, cache
    specified(reference.attend, *known, expected, layout, 0.3, sums, weights, softcap, sinks)
    cpu.attend(*known, actual, layout, 0.3, ours, given, softcap, sinks)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(ours, sums, atol=2e-5, rtol=1e-6)
    torch.testing.assert_close(given, weights, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("rest", ["nothing", "sinks", "remainder"])
def test_empty_lists(isa, rest):
    """Parts of a softmax may have no tokens; what else there is counts."""
    torch.manual_seed(5)
    kv_heads, group, size = 2, 3, 64
    cache = cache_of(30, kv_heads, 32, size, torch.float32)
    lists, heads = token_lists((0, 700, 31, 0), cache, 32), kv_heads * group
    query, sinks, remainder = torch.randn(2, heads, size), None, None
    if rest == "sinks":
        sinks = torch.linspace(-4, 4, heads)
    elif rest == "remainder":
        remainder = Remainder(torch.randn(2, heads, size), torch.randn(2, heads))
        remainder.values[1, 5:], remainder.lse[1, 5:] = 9e9, -torch.inf
    expected, actual = torch.empty_like(query), torch.empty_like(query)
    sums, ours = torch.empty(2, heads), torch.empty(2, heads)
    known, more = (query, lists, cache), (0.0, sinks, remainder)
    specified(reference.attend, *known, expected, "vec", 0.3, sums, None, *more)
    cpu.attend(*known, actual, "vec", 0.3, ours, None, *more)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(ours, sums, atol=2e-5, rtol=1e-6)
    with nullcontext() if remainder else pytest.raises(ValueError, match="holds from 1 to"):
        cpu.attend(*known, actual, "vec", 0.3, None, None, *more)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    assert ours.isneginf().sum() == {"nothing": 2 * group, "sinks": 0, "remainder": 1}[rest]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"softcap": -1.0}, "softcap=-1.0 cannot be"),
        ({"softcap": float("nan")}, "softcap=nan cannot be"),
        ({"sinks": torch.zeros(3)}, r"sinks must be \(2,\), got \(3,\)"),
        ({"sinks": torch.zeros(2).double()}, "sinks must be torch.float32"),
    ],
)
def test_refused_rules(rule, message):
    cache = cache_of(2, 1, 32, 64, torch.float32)
    query, lists = torch.randn(1, 2, 64), token_lists([40], cache, 32)
    output = torch.zeros_like(query)
    with pytest.raises(ValueError, match=message):
        cpu.attend(query, lists, cache, output, "vec", 0.3, **rule)
    assert output.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 80])
def test_words_hold_what_rows_do(isa, dtype, head_size):
    """The same keys and values in AMX's layout, packed by the op that lays them out for prefill.

    Behind the last token of a context lies whatever lay there before: numbers that are none.
    """
    torch.manual_seed(3)
    rows = cache_of(40, 2, 32, head_size, dtype)
    words = torch.empty_like(rows)
    last = 7 * 32 + 13  # tokens
    units = torch.stack([torch.randperm(40)[:8] * 2 + head for head in range(2)]).int()
    for head in range(2):
        rows[units[head, -1] // 2, head, 13:] = float("nan")
    cpu.stage_pages(rows, torch.arange(40).int(), words, "amx", token_major=True)
    lists = TokenLists(units, torch.tensor([last, last]).int(), 32, 2)
    query = torch.randn(1, 6, head_size).to(dtype)
    expected, actual = torch.empty_like(query), torch.empty_like(query)
    cpu.attend(query, lists, rows, expected, "token_major", 0.2)
    cpu.attend(query, lists, words, actual, "amx", 0.2)
    assert expected.isfinite().all()
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_vllms_kernel(dtype):
    """Both kernels run as in the benchmark."""
    torch.manual_seed(2)
    case = Case(Shape(layers=1), 1024, 256, 2, dtype)
    case.vllms()
    vllms = case.output.clone()
    case.output.zero_()
    case.ours()
    torch.testing.assert_close(case.output, vllms, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert measure(case, 1)["gb_per_s"] > 0


def test_far_scores(isa):
    """One token outweighs all others by far, first or last; and scores that no exponential has."""
    torch.manual_seed(0)
    cache = cache_of(20, 1, 32, 64, torch.float32)
    query = torch.randn(1, 2, 64)
    lists = token_lists([600], cache, 1)
    keys = cache.flatten(0, 2)
    for place in (0, 299, 599):
        token = int(lists.entries[0, place])
        old = keys[token, :64].clone()
        keys[token, :64] = 1e3 * query[0].mean(0)
        output, expected = torch.empty_like(query), torch.empty_like(query)
        cpu.attend(query, lists, cache, output, "token_major", 1.0)
        specified(reference.attend, query, lists, cache, expected, "token_major", 1.0)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)
        keys[token, :64] = old


def pages_of(keys, values, layout):
    """A cache of one KV head, of [pages, 32, head_size] each."""
    pages, _, head_size = keys.shape
    rows = torch.cat([keys, values], -1)[:, None].contiguous()
    if layout == "token_major":
        return rows
    cache = torch.empty(pages, 1, 32, 2 * head_size, dtype=keys.dtype)
    if layout == "vec":
        cache.view(pages, -1)[:, : 32 * head_size] = keys.transpose(1, 2).flatten(1)
        cache.view(pages, -1)[:, 32 * head_size :] = values.flatten(1)
    else:
        cpu.stage_pages(rows, torch.arange(pages).int(), cache, layout, token_major=True)
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["token_major", "vec", "amx"])
@pytest.mark.parametrize("last", [13, 32])
def test_rising_scores_over_pages(isa, layout, dtype, last):
    """Each page outweighs those before by far; what lies behind the last token is no number."""
    if layout == "amx" and dtype == torch.float32:
        pytest.skip("no layout for it")
    torch.manual_seed(last)
    length = 9 * 32 + last
    query = torch.randn(1, 3, 80).to(dtype)
    steps = torch.arange(320).view(10, 32, 1) // 7 * 2.0
    keys = (steps * query[0].mean(0) + torch.randn(10, 32, 80) / 4).to(dtype)
    values = torch.randn(10, 32, 80).to(dtype)
    keys[-1, last:], values[-1, last:] = float("nan"), float("nan")
    cache = pages_of(keys, values, layout)
    lists = TokenLists(torch.arange(10).int()[None], torch.tensor([length]).int(), 32, 1)
    output, lse = torch.empty_like(query), torch.empty(1, 3)
    cpu.attend(query, lists, cache, output, layout, 0.3, lse)
    keys, values = (part.flatten(0, 1)[:length].double() for part in (keys, values))
    logits = query[0].double() @ keys.T * 0.3
    expected = (logits.softmax(-1) @ values)[None]
    # Logits are sums in float32, whose error grows with them.
    tolerance = TOLERANCE[dtype] + 4 * torch.finfo(torch.float32).eps * float(logits.abs().max())
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse[0].double(), logits.logsumexp(-1), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_written_and_staged(dtype):
    torch.manual_seed(1)
    kv_heads, head_size, page_size = 2, 80, 32
    written, expected = (torch.zeros(9, kv_heads, page_size, 2 * head_size).to(dtype) for _ in "ab")
    fused = torch.randn(140, 3 * kv_heads, head_size).to(dtype)
    key, value = fused[:, :kv_heads], fused[:, kv_heads : 2 * kv_heads]
    slots = torch.randperm(9 * page_size)[:135]
    slots[[4, 130]] = -1
    cpu.write_cache(key, value, slots, written, "token_major")
    reference.write_cache(key, value, slots, expected, "token_major")
    assert torch.equal(written, expected)
    pages = torch.tensor([3, 8, 0, 1, 7, 3, 2, 2]).int()
    staged, specified_too = (torch.zeros(3, kv_heads, 128, 2 * head_size).to(dtype) for _ in "ab")
    cpu.stage_pages(written, pages, staged, token_major=True)
    reference.stage_pages(written, pages, specified_too, token_major=True)
    assert torch.equal(staged, specified_too)
    assert staged[:2].any()


def test_what_does_not_fit_is_refused():
    cache = cache_of(4, 2, 32, 64, torch.float32)
    query, output = torch.randn(1, 6, 64), torch.zeros(1, 6, 64)

    def attend(entries, lengths, run=1, q=query, to=output, layout="token_major", **options):
        lists = TokenLists(torch.tensor(entries).int(), torch.tensor(lengths).int(), run, 2)
        cpu.attend(q, lists, cache, to, layout, 1.0, **options)

    attend([[1, 255], [0, 9]], [2, 1])
    output.zero_()
    for arguments, why in [
        (([[1, 256], [0, 9]], [2, 1]), r"entries\[0\]\[1\] is 256, the cache has 256"),
        (([[1, 2], [-1, 9]], [2, 1]), r"entries\[1\]\[0\] is -1"),
        (([[1, 8], [0, 9]], [33, 1], 32), r"entries\[0\]\[1\] is 8, the cache has 8"),
        (([[1, 2], [0, 9]], [0, 1]), r"lengths\[0\] is 0, a list holds from 1 to 2"),
        (([[1, 2], [0, 9]], [2, 3]), r"lengths\[1\] is 3"),
        (([[1, 2], [0, 9]], [2, 1], 3), "run=3 is no power of two"),
        (([[1, 2], [0, 9]], [2, 1], 64), "run=64"),
        (([[1, 2], [0, 9]], [2, 1], 8, query, output, "vec"), "run=8 is no power of two from 16"),
        (([[1, 2], [0, 9]], [2, 1], 32, query, output, "amx"), "of 16 bits.*float32 .* in amx"),
        (([[1, 2], [0, 9]], [2, 1], 32, query, output, "neon"), "in the layouts .* in neon"),
        (([[1, 2]], [2]), "do not belong to 2 KV heads"),
        (([[1, 2], [0, 9]], [2, 1], 1, query.half()), "query must be"),
        (([[1, 2], [0, 9]], [2, 1], 1, query, output[:, :, ::2]), "output must be"),
    ]:
        with pytest.raises(ValueError, match=why):
            attend(*arguments)
    with pytest.raises(ValueError, match="lse must be"):
        attend([[1, 2], [0, 9]], [2, 1], lse=torch.empty(2, 6))
    key = torch.randn(2, 2, 64)
    with pytest.raises(ValueError, match=r"slot_mapping\[1\] is 128, the cache has 128 tokens"):
        cpu.write_cache(key, key, torch.tensor([0, 128]), cache, "token_major")
    with pytest.raises(ValueError, match=r"a contiguous cache of heads .* with strides"):
        cpu.write_cache(query, query, torch.tensor([0]), cache.transpose(1, 2), "token_major")
    assert output.eq(0).all()
