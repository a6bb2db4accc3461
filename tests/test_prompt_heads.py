"""Heads that read prompts in full: how they are measured, chosen and named."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model_configs import LLAMA
from tests.test_calibration import CONFIGS, model  # noqa: F401  # a fixture
from tests.test_refusals import configure  # noqa: F401  # a fixture
from vllm_kvretrieval.calibration.prompts import CHUNK, PAGE, WINDOW
from vllm_kvretrieval.command import main
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.model_files import SHAPE
from vllm_kvretrieval.retrieval.prompt_heads import (
    FORMAT,
    KIND,
    SHARE,
    SHIPPED,
    PromptHeadFile,
    read_prompt_heads,
    shipped,
)

TOKENS, SELECT = 900, 64
BEGIN = 512  # of the one chunk that is measured
MODEL = "Qwen2.5-Coder-0.5B-Instruct"


def measure(model, *more, tokens=TOKENS):  # noqa: F811
    text, out = model.folder / "long.txt", model.folder / "prompts.json"
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, 100, (1000,), generator=generator).tolist()
    text.write_text(" ".join(f"w{word}" for word in words))
    out.unlink(missing_ok=True)
    again = model.folder / "again.txt"  # the same words once more change no mean
    again.write_text(text.read_text())
    options = [f"--tokens={tokens}", f"--select={SELECT}", f"--out={out}", *more]
    command = ["prompt-heads", str(model.folder), str(text), str(again), *options]
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
        for head in range(2):
            asked = attention[head, :, CHUNK // 8 - 1 :: CHUNK // 8, : pages * PAGE]
            scores = asked.unflatten(2, (pages, PAGE)).sum(3).mean((0, 1))
            best = 1 + scores[1:].topk(SELECT // PAGE).indices
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
    return torch.tensor(changes)


def test_changes_are_those_of_a_plain_computation(model, capfd):  # noqa: F811
    status, out, words = measure(model)
    assert status == 0
    file = read_prompt_heads(out)
    KIND.check_model(file, "it", CONFIGS[model.name])
    assert (file.model, list(file.layers)) == (model.folder.name, model.full)
    expected = plain_changes(model, words)
    torch.testing.assert_close(torch.tensor(file.change), expected, atol=2e-8, rtol=2e-3)
    assert 1e-7 < expected.min() < expected.max() < 1
    said = capfd.readouterr().out
    heads = 2 * len(model.full)
    count = max(round(SHARE * (heads - 2)), 1)  # the first layer is dense
    assert f"{count} of {heads} KV heads of {file.model} should read prompts in full:" in said
    settings = json.loads(out.read_text())["settings"]
    assert (settings["tokens"], settings["selected"]) == (TOKENS, SELECT)
    assert settings["texts"] == ["long.txt", "again.txt"]


def test_a_text_that_is_too_short(model, capfd):  # noqa: F811
    status, out, _ = measure(model, tokens=800)
    assert status == 1
    assert "use --tokens 896 or more, or a smaller --select" in capfd.readouterr().err
    assert not out.exists()
    status, _, _ = measure(model, "--select=31")
    assert status == 1
    assert "31 tokens are less than a page of 32" in capfd.readouterr().err


def file_of(change, layers=None, path=SHIPPED):
    shape = dict.fromkeys(SHAPE) | {"num_hidden_layers": 5}
    rows = tuple(map(tuple, change))
    return PromptHeadFile("it", shape, path, tuple(layers or range(len(rows))), rows)


def test_early_layers_count_more():
    """A change counts once for each layer that follows; none follows the last one."""
    file = file_of([[9, 9], [3, 1], [4, 2], [5, 2], [9, 9]])

    def chosen(share, among):
        flags = file.choose(share, among)
        return [(layer, head) for layer, row in enumerate(flags) for head in (0, 1) if row[head]]

    assert chosen(1 / 8, range(1, 5)) == [(1, 0)]
    assert chosen(3 / 8, range(1, 5)) == [(1, 0), (2, 0), (3, 0)]
    assert chosen(4 / 8, range(1, 5)) == [(1, 0), (2, 0), (2, 1), (3, 0)]
    assert chosen(1 / 2, (2, 3)) == [(2, 0), (3, 0)]
    assert chosen(0, range(5)) == []
    assert chosen(0.01, range(1, 5)) == [(1, 0)]
    assert len(chosen(1, range(5))) == 10


def test_shipped_files():
    counts = {}
    for file in shipped():
        assert file.path.stem == file.model
        count = sum(map(sum, file.choose(SHARE, file.layers[1:])))
        counts[file.model] = count, sum(map(len, file.change))
    assert counts == {
        "SmolLM2-135M-Instruct": (11, 90),
        "SmolLM2-135M-Instruct-32K": (11, 90),
        MODEL: (6, 48),
    }


def test_files_that_are_none(tmp_path):
    good = json.loads((SHIPPED / f"{MODEL}.json").read_text())
    assert good["format"] == FORMAT
    path, no_changes = tmp_path / "broken.json", "has no changes per layer and KV head"
    for broken, why in (
        (good | {"format": "vllm-kvretrieval heads 1"}, "is no file of prefill_heads"),
        (good | {"layers": 3}, "has no list of layers"),
        (good | {"layers": [*range(23), 22]}, "has no list of layers that rises"),
        (good | {"change": [[0.0, float("inf")]] * 24}, no_changes),
        (good | {"change": good["change"][1:]}, no_changes),
        (good | {"change": [[-1.0, 0.0]] * 24}, no_changes),
        (good | {"change": [["1"]] * 24}, no_changes),
        (good | {"shape": good["shape"] | {"num_hidden_layers": None}}, no_changes),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(RetrievalConfigError, match=f"prefill_heads=.*broken.json' {why}"):
            read_prompt_heads(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_heads": 3}, "prefill_heads=3 must be the path of a file that vllm-kvretrieval"),
        ({"prefill_heads": {"share": -0.1}}, "share must be a number from 0 up to 1"),
        ({"prefill_heads": {"share": 1.5}}, "share must be a number from 0 up to 1"),
        ({"prefill_heads": {"share": float("nan")}}, "share must be a number from 0 up to 1"),
        ({"prefill_heads": [[2]]}, "must hold 1 for a head that reads prompts in full"),
        ({"prefill_heads": "/nowhere.json"}, "cannot be read .*prompt-heads MODEL TEXT"),
        ({"prefill_heads": [[1]], "prefill_budget": None}, "no effect without prefill_budget"),
        (
            {"prefill_heads": str(SHIPPED / f"{MODEL}.json"), "prefill_budget": None},
            r"prefill_heads='[^']*json' has no effect without",
        ),
        ({"prefill_heads": [[1]], "method": "omnikv"}, "has no effect with omnikv"),
    ],
    ids=str,
)
def test_values_that_name_no_heads(options, message):
    made = {"prefill_budget": 1024} | options
    made = {key: value for key, value in made.items() if value is not None}
    with pytest.raises(RetrievalConfigError, match=message):
        RetrievalConfig.from_options(made.pop("method", "kvretrieval"), made)


def test_models(configure, tmp_path):  # noqa: F811
    """A model that is not known has no such heads, unless they are asked for."""

    def start(heads=None, **options):
        retrieval = {"prefill_budget": 1024, "dense_layers": 0}
        retrieval |= {} if heads is None else {"prefill_heads": heads}
        return configure(LLAMA, additional_config={"kv_retrieval": retrieval}, **options)

    assert start()
    assert start({"share": 0})
    assert start([[1], [0]])
    known = str(SHIPPED / f"{MODEL}.json")
    for heads, options, message in (
        (
            {"share": 0.2},
            {},
            r"KV heads to read prompts in full of .* are not known",
        ),
        ([[1]], {}, r"prefill_heads=.*: 1 layers, but 2 retrieve"),
        ([[1, 0], [0, 0]], {}, r"2 KV heads for layer 0, which has 1; give as many"),
        (known, {}, f"was made for {MODEL}, which is another model"),
        ([[1], [0]], {"pipeline_parallel_size": 2}, "prefill_heads is a list of all layers"),
    ):
        with pytest.raises(ValueError, match=message):
            start(heads, **options)
