"""Explanations of prompts beside whole matrices of attention from transformers."""

import functools
import json
import types
from itertools import pairwise

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.support.engine import random_llama
from tests.support.seen import seen
from vllm_kvretrieval.command import main
from vllm_kvretrieval.explain.observed_attention import LATEST, PromptAttention
from vllm_kvretrieval.explain.output import borders, runs
from vllm_kvretrieval.retrieval.index.one_bit import OneBit
from vllm_kvretrieval.retrieval.model_files import SHAPE, shape_of
from vllm_kvretrieval.retrieval.prompt_shares import FORMAT

TOKENS, BUDGET = 427, 128
LAYERS, KV_HEADS, GROUP = 4, 2, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Llama, a text, and what transformers says of them in float64.

    Weights are random; of layers, the later look the wider.
    """
    folder = tmp_path_factory.mktemp("llama")
    random_llama(folder, LAYERS, KV_HEADS)
    network = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for number, layer in enumerate(network.model.layers):
            layer.self_attn.q_proj.weight *= 5 - number
    network.save_pretrained(folder)
    save_tokenizer(folder)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 512, (TOKENS,), generator=generator)
    text = folder / "text.txt"
    text.write_text(" ".join(f"w{i}" for i in ids.tolist()))
    attentions, queries, keys = whole(folder, ids)
    return types.SimpleNamespace(
        folder=folder, text=text, attentions=attentions, queries=queries, keys=keys
    )


def save_tokenizer(folder):
    """One word is one token."""
    words = {f"w{i}": i for i in range(512)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def whole(folder, ids):
    """Attention [layers, heads, n, n] of a prompt; last queries and all keys after RoPE."""
    network = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    queries: list[torch.Tensor] = []
    for layer in network.model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *args: queries.append(args[2]))
    with torch.inference_mode():
        outputs = network(ids[None], output_attentions=True, use_cache=True)
        rotation = network.model.rotary_emb(queries[0], torch.arange(len(ids))[None])
        turned = []
        for projected in queries:
            query = projected.unflatten(2, (KV_HEADS * GROUP, -1)).transpose(1, 2)
            turned.append(apply_rotary_pos_emb(query, query, *rotation)[0][0, :, -1])
    keys = [layer.keys[0] for layer in outputs.past_key_values.layers]
    return torch.stack(outputs.attentions)[:, 0].double(), turned, keys


@functools.cache
def _explained(folder, text, *more):
    out = folder / f"{len(list(folder.iterdir()))}.json"
    command = ["explain", str(folder), str(text), "--no-plot", f"--json={out}"]
    assert main([*command, *more]) == 0
    return json.loads(out.read_text())


def explained(model, *more, budget=BUDGET):
    return _explained(model.folder, model.text, f"--budget={budget}", *more)


def all_heads(model, method, *more):
    """The attended positions by layer and KV head, and the whole result."""
    result = explained(
        model,
        f"--method={method}",
        "--layer", *map(str, range(LAYERS)), "--head", *map(str, range(KV_HEADS)), *more,
    )  # fmt: skip
    found = {(head["layer"], head["head"]): positions(head["attended"]) for head in result["heads"]}
    assert len(found) == LAYERS * KV_HEADS
    return found, result


def positions(spans):
    return {position for begin, end in spans for position in range(begin, end)}


def plain_entropies(attentions, queries):
    some = attentions[:, :, -queries:]
    return -torch.special.xlogy(some, some).sum(-1).mean((1, 2))


@pytest.mark.parametrize(
    ("share", "chosen", "depth"), [(0.0, 2, 1.0), (0.7, 3, 1.0), (0.7, 3, 0.5)]
)
def test_the_share_of_a_chunk(model, share, chosen, depth):
    """The pages of a chunk are those that eight of its queries attend to most."""
    begin, end, size = 256, 384, 32  # the chosen are beside a page of sink and two of window
    given = ["--prefill-budget=160", *([f"--prefill-share={share}"] if share else [])]
    given += [f"--prefill-depth={depth}"] if depth < 1 else []
    result = explained(model, "--method=oracle", *given)
    assert (result["prefill_budget"], result["prefill_share"]) == (160, share)
    assert result["layers"][0]["chunk"] == [1.0, 1.0]
    same = 0
    for row in result["layers"][1:]:
        attention = model.attentions[row["layer"], :, begin:end, :end]
        by_query = attention.unflatten(0, (KV_HEADS, GROUP)).mean(1).unflatten(2, (-1, size)).sum(3)
        pages, window = by_query.mean(1), begin // size - 2
        selected = chosen if row["layer"] < depth * LAYERS else 0
        best = 1 + by_query[:, 15::16, 1:window].sum(1).topk(selected).indices
        expected = pages[:, 0] + pages[:, window:].sum(1) + pages.gather(1, best).sum(1)
        same += sum(np.isclose(row["chunk"], expected, atol=1e-4))
    # The sums of some queries include what they do not see of their own chunk.
    assert same >= 5


def test_heads_that_read_most_of_a_prompt(model, tmp_path):
    """One page in three is selected, and two of six heads have all of them, so that the others
    attend to sink and window."""
    shape = shape_of(AutoConfig.from_pretrained(model.folder))
    change = [[[float(layer == 1)], [float(layer == 2)]] for layer in range(LAYERS)]
    file = {"format": FORMAT, "model": "it", "shape": shape, "layers": [*range(LAYERS)]}
    path = tmp_path / "shares.json"
    path.write_text(json.dumps(file | {"tokens": 4096, "selected": [0], "change": change}))
    given, shares = ("--method=oracle", "--prefill-budget=160"), f"--prefill-budget-shares={path}"
    named, before = (
        explained(model, *given, *more)["layers"]
        for more in ((shares,), ("--prefill-budget-shares=uniform",))
    )
    found = [row["prefill_budget_shares"] for row in named]
    assert found == [[1.0, 1.0], [3.0, 0.0], [0.0, 3.0], [0.0, 0.0]]
    kept, as_before = (np.array([row["chunk"] for row in rows]) for rows in (named, before))
    assert (as_before[1:] < 0.999).all()
    assert (kept[0] == 1).all()
    assert kept[1, 0] == kept[2, 1] == 1
    assert (kept[1:] < as_before[1:]).sum() == 4


@pytest.mark.parametrize(
    ("given", "method", "queries"),
    [
        ([], "entropykv", TOKENS),
        ([], "snapkv", 32),
        ([], "quest", 32),
        (["--observation=7"], "entropykv", 7),
        (["--observation=600"], "quest", TOKENS),
        (["--observation=all"], "quest", TOKENS),
    ],
)
def test_entropies_and_budgets(model, given, method, queries):
    result = explained(model, f"--method={method}", *given)
    entropies = plain_entropies(model.attentions, queries)
    said = [row["entropy"] for row in result["layers"]]
    assert said == pytest.approx(entropies.tolist(), abs=1e-4)
    assert max(said) > 1.01 * min(said), "else the budgets would be the same whatever was measured"
    shares = (entropies / entropies.mean()).tolist()
    assert all(0.125 < share < 2 for share in shares), "else they would be clipped"
    assert [row["entropy_share"] for row in result["layers"]] == pytest.approx(shares, abs=1e-4)
    budgets = np.array([row["entropy_budgets"] for row in result["layers"]])
    assert budgets.sum() == BUDGET * budgets.size
    assert np.abs(budgets - BUDGET * np.array(shares)[:, None]).max() < 1.1


def best(mass, count):
    return set(mass.argsort(descending=True, stable=True)[:count].tolist())


def smoothed(mass):
    return torch.stack([mass[max(i - 3, 0) : i + 4].max() for i in range(len(mass))])


def plain_kept(method, attention, budget):
    """The tokens that each KV head of a layer keeps by the papers' rules, given attention [heads,
    n, n]."""
    n, kept = attention.shape[-1], []
    groups = attention.unflatten(0, (KV_HEADS, GROUP)).sum(1)
    for of_group, each in zip(groups, attention.unflatten(0, (KV_HEADS, GROUP)), strict=True):
        if method == "entropykv":
            mass, recent = attention.sum((0, 1))[: n - budget // 2], budget // 2
            mass[0] = torch.inf
            found = best(mass, budget - recent)
        elif method == "snapkv":
            recent = 32
            found = best(smoothed(of_group[-32:].sum(0)[: n - 32]), budget - 32)
        elif method == "h2o":  # one token less, for the next one
            recent = (budget - 1) // 2
            found = best(of_group.sum(0)[: n - recent], budget - 1 - recent)
        elif method == "tova":
            found, recent = best(attention[:, -1].sum(0), budget - 1), 0
        else:  # raas: pages of 16, and the unfinished one
            recent = n % 16
            high = (each[:, -32:] > 1e-4).any(0)
            stamps = (high * torch.arange(n - 32, n)[:, None]).amax(0)
            pages = stamps[: n - recent].unflatten(0, (-1, 16)).amax(1)
            pages[-1] = n
            order = sorted(range(len(pages)), key=lambda page: (-int(pages[page]), -page))
            found = {
                16 * page + i for page in order[: (budget - 1 - recent) // 16] for i in range(16)
            }
        kept.append(found | set(range(n - recent, n)))
    return kept


@pytest.mark.parametrize("method", ["entropykv", "snapkv", "h2o", "tova", "raas"])
def test_what_is_kept_is_what_whole_matrices_say(model, method):
    found, result = all_heads(model, method)
    assert result["drops"]
    for row, attention in zip(result["layers"], model.attentions, strict=True):
        budgets = row["entropy_budgets"] if method == "entropykv" else [BUDGET] * KV_HEADS
        for head, budget in enumerate(budgets):
            kept = plain_kept(method, attention, budget)[head]
            assert found[row["layer"], head] == kept
            assert row["attended"][head] == len(kept)
            last = attention[head * GROUP : (head + 1) * GROUP, -1].mean(0)
            share = float(last[list(kept)].sum())
            assert row["attention"][head] == pytest.approx(share, abs=1e-4)
    sets = {frozenset(kept) for kept in found.values()}
    assert len(sets) > 1, "else the layers would be told apart by nothing"


def always_and_best(pooled, select, sink, window):
    """Units: the first, the last, and the best between them."""
    units = -(-TOKENS // 32)
    between = pooled[sink : units - window]
    return {*range(sink), *range(units - window, units), *(sink + i for i in best(between, select))}


def test_an_oracle_selects_the_pages_with_the_most_attention(model):
    """Mass of pages of 32 by the full softmax. An unfinished page lies in the window."""
    found, result = all_heads(model, "oracle")
    assert not result["drops"]
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            last = model.attentions[
                layer, head * GROUP : (head + 1) * GROUP, -1, : TOKENS // 32 * 32
            ]
            pages = (last / last.sum(-1, keepdim=True)).mean(0).unflatten(0, (-1, 32)).sum(1)
            chosen = always_and_best(pages, 1, 1, 2)
            selected = {32 * page + i for page in chosen for i in range(32)} & set(range(TOKENS))
            everything = set(range(TOKENS))
            assert found[layer, head] == (selected if layer else everything), "layer 0 is dense"
    assert {row["attention"][0] for row in result["layers"][:1]} == {1.0}


def test_quest_selects_by_bounds_of_pages(model):
    """The queries and keys of a prompt are those after RoPE."""
    found, _ = all_heads(model, "quest", "--tokens=427")
    for layer in (2, 3):
        for head, keys in enumerate(model.keys[layer]):
            pages = keys.split(16)
            low = torch.stack([page.amin(0) for page in pages])[:, None]
            high = torch.stack([page.amax(0) for page in pages])[:, None]
            query = model.queries[layer][head * GROUP : (head + 1) * GROUP]
            bounds = torch.maximum(query * low, query * high).sum(-1).amax(1)
            between = bounds[1:-2]  # one page of sink, two of window; 5 are left of 8
            chosen = {0, *(1 + i for i in best(between, 5)), len(pages) - 2, len(pages) - 1}
            selected = {16 * page + i for page in chosen for i in range(16)}
            assert found[layer, head] == selected & set(range(TOKENS))


def test_sink_and_window_are_always_attended_to(model):
    """An odd number of pages of 16 leaves half of an entry of two pages."""
    found, result = all_heads(model, "kvretrieval")
    size = result["page_size"]
    always = {*range(size), *range((-(-TOKENS // size) - 2) * size, TOKENS)}
    heads = [head for head in result["heads"] if len(found[head["layer"], head["head"]]) < TOKENS]
    assert len(heads) == (LAYERS - 1) * KV_HEADS
    assert all(positions(head["always"]) == always for head in heads)


@pytest.mark.parametrize(("budget", "count"), [(256, 2), (128, 1)])
def test_outliers_are_always_attended_to(model, budget, count):
    """A sixth of 13 selected pages of 16, or one of 5; the last page is not full."""
    found, result = all_heads(model, "shadowkv", f"--budget={budget}")
    pages = -(-TOKENS // 16)
    always = {(head["layer"], head["head"]): positions(head["always"]) for head in result["heads"]}
    for layer in (1, 2, 3):
        for head, keys in enumerate(model.keys[layer]):
            chunks = keys[: TOKENS // 16 * 16].unflatten(0, (-1, 2, 8))
            cosines = torch.cosine_similarity(chunks, chunks.mean(2, keepdim=True), dim=-1)
            least = cosines.amin((1, 2))[1 : pages - 2]
            kept = {0, pages - 2, pages - 1, *(1 + page for page in best(-least, count))}
            expected = {16 * page + i for page in kept for i in range(16)} & set(range(TOKENS))
            assert always[layer, head] == expected
            assert expected < found[layer, head]


def test_fier_selects_tokens(model):
    found, result = all_heads(model, "fier")
    index = OneBit()
    for layer in (2, 3):
        for head, keys in enumerate(model.keys[layer]):
            entries = keys[: TOKENS // 32 * 32].float().unflatten(0, (-1, 32))
            query = model.queries[layer][head * GROUP : (head + 1) * GROUP].float()
            scores = index.score_tokens(query, index.build(entries), 64**-0.5).flatten(1)
            pooled = scores.double().softmax(-1).mean(0)[32 : TOKENS - 32]
            chosen = {32 + i for i in best(pooled, BUDGET - 64)}
            assert found[layer, head] == chosen | {*range(32), *range(TOKENS - 32, TOKENS)}
    assert result["layers"][2]["attended"] == [BUDGET] * KV_HEADS


def test_razors_retrieval_heads_attend_to_everything(model):
    """And the others to sink and window, whatever the attention."""
    shape = json.loads((model.folder / "config.json").read_text())
    induction = [[0.1 * layer, 0.9 * (layer == 2)] for layer in range(LAYERS)]
    scores = {
        "format": "vllm-kvretrieval heads 1", "model": "it",
        "shape": {key: shape[key] for key in SHAPE}, "layers": [*range(LAYERS)],
        "induction": induction, "echo": [[0] * KV_HEADS] * LAYERS,
    }  # fmt: skip
    file = model.folder / "scores"
    file.write_text(json.dumps(scores))
    found, result = all_heads(model, "razor", f"--heads={file}")
    everything, part = set(range(TOKENS)), {*range(32), *range(TOKENS // 32 * 32 - 64, TOKENS)}
    assert len(part) == 32 + 64 + TOKENS % 32
    assert {place for place, tokens in found.items() if tokens == everything} == {(2, 1)}
    assert all(tokens in (part, everything) for tokens in found.values())
    assert [row["attended"][1] for row in result["layers"]] == [107, 107, TOKENS, 107]
    assert result["layers"][2]["attention"][1] == pytest.approx(1)
    assert all(head["always"] == head["attended"] for head in result["heads"])


def test_a_head_is_shown_along_the_prompt(model):
    _, result = all_heads(model, "h2o")
    for head in result["heads"]:
        rows = model.attentions[head["layer"], head["head"] * GROUP : (head["head"] + 1) * GROUP]
        mean = rows[:, -LATEST:].mean((0, 1))
        kept, ends = positions(head["attended"]), [*head["stretches"]["begin"], TOKENS]
        assert len(ends) == 101
        for (begin, end), share, count in zip(
            pairwise(ends),
            head["stretches"]["attention"],
            head["stretches"]["attended"],
            strict=True,
        ):
            assert share == pytest.approx(float(mean[begin:end].sum()), abs=1e-4)
            assert count == len(kept & set(range(begin, end)))
        assert positions(head["always"]) == set(range(TOKENS - 63, TOKENS))
        words = model.text.read_text().split()
        first = head["most_attended"][0]
        assert first["text"] == " ".join(words[first["begin"] : first["end"]])
        parts = head["stretches"]["attention"]
        assert parts[head["stretches"]["begin"].index(first["begin"])] == max(parts)


def test_by_default_the_widest_layer_and_its_poorest_head_are_shown(model):
    for method, dense in (("entropykv", 0), ("quest", 2)):
        result = explained(model, f"--method={method}")
        (head,) = result["heads"]
        rows = result["layers"][dense:]
        widest = max(rows, key=lambda row: row["entropy"])
        assert head["layer"] == widest["layer"]
        assert head["attention"] == min(widest["attention"])


@pytest.mark.parametrize("chunks", [[TOKENS], [100, 1, 299, 27]])
@pytest.mark.parametrize("observed", [None, 5, 50])
def test_chunks_do_not_matter(observed, chunks):
    torch.manual_seed(0)
    query, key = torch.randn(4, TOKENS, 16), 2 * torch.randn(2, TOKENS, 16)
    watched = PromptAttention(TOKENS, observed)
    start = 0
    for size in chunks:
        context = torch.arange(start, start + size) + 1
        shown = context[torch.isin(context - 1, watched.positions)]
        if len(shown):
            asked, keys = query[:, shown - 1], key[:, : start + size]
            watched.observe(seen(3, asked, keys, shown, 0.5))
        start += size
    (layer,) = watched.layers.values()
    assert torch.equal(layer.queries, query[:, -LATEST:])
    assert torch.equal(layer.keys, key)
    scores = torch.einsum("hnd,htd->hnt", query, key.repeat_interleave(2, 0)).double() * 0.5
    future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    some = weights[:, 0 if observed is None else -observed :]
    torch.testing.assert_close(layer.mass[0].double(), some.sum((0, 1)), atol=1e-3, rtol=1e-4)
    assert layer.entropy == pytest.approx(float(plain_entropies(some[None], TOKENS)), abs=1e-4)
    latest = weights[:, -LATEST:].unflatten(0, (2, 2)).mean((1, 2))
    torch.testing.assert_close(layer.latest().double(), latest, atol=1e-5, rtol=1e-4)


def test_stretches_and_runs():
    assert borders(10, 3) == [0, 3, 6, 10]
    assert borders(2, 100) == [0, 1, 2]
    assert runs(torch.tensor([1, 1, 0, 1, 0, 0, 1], dtype=torch.bool)) == [[0, 2], [3, 4], [6, 7]]
    assert runs(torch.zeros(3, dtype=torch.bool)) == []
