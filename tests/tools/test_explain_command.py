"""`vllm-kvretrieval explain`: what it prints, writes and refuses, also for real models."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends import cpu_attn

from benchmarks.texts import excerpt
from tests.support.engine import checkpoint
from tests.tools.test_explain import (  # noqa: F401
    BUDGET,
    KV_HEADS,
    TOKENS,
    _explained,
    best,
    model,
    plain_entropies,
    positions,
    save_tokenizer,
    smoothed,
)
from vllm_kvretrieval.attention.cpu import refusals
from vllm_kvretrieval.command import main
from vllm_kvretrieval.options.engine import RetrievalConfig


def test_the_command(model, capsys, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    files = "--plot=new/drawn.png", "--json=new/numbers.json"
    command = ["explain", str(model.folder), str(model.text), f"--budget={BUDGET}"]
    assert main([*command, *files, "--layer", "1", "3", "--head", "0"]) == 0
    printed = capsys.readouterr().out
    assert f"{TOKENS} tokens; entropykv at a budget of {BUDGET}" in printed
    assert "attention of all queries" in printed
    assert "Layer 1, KV head 0: " in printed
    assert "Layer 3, KV head 0: " in printed
    assert "plot:    new/drawn.png" in printed
    assert (tmp_path / "new/drawn.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "new/numbers.json").read_text())
    for row in result["layers"]:
        line = next(x for x in printed.splitlines() if x.startswith(f"  {row['layer']:>5}  "))
        assert f"{row['entropy']:.3f}" in line
        assert f"{100 * sum(row['attention']) / KV_HEADS:.1f} %" in line
    strips = [line for line in printed.splitlines() if line.startswith("  |")]
    assert [len(strip) for strip in strips] == [2 + 102] * 4
    assert main([*command, "--method=quest"]) == 0
    assert "attention of the last 32 queries" in capsys.readouterr().out
    picture = tmp_path / f"{model.folder.name}-explain.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def engine_pages(model, monkeypatch):  # noqa: F811
    """Tokens per page of an engine, on a CPU where vLLM lays keys out in a given way."""
    ratios = {isa: {"float32": 2.0, "bfloat16": 2.0} for isa in (*refusals.RATIOS, "portable")}
    monkeypatch.setattr(refusals, "RATIOS", ratios)

    def pages(layout):
        def isa(dtype, size, head_size=None):
            return layout if size % 32 == 0 else "vec16"

        monkeypatch.setattr(cpu_attn, "_get_attn_isa", isa)
        engine = EngineArgs(
            model=str(model.folder), attention_backend="kvretrieval", skip_tokenizer_init=True
        ).create_engine_config()
        config = RetrievalConfig.from_vllm(engine)
        assert config is not None
        return config.page_size

    return pages


def test_pages_are_those_of_an_engine(model, engine_pages, capfd, tmp_path):  # noqa: F811
    """The last of four pages of 16 lacks 5 tokens."""
    assert engine_pages("vec") == 16
    out = tmp_path / "numbers"
    command = ["explain", str(model.folder), str(model.text), "--no-plot", f"--json={out}"]
    command += "--method=kvretrieval", "--layer=3", "--budget=64"
    assert main(command) == 0
    assert "at a budget of 64, in pages of 16 tokens" in capfd.readouterr().out
    result = json.loads(out.read_text())
    assert [row["attended"] for row in result["layers"]] == [[TOKENS] * 2, *[[64 - 5] * 2] * 3]
    borders = {border % 16 for span in result["heads"][0]["attended"] for border in span}
    assert borders == {0, TOKENS % 16}

    assert engine_pages("amx") == 32
    assert main(command) == 1
    assert "budget=64 is too small" in capfd.readouterr().err
    assert main([*command[:-1], "--budget=128"]) == 0
    assert "at a budget of 128, in pages of 32 tokens" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--budget=448"], "427 tokens fit in --budget 448"),
        (["--budget=100"], "budget=100 must be a positive multiple of page_size=32"),
        (["--budget=64", "--method=freekv"], "budget=64 is too small"),
        (["--tokens=500"], "the text has 427 tokens"),
        (["--method=razor"], "not known (known: "),
        (["--heads=none.json"], "heads='none.json' cannot be read"),
        (["--method=omnikv"], "its filters select for the layers after them"),
        (["--layer=4"], "--layer 4 does not exist"),
        (["--head", "0", "2"], "has KV heads 0 to 1"),
        (["--layer", *["1"] * 9, "--head", "0", "1"], "name 18 KV heads; at most 16"),
    ],
)
def test_what_cannot_be_explained(model, capfd, more, why):  # noqa: F811
    command = ["explain", str(model.folder), str(model.text), "--no-plot", f"--budget={BUDGET}"]
    assert main([*command, *more]) == 1
    assert why in capfd.readouterr().err


def test_other_mistakes(model, capfd, tmp_path, monkeypatch):  # noqa: F811
    assert main(["explain", str(tmp_path), str(model.text), "--no-plot"]) == 1
    assert f"{tmp_path} cannot be loaded" in capfd.readouterr().err
    long = tmp_path / "long.txt"
    long.write_text("w1 " * 3000)
    assert main(["explain", str(model.folder), str(long), "--no-plot"]) == 1
    assert "up to 2048 tokens, and the text has 3000: use --tokens 2048" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # it is not installed
    assert main(["explain", str(model.folder), str(model.text)]) == 1
    assert "leave the plot out by --no-plot" in capfd.readouterr().err
    wrongs = "--method=none", "--observation=0", "--observation=last", "--layer=-1", "--budget=0"
    for wrong in (*wrongs, f"--budget={'9' * 400}", f"--layer={1 << 31}"):
        with pytest.raises(SystemExit):
            main(["explain", "model", "text", wrong])
        assert wrong.split("=")[0] in capfd.readouterr().err


def test_a_hybrid_model(model, tmp_path, capfd):  # noqa: F811
    """Layers with a sliding window are none of ours, and the others keep their numbers."""
    torch.manual_seed(2)
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=3, head_dim=16,
        num_attention_heads=4, num_key_value_heads=1, layer_types=kinds, sliding_window=64,
    )  # fmt: skip
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    network.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    result = _explained(tmp_path, model.text, "--budget=128", "--method=kvretrieval")
    ids = torch.tensor([[int(word[1:]) for word in model.text.read_text().split()]])
    with torch.inference_mode():
        attentions = network(ids, output_attentions=True).attentions
    entropies = plain_entropies(torch.stack([attentions[0], attentions[2]])[:, 0].double(), 32)
    assert [row["layer"] for row in result["layers"]] == [0, 2]
    said = [row["entropy"] for row in result["layers"]]
    assert said == pytest.approx(entropies.tolist(), abs=1e-3)
    assert [row["attended"] for row in result["layers"]] == [[TOKENS], [128 - 21]]
    command = ["explain", str(tmp_path), str(model.text), "--no-plot", "--budget=128"]
    assert main([*command, "--layer=1"]) == 1
    assert "--layer 1 has no full attention" in capfd.readouterr().err


@pytest.mark.model
def test_a_real_model(tmp_path):
    """Each layer of SmolLM2 looks as widely as transformers' own attention says."""
    folder, text, out = checkpoint("SmolLM2-135M-Instruct"), tmp_path / "text", tmp_path / "out"
    text.write_text(excerpt(3000, 100))
    more = "--tokens=320", "--budget=128", "--method=snapkv", "--layer=12", "--head=1"
    assert main(["explain", folder, str(text), "--no-plot", f"--json={out}", *more]) == 0
    result = json.loads(out.read_text())
    network = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(text.read_text(), return_tensors="pt")["input_ids"][:, :320]
    with torch.inference_mode():
        attentions = torch.stack(network(ids, output_attentions=True).attentions)[:, 0].double()
    entropies = plain_entropies(attentions, 32)
    said = [row["entropy"] for row in result["layers"]]
    assert said == pytest.approx(entropies.tolist(), abs=1e-3)
    mass = attentions[12, 3:6, -32:].sum((0, 1))[:-32]
    kept = best(smoothed(mass), 96) | set(range(288, 320))
    assert len(positions(result["heads"][0]["attended"]) ^ kept) <= 2, "but for rounding"
