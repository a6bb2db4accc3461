"""Shares of KV heads in the budget of prompts: how they are measured, chosen and given."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.options.test_refusals import configure  # noqa: F401  # a fixture
from tests.support.model_configs import LLAMA
from tests.tools.test_calibration import CONFIGS, model  # noqa: F401  # a fixture
from vllm_kvretrieval.calibration.prompt_changes import CHUNK, PAGE, WINDOW
from vllm_kvretrieval.command import main
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.model_files import SHAPE
from vllm_kvretrieval.retrieval.prompt_shares import (
    FORMAT,
    KIND,
    ONE_IN,
    SHIPPED,
    PromptShareFile,
    nearest,
    read_prompt_shares,
    shipped,
)

TOKENS, SELECTED = 1024, [0, 32, 64, 128, 256, 512]  # an eighth is 128
BEGIN = 512  # of the one chunk that is measured
MODEL = "Qwen2.5-Coder-0.5B-Instruct"


def measure(model, *more, tokens=TOKENS):  # noqa: F811
    text, out = model.folder / "long.txt", model.folder / "prompts.json"
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, 100, (1100,), generator=generator).tolist()
    text.write_text(" ".join(f"w{word}" for word in words))
    out.unlink(missing_ok=True)
    again = model.folder / "again.txt"  # the same words once more change no mean
    again.write_text(text.read_text())
    options = [f"--tokens={tokens}", f"--out={out}", *more]
    command = ["prompt-shares", str(model.folder), str(text), str(again), *options]
    return main(command), out, words


def plain_changes(model, words):  # noqa: F811
    """From whole matrices of attention, as transformers' eager attention gives them."""
    network = AutoModelForCausalLM.from_pretrained(model.folder, attn_implementation="eager")
    inputs, values = [], []
    for layer in network.model.layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append((args or [*kwargs.values()])[0][0]),
            with_kwargs=True,
        )
        layer.self_attn.v_proj.register_forward_hook(lambda *args: values.append(args[2][0]))
    with torch.inference_mode():
        outputs = network(torch.tensor([words[:TOKENS]]), output_attentions=True)
    rows, pages = slice(BEGIN, BEGIN + CHUNK), (BEGIN - WINDOW) // PAGE
    changes = []
    for layer in model.full:
        attention = outputs.attentions[layer][0, :, rows].unflatten(0, (2, 2))
        weights = network.model.layers[layer].self_attn.o_proj.weight.unflatten(1, (2, 2, 16))
        norms, changes_of = inputs[layer][rows].square().sum(-1), []
        for head, select in product(range(2), SELECTED):
            asked = attention[head, :, CHUNK // 8 - 1 :: CHUNK // 8, : pages * PAGE]
            scores = asked.unflatten(2, (pages, PAGE)).sum(3).mean((0, 1))
            best = 1 + scores[1:].topk(min(select // PAGE, pages - 1)).indices
            seen = torch.ones(TOKENS, dtype=torch.bool)
            seen[PAGE : pages * PAGE] = False
            for page in best.tolist():
                seen[page * PAGE : (page + 1) * PAGE] = True
            left = attention[head] * seen
            value = values[layer].unflatten(1, (2, 16))[:, head]
            change = (left / left.sum(-1, keepdim=True) - attention[head]) @ value
            moved = torch.einsum("gnd,xgd->nx", change, weights[:, head])
            parts = moved.square().sum(-1) / norms
            changes_of.append(float(parts[norms > 0].mean()))
        changes.append(changes_of)
    return torch.tensor(changes).unflatten(1, (2, -1))


def test_changes_are_those_of_a_plain_computation(model, capfd):  # noqa: F811
    status, out, words = measure(model)
    assert status == 0
    file = read_prompt_shares(out)
    KIND.check_model(file, "it", CONFIGS[model.name])
    assert (file.model, list(file.layers)) == (model.folder.name, model.full)
    assert (file.tokens, list(file.selected)) == (TOKENS, SELECTED)
    expected = plain_changes(model, words)
    torch.testing.assert_close(torch.tensor(file.change), expected, atol=2e-8, rtol=2e-3)
    assert (expected[..., -1] < 1e-9).all(), "there are no more pages"
    assert 1e-7 < expected[..., 0].min() < expected[..., 0].max() < 1
    said = capfd.readouterr().out
    heads = 2 * (len(model.full) - 1)  # the first layer is dense
    assert f"Of {heads} KV heads of {file.model} " in said
    largest = max(map(max, file.choose(model.full[1:], 8)[1:]))
    assert f"{largest:5.2f} times the mean" in said
    assert json.loads(out.read_text())["settings"]["texts"] == ["long.txt", "again.txt"]


def test_a_text_that_is_too_short(model, capfd):  # noqa: F811
    status, out, _ = measure(model, tokens=1000)
    assert status == 1
    assert "use --tokens 1024 or more" in capfd.readouterr().err
    assert not out.exists()


def file_of(change, selected=(0,), layers=None, path=SHIPPED):
    """Measurements of a model with five layers, in texts of 800 tokens: 100 is the mean."""
    shape = dict.fromkeys(SHAPE) | {"num_hidden_layers": 5}
    rows = tuple(tuple(map(tuple, row)) for row in change)
    return PromptShareFile(
        "it", shape, path, tuple(layers or range(len(rows))), 800, selected, rows
    )


def test_shares_go_to_heads_that_gain_most():
    """The head that gains most by a token has its tokens first, and the next one those left."""
    file = file_of([[[4.0, 1.0], [5.0, 1.0]], [[2.0, 1.5], [0.0, 0.0]]], (0, 100))
    assert [row.tolist() for row in file.choose([0], 8)] == [[1, 1], [1, 1]]
    file = file_of([[[4.0, 1.0], [1.0, 1.0]], [[3.0, 2.0], [0.0, 0.0]]], (0, 100))
    assert [row.tolist() for row in file.choose([0], 8)] == [[2, 0], [1, 1]]  # of 700, 100 are left
    assert [row.tolist() for row in file.choose([0, 1], 8)] == [[1, 0], [3, 0]]
    assert [row.tolist() for row in file.choose([0, 1], 4)] == [[0.5, 0], [3.5, 0]]
    assert [row.tolist() for row in file.choose([0, 1], 1)] == [[1, 1], [1, 1]]


def test_a_head_that_gains_late_is_not_passed_over():
    """It gains nothing by few tokens, and much by all."""
    (shares,) = file_of([[[4.0, 4.0], [0.1, 0.05]]], (0, 100)).choose([0], 8)
    assert shares.tolist() == [2, 0]


def test_early_layers_count_more():
    """A loss counts once for its layer and each that follows."""
    file = file_of([[[4.0]], [[4.0]], [[4.0]], [[4.0]], [[4.0]]])
    assert [row.tolist() for row in file.choose(range(1, 5), 8)] == [[1], [4], [0], [0], [0]]
    file = file_of([[[4.0]], [[4.0]], [[4.0]], [[9.0]], [[19.0]]])
    assert [row.tolist() for row in file.choose(range(1, 5), 8)] == [[1], [0], [0], [0], [4]]
    assert [row.tolist() for row in file.choose([], 8)] == [[1]] * 5


def test_shares_are_those_of_the_nearest_number():
    """Nearest by ratio; where nothing is selected any will do."""
    between, select = (
        np.array([100, 100, 42, 41, 1000, 64, 9, 0]),
        np.array([50, 8, 12, 12, 5, 64, 0, 0]),
    )
    found = np.array(ONE_IN)[nearest(between, select)]
    assert found[:6].tolist() == [2, 12, 4, 3, 16, 1.5]


def test_shipped_files():
    for file in shipped():
        assert file.path.stem == file.model
        for one_in in ONE_IN:
            shares = np.array(file.choose(file.layers[1:], one_in))
            assert (shares[0] == 1).all()
            assert shares[1:].mean() == pytest.approx(1)
            assert min(one_in, 4) <= shares.max() <= one_in
            assert (shares[1:] < 0.5).mean() > 0.1 or one_in < 3
    assert [file.model for file in shipped()] == [
        MODEL,
        "SmolLM2-135M-Instruct-32K",
        "SmolLM2-135M-Instruct",
    ]


def test_files_that_are_none(tmp_path):
    good = json.loads((SHIPPED / f"{MODEL}.json").read_text())
    assert good["format"] == FORMAT
    path, no_changes = tmp_path / "broken.json", "has no changes per layer, KV head and number"
    no_numbers, count = "has no rising numbers of selected tokens", len(good["selected"])
    for broken, why in (
        (good | {"format": "vllm-kvretrieval heads 1"}, "is no file of prefill_budget_shares"),
        (good | {"layers": 3}, "has no list of layers"),
        (good | {"layers": [*range(23), 22]}, "has no list of layers that rises"),
        (good | {"selected": None}, no_numbers),
        (good | {"selected": []}, no_numbers),
        (good | {"selected": [0, 64, 32]}, no_numbers),
        (good | {"selected": [-5, 0]}, no_numbers),
        (good | {"tokens": 512}, no_numbers),
        (good | {"tokens": 1e9}, no_numbers),
        (good | {"change": None}, no_changes),
        (good | {"change": [[[float("inf")] * count]] * 24}, no_changes),
        (good | {"change": good["change"][1:]}, no_changes),
        (good | {"change": [[[-1.0] * count]] * 24}, no_changes),
        (good | {"change": [[[1.0] * (count - 1)]] * 24}, no_changes),
        (good | {"change": [[["1"] * count]] * 24}, no_changes),
        (good | {"change": [[]] * 24}, no_changes),
        (good | {"shape": good["shape"] | {"num_hidden_layers": None}}, "has no number of layers"),
        (good | {"shape": good["shape"] | {"num_hidden_layers": 20}}, "has no number of layers"),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(
            RetrievalConfigError, match=f"prefill_budget_shares=.*broken.json' {why}"
        ):
            read_prompt_shares(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prefill_budget_shares": 3},
            "prefill_budget_shares=3 must be the path of a file that vllm-kvretrieval",
        ),
        ({"prefill_budget_shares": {"share": 0.1}}, "must be the path of a file"),
        ({"prefill_budget_shares": [[-1, 2]]}, "prefill_budget_shares=.* must hold numbers of 0"),
        ({"prefill_budget_shares": [[0], [0]]}, "and one above 0 at least"),
        ({"prefill_budget_shares": [["1"]]}, "must hold numbers of 0 or more"),
        ({"prefill_budget_shares": []}, "prefill_budget_shares=.* must be one of"),
        (
            {"prefill_budget_shares": "/nowhere.json"},
            "cannot be read .*prompt-shares MODEL TEXT",
        ),
        (
            {"prefill_budget_shares": [[1]], "prefill_budget": None},
            "no effect without prefill_budget",
        ),
        (
            {
                "prefill_budget_shares": str(SHIPPED / f"{MODEL}.json"),
                "prefill_budget": None,
            },
            r"prefill_budget_shares='[^']*json' has no effect without",
        ),
        (
            {"prefill_budget_shares": [[1]], "method": "omnikv"},
            "has no effect with omnikv",
        ),
    ],
    ids=str,
)
def test_values_that_are_no_shares(options, message):
    made = {"prefill_budget": 1024} | options
    made = {key: value for key, value in made.items() if value is not None}
    with pytest.raises(RetrievalConfigError, match=message):
        RetrievalConfig.from_options(made.pop("method", "kvretrieval"), made)


def test_models(configure, tmp_path):  # noqa: F811
    """Heads of a model that is not known have equal shares."""

    def start(shares=None, **options):
        retrieval = {"prefill_budget": 1024, "dense_layers": 0}
        retrieval |= {} if shares is None else {"prefill_budget_shares": shares}
        return configure(LLAMA, additional_config={"kv_retrieval": retrieval}, **options)

    assert start()
    assert start("uniform")
    assert start([[2], [1]])
    assert start([2, 1])
    known = str(SHIPPED / f"{MODEL}.json")
    for shares, options, message in (
        ([[1]], {}, r"prefill_budget_shares=.*: 1 layers, but 2 retrieve"),
        ([[1, 0], [0, 0]], {}, r"2 numbers for layer 0 .*, which has 1 KV heads; give as many"),
        (known, {}, f"was made for {MODEL}, which is another model"),
        ([1, 2], {"pipeline_parallel_size": 2}, "prefill_budget_shares is a list of all layers"),
    ):
        with pytest.raises(ValueError, match=message):
            start(shares, **options)
