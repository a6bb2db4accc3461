"""Calibration: filter abilities beside a plain computation, the choice of filters, the command."""

import itertools
import json
import math
import sys
import types

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from tests.support.seen import seen
from vllm_kvretrieval.calibration.abilities import FilterAbility, choose_filters
from vllm_kvretrieval.command import main
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.filters import KIND, filters_for, read_filters, shipped
from vllm_kvretrieval.retrieval.model_files import SHAPE, shape_of
from vllm_kvretrieval.retrieval.roles import Dense, Filters, Follows, roles_of, stage_roles

TOKENS, QUERIES, SELECTED = 700, 10, 40
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
HYBRID = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
CONFIGS = {
    "llama": LlamaConfig(num_hidden_layers=5, **SIZES),
    "gemma3": Gemma3TextConfig(num_hidden_layers=4, layer_types=HYBRID, sliding_window=64, **SIZES),
}
FULL = {"llama": [0, 1, 2, 3, 4], "gemma3": [0, 2, 3]}


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    """A small model of random weights whose layers attend to much the same, and a text."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    first = network.model.layers[0].self_attn
    with torch.no_grad():
        for number, layer in enumerate(network.model.layers):
            attention = layer.self_attn
            attention.k_proj.weight.copy_(first.k_proj.weight * (1 if number else 15))
            attention.q_proj.weight.copy_(first.q_proj.weight * (1 if number else 15))
            if hasattr(attention, "q_norm"):
                attention.q_norm.weight.fill_(3)
    network.save_pretrained(folder)
    words = {f"w{i}": i for i in range(SIZES["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    text = " ".join(f"w{i}" for i in torch.randint(0, 100, (TOKENS + 50,)).tolist())
    (folder / "text.txt").write_text(text)
    return types.SimpleNamespace(
        name=request.param, folder=folder, text=folder / "text.txt", full=FULL[request.param]
    )


def calibrate(model, *more, out="out.json"):
    out = model.folder / out
    options = [f"--tokens={TOKENS}", f"--queries={QUERIES}", f"--selected={SELECTED}"]
    share = "--dense-share=0.9"
    command = ["calibrate", str(model.folder), str(model.text), f"--out={out}", *options, share]
    return main([*command, *more]), out


def plain_similarity(model):
    """Whole matrices of attention, as transformers' eager attention gives them."""
    network = AutoModelForCausalLM.from_pretrained(model.folder, attn_implementation="eager")
    tokens = torch.tensor([[int(word[1:]) for word in model.text.read_text().split()[:TOKENS]]])
    with torch.inference_mode():
        attentions = network(tokens, output_attentions=True).attentions
    half = TOKENS // 2
    positions = [half + (i + 1) * (TOKENS - half) // QUERIES - 1 for i in range(QUERIES)]
    assert positions[-1] == TOKENS - 1
    kept = torch.zeros(len(model.full), len(model.full))
    ends = SELECTED // 16
    for (a, i), (b, j) in itertools.combinations(enumerate(model.full), 2):
        selected = between = 0.0
        for position in positions:
            scores = attentions[i][0, :, position].max(0).values[ends : position + 1 - ends]
            chosen = set((ends + scores.argsort(descending=True)[:SELECTED]).tolist())
            of_later = attentions[j][0, :, position].mean(0)
            selected += sum(float(of_later[t]) for t in chosen)
            between += float(of_later[ends : position + 1 - ends].sum())
        kept[a, b] = selected / between
    return kept


def test_the_ends_of_a_context_say_nothing():
    """All layers look at the first token above all; only then do two of them agree."""
    torch.manual_seed(1)
    n, d, k = 300, 32, 20
    ability = FilterAbility(3, k)
    for layer, planted in enumerate((40, 90, 90)):
        query = torch.nn.functional.normalize(torch.randn(d), dim=0)
        key = torch.zeros(1, n, d)
        key[0, [0, n - 1]] = 100 * query
        key[0, planted : planted + k] = 95 * query
        ability.observe(seen(layer, query.expand(2, 1, d), key, torch.tensor([n])))
    similarity = ability.similarity()
    assert similarity[1, 2] > 0.999
    assert similarity[0, 1] < 0.01


def test_abilities_are_those_of_a_plain_computation(model):
    status, out = calibrate(model, "--no-plot")
    assert status == 0
    result = json.loads(out.read_text())
    expected = plain_similarity(model)
    assert result["layers"] == model.full
    torch.testing.assert_close(torch.tensor(result["kept"]), expected, atol=2e-4, rtol=0)
    uniform = SELECTED / TOKENS
    assert expected.max() > 2 * uniform, "else the test would pass whatever is selected"
    for place, layer in enumerate(model.full[:-1]):
        mean = float(expected[place, place + 1 :].mean())
        assert result["abilities"][str(layer)] == pytest.approx(mean, abs=2e-4)
    file = read_filters(out)
    assert file.model == model.folder.name
    KIND.check_model(file, "it", CONFIGS[model.name])
    assert not out.with_suffix(".png").exists()


def test_a_plot_is_drawn(model):
    status, out = calibrate(model, out="drawn.json")
    assert status == 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_planted_layers_are_found():
    """Layer 1 looks where all later ones look; layer 0 elsewhere."""
    torch.manual_seed(1)
    n, d, k = 300, 32, 20
    needles = torch.randperm(n - 1)[:k]
    ability = FilterAbility(3, k)
    for layer, planted in enumerate((torch.arange(100, 120), needles, needles)):
        query = torch.nn.functional.normalize(torch.randn(d), dim=0)
        key = torch.zeros(1, n, d)
        key[0, planted] = 100 * query
        context = torch.tensor([n])
        ability.observe(seen(layer, query.expand(2, 1, d), key, context))
    similarity = ability.similarity()
    assert similarity[1, 2] > 0.999
    assert similarity[0, 1] == pytest.approx(similarity[0, 2])
    assert similarity[0, 1] < 0.5


@pytest.mark.parametrize("layers", [list(range(9)), [1, 3, 4, 5, 8, 9, 12]])
def test_choice_is_the_best_by_brute_force(layers):
    generator = torch.Generator().manual_seed(len(layers))
    for share in (0.4, 0.6, 0.9):
        similarity = torch.rand(13, 13, generator=generator, dtype=torch.float64).triu(1)
        choices = {}
        for filters in itertools.chain(*(itertools.combinations(layers, m) for m in (1, 2, 3))):
            try:
                roles = roles_of(filters, layers)
            except RetrievalConfigError:
                continue
            kept = [
                float(similarity[role.filter, layer]) if isinstance(role, Follows) else 1.0
                for layer, role in roles.items()
            ]
            dense = sum(not isinstance(role, Follows) for role in roles.values())
            if dense <= math.ceil(share * len(layers)):
                choices[filters] = dense, sum(kept) / len(kept)
        best = max(kept for _, kept in choices.values())
        good = {f: c for f, c in choices.items() if c[1] >= best - 0.01}
        expected = min(good, key=lambda f: (good[f][0], -good[f][1]))
        found = choose_filters(similarity, layers, dense_share=share)
        assert found.filters == expected
        assert found.dense == choices[expected][0]
        assert found.kept == pytest.approx(choices[expected][1])


def test_too_few_dense_layers_to_choose():
    with pytest.raises(ValueError, match="allow a larger share"):
        choose_filters(torch.ones(4, 4), [0, 1, 2, 3], dense_share=0.2)


def test_roles():
    roles = roles_of([1, 5], range(9))
    assert roles == {
        0: Dense(),
        1: Filters(),
        2: Dense(),
        3: Follows(1),
        4: Follows(1),
        5: Filters(),
        6: Dense(),
        7: Follows(5),
        8: Follows(5),
    }
    # Of a hybrid model: the layer after a filter is another kind's, and none of the others dense.
    assert roles_of([5], [5, 11, 17]) == {5: Filters(), 11: Follows(5), 17: Follows(5)}


def test_roles_of_stages():
    """Of a pipeline: who would follow another stage's filter has one of its own stage."""
    roles = roles_of([1, 5], range(12))
    assert stage_roles(roles, range(12)) == roles
    assert stage_roles(roles, range(4)) == {0: Dense(), 1: Filters(), 2: Dense(), 3: Follows(1)}
    assert stage_roles(roles, range(3, 8)) == {
        3: Dense(),  # nothing would follow it: its next layer is dense
        4: Dense(),
        5: Filters(),
        6: Dense(),
        7: Follows(5),
    }
    own = {8: Filters(), 9: Dense(), 10: Follows(8), 11: Follows(8)}
    assert stage_roles(roles, range(8, 12)) == own
    assert stage_roles(roles, range(6, 12)) == {6: Dense(), 7: Filters(), 8: Dense()} | {
        layer: Follows(7) for layer in (9, 10, 11)
    }
    assert stage_roles(roles, [0, 1, 2]) == {layer: Dense() for layer in (0, 1, 2)}
    # Of a hybrid model: no layer is right after the filter.
    assert stage_roles(roles_of([5], [5, 11, 17]), [11, 17]) == {11: Filters(), 17: Follows(11)}


@pytest.mark.parametrize(
    ("filters", "why"),
    [
        ([], "must be 1 to 3 layers"),
        ([1, 3, 5, 7], "must be 1 to 3 layers"),
        ([5, 1], "rising order"),
        ([1, 1], "rising order"),
        ([9], "no full attention; those that have are 0 to 8"),
        ([-1], "no full attention"),
        ([7], "no layer would follow layer 7"),
        ([1, 3], "no layer would follow layer 1"),
    ],
)
def test_filters_that_cannot_be(filters, why):
    with pytest.raises(RetrievalConfigError, match=why):
        roles_of(filters, range(9))


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--selected=500"], "at most half of --tokens"),
        (["--queries=600"], "at most half of --tokens"),
        (["--tokens=2000"], "takes contexts of up to 1024 tokens"),
        (["--tokens=1000"], "the text has 750 tokens"),
    ],
)
def test_what_cannot_be_measured(model, capfd, more, why):
    status, out = calibrate(model, "--no-plot", *more, out="refused.json")
    assert status == 1
    assert why in capfd.readouterr().err
    assert not out.exists()


