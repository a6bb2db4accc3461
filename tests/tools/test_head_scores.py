"""``vllm-kvretrieval heads``: scores beside a plain computation, planted heads, the command."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.seen import seen
from tests.tools.test_calibration import CONFIGS, model  # noqa: F401  # a fixture
from vllm_kvretrieval.calibration.head_scores import REPEATS, HeadScores, repeated_tokens
from vllm_kvretrieval.command import main
from vllm_kvretrieval.retrieval.heads import KIND, read_heads

PERIOD, QUERIES = 70, 37


def measure(model, *more, out="heads.json"):  # noqa: F811
    out = model.folder / out
    options = [f"--tokens={PERIOD}", f"--queries={QUERIES}", f"--out={out}", *more]
    return main(["heads", str(model.folder), *options]), out


def plain_scores(model, seed):  # noqa: F811
    """Scores from whole matrices of attention, as transformers' eager attention gives them."""
    network = AutoModelForCausalLM.from_pretrained(model.folder, attn_implementation="eager")
    tokens = repeated_tokens(100, [], PERIOD, seed)
    with torch.inference_mode():
        attentions = network(tokens[None], output_attentions=True).attentions
    later = (REPEATS - 1) * PERIOD
    positions = [PERIOD + (i + 1) * later // QUERIES - 1 for i in range(QUERIES)]
    assert positions[-1] == REPEATS * PERIOD - 1
    scores = torch.zeros(2, len(model.full), 4)
    for place, layer in enumerate(model.full):
        for position in positions:
            for earlier in range(position):
                given = attentions[layer][0, :, position, earlier] / QUERIES
                if tokens[earlier] == tokens[position]:
                    scores[1, place] += given
                if earlier and tokens[earlier - 1] == tokens[position]:
                    scores[0, place] += given
    return scores.unflatten(2, (2, 2)).amax(3)  # of KV heads


def test_scores_are_those_of_a_plain_computation(model, capfd):  # noqa: F811
    status, out = measure(model, "--seed=3")
    assert status == 0
    file = read_heads(out)
    KIND.check_model(file, "it", CONFIGS[model.name])
    assert (file.model, list(file.layers)) == (model.folder.name, model.full)
    expected = plain_scores(model, 3)
    found = torch.tensor([file.induction, file.echo])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    assert (expected[0] - expected[1]).abs().amax() > 1e-3, "else either would pass for the other"
    heads = len(model.full) * 2
    said = f"{max(round(0.15 * heads), 1)} of {heads} KV heads:"
    assert said in capfd.readouterr().out
    settings = json.loads(out.read_text())["settings"]
    assert (settings["tokens"], settings["queries"], settings["seed"]) == (PERIOD, QUERIES, 3)


def test_planted_heads_are_found():
    """The first KV head looks for what followed its token, the second one for the token itself.

    One query head of two does so, the other one looks everywhere alike.
    """
    period, size = 20, 64
    codes = torch.nn.functional.normalize(
        torch.randn(period, size, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    tokens = torch.arange(REPEATS * period) % period
    key = 100 * torch.stack([codes[tokens.roll(1)], codes[tokens]])
    key[0, 0] = 0  # nothing is before it
    query = torch.zeros(4, len(tokens), size)
    query[0] = query[3] = codes[tokens]
    scores = HeadScores(period)
    asked = torch.arange(period, len(tokens))
    scores.observe(seen(0, query[:, asked], key, asked + 1))
    uniform = sum((t // period) / (t + 1) for t in asked.tolist()) / len(asked)
    again = sum((t // period) / (t // period + 1) for t in asked.tolist()) / len(asked)
    assert scores.induction(0) == pytest.approx([1, uniform], abs=2e-3)
    assert scores.echo(0) == pytest.approx([uniform, again], abs=2e-3)


def test_tokens_repeat():
    tokens = repeated_tokens(100, [3, 5, 7, 200], 90, 1)
    first = tokens[:90]
    assert torch.equal(tokens, first.repeat(4))
    assert len({*first.tolist()} - {3, 5, 7}) == 90
    assert not torch.equal(first, repeated_tokens(100, [3, 5, 7], 90, 2)[:90])
    with pytest.raises(ValueError, match="the model has 97 tokens: use --tokens 97 or less"):
        repeated_tokens(100, [3, 5, 7], 98, 1)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("--tokens=300", "takes contexts of up to 1024 tokens, 4 times 256: use --tokens 256 or"),
        ("--tokens=200", "the model has 100 tokens: use --tokens 100 or less"),
    ],
)
def test_what_cannot_be_measured(model, capfd, more, why):  # noqa: F811
    status, out = measure(model, more, out="refused.json")
    assert status == 1
    assert why in capfd.readouterr().err
    assert not out.exists()


def test_other_mistakes(tmp_path, capfd):
    assert main(["heads", str(tmp_path)]) == 1
    assert f"{tmp_path} cannot be loaded" in capfd.readouterr().err
    huge = "9" * 400
    wrongs = ("--tokens=0", f"--tokens={huge}", f"--queries={huge}", "--share=2", "--dtype=int8")
    for wrong in (*wrongs, "--share=nan", "--seed=one", f"--seed={huge}"):
        with pytest.raises(SystemExit):
            main(["heads", "model", wrong])
        assert wrong.split("=")[0] in capfd.readouterr().err