def test_other_mistakes(model, capfd, tmp_path, monkeypatch):
    assert main(["calibrate", str(tmp_path), str(model.text), "--no-plot"]) == 1
    assert f"{tmp_path} cannot be loaded" in capfd.readouterr().err
    assert main(["calibrate", str(model.folder), str(tmp_path / "no.txt"), "--no-plot"]) == 1
    assert "no.txt" in capfd.readouterr().err
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\xfa")
    assert main(["calibrate", str(model.folder), str(binary), "--no-plot"]) == 1
    assert "is not UTF-8 text" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # it is not installed
    assert main(["calibrate", str(model.folder), str(model.text)]) == 1
    assert "leave the plot out by --no-plot" in capfd.readouterr().err
    for wrong in ("--tokens=-1", f"--queries={'9' * 5000}", "--dense-share=2", "--dtype=int8"):
        with pytest.raises(SystemExit):
            main(["calibrate", "model", "text", wrong])
        assert wrong.split("=")[0] in capfd.readouterr().err


def test_files_that_are_none(tmp_path):
    good = json.loads(shipped()[0].path.read_text())
    with pytest.raises(RetrievalConfigError, match="cannot be read"):
        read_filters(tmp_path / "absent.json")
    for broken, why in (
        ("{", "is not valid JSON"),
        ("[]", "is no file of filters"),
        (json.dumps(good | {"format": "other"}), "is no file of filters"),
        (json.dumps(good | {"model": 1}), "names no model"),
        (json.dumps(good | {"shape": {"vocab_size": 1}}), "has no shape of a model"),
        (json.dumps(good | {"filters": "2, 8"}), "has no list of layers"),
        (json.dumps(good | {"filters": [2, True]}), "has no list of layers"),
    ):
        path = tmp_path / "broken.json"
        path.write_text(broken)
        with pytest.raises(RetrievalConfigError, match=why):
            read_filters(path)


def test_shipped_files_are_found_by_shape_and_name():
    assert len(shipped()) >= 3
    for file in shipped():
        layers = json.loads(file.path.read_text()).get("layers")
        roles_of(file.filters, layers or range(file.shape["num_hidden_layers"]))
        config = types.SimpleNamespace(**file.shape)
        assert filters_for(f"/models/{file.model}", config) is file
        assert filters_for("somebody/fine-tune", config).shape == file.shape
        KIND.check_model(file, file.model, config)
    llama = next(file for file in shipped() if file.model.startswith("Llama-3-8B"))
    assert llama.filters == (2, 8, 18)
    other = types.SimpleNamespace(**{**llama.shape, "vocab_size": 32000})
    with pytest.raises(RetrievalConfigError, match="filter layers of mine are not known"):
        filters_for("mine", other)
    with pytest.raises(RetrievalConfigError, match="vocab_size 128256, not 32000"):
        KIND.check_model(llama, "mine", other)
    assert set(shape_of(types.SimpleNamespace())) == set(SHAPE)
