"""``vllm-kvretrieval certify``: what it measures, and what a start makes of its certificate."""

import argparse
import sys

import pytest
from vllm.engine.arg_utils import EngineArgs

from benchmarks.texts import excerpt
from tests.support import workers
from tests.support.engine import DTYPE, checkpoint, engine, shortened
from vllm_kvretrieval.calibration import certify_command, certifying
from vllm_kvretrieval.calibration.certifying import lengths_of
from vllm_kvretrieval.calibration.divergence import TOP_LOGPROBS
from vllm_kvretrieval.calibration.forcing import ForceTokens
from vllm_kvretrieval.command import main
from vllm_kvretrieval.options.source import selected_method
from vllm_kvretrieval.retrieval.certificates import path_for, read_certificate
from vllm_kvretrieval.upstream.defaults import all_cores

SMOL = "SmolLM2-135M-Instruct"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'
FEW = {"KEYS": 2, "TEXTS": 2, "FORCED": 33, "TIMED": 4, "WARM": 1, "REPEATS": 2}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """VLLM's directory of caches; engines get all cores and a process of their own."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    for name, value in all_cores().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    return tmp_path / "cache"


def options(budget, *others):
    given = ["--", "--dtype", DTYPE, "--enforce-eager", "--max-model-len", "2048"]
    return [*given, "--max-num-seqs", "2", "--kv-retrieval.budget", str(budget), *others]


def served(model):
    return EngineArgs(model, attention_backend="certified", dtype=DTYPE, max_model_len=2048)


@pytest.mark.engine
@pytest.mark.model
def test_a_model_that_does_not_pass(tmp_path, cache, monkeypatch, capsys):
    """Three layers of a model find nothing: its certificate says so, and it is served exactly."""
    for name, value in FEW.items():
        monkeypatch.setattr(certifying, name, value)
    model = shortened(tmp_path / "model", SMOL, 3)
    text = tmp_path / "text.txt"
    text.write_text(excerpt(60_000))
    with workers.forked():
        assert main(["certify", model, "--text", str(text), *options(256)]) == 1
    certificate = read_certificate(path_for(cache, model))
    (quality,) = certificate.quality
    assert (quality.tokens, quality.keys, certificate.longest) == (2048, 2, 2048)
    assert quality.perplexity > 1
    assert 0 < quality.divergence < 1
    assert [each.tokens for each in certificate.steps] == [1024, 2048]
    assert certificate.options["budget"] == 256
    said = capsys.readouterr().out
    assert "full attention finds 0 of 2 pass keys at 2,048 tokens, too few to tell" in said
    assert "It does not pass: --attention-backend certified serves it with full" in said
    assert selected_method(served(model).create_engine_config()) == "full"


@pytest.mark.engine
@pytest.mark.model
def test_prompts_that_retrieve_are_read_anew(tmp_path, monkeypatch):
    """As the server would read them, though the prefix cache has them from full attention."""
    for name, value in FEW.items():
        monkeypatch.setattr(certifying, name, value)
    with engine(
        shortened(tmp_path / "model", SMOL, 3),
        attention_backend="kvretrieval",
        additional_config={"kv_retrieval": {"budget": 256, "prefill_budget": 256}},
        max_model_len=2048,
        max_num_seqs=2,
        enforce_eager=True,
        logits_processors=[ForceTokens],
        max_logprobs=TOP_LOGPROBS,
    ) as llm:
        certify_command._measure(llm, excerpt(60_000), "")
        (counts,) = llm.collective_rpc(lambda worker: worker.requests.counts())
    assert 0.5 < counts.prompt_attended / counts.prompt < 0.8


@pytest.mark.engine
@pytest.mark.model
@pytest.mark.slow
def test_a_model_that_passes(cache, monkeypatch, capsys):
    """It is served as it was measured."""
    for name, value in FEW.items():
        monkeypatch.setattr(certifying, name, value)
    monkeypatch.setattr("vllm_kvretrieval.retrieval.certificates.STEP", 9.0)  # cores are shared
    model = checkpoint("Qwen2.5-Coder-0.5B-Instruct")
    with workers.forked():
        assert main(["certify", model, *options(1792)]) == 0
    certificate = read_certificate(path_for(cache, model))
    assert (certificate.quality[0].found, certificate.quality[0].missed) == (2, 0)
    assert "It passes: --attention-backend certified serves it by kvretrieval" in (
        capsys.readouterr().out
    )
    config = served(model).create_engine_config()
    assert selected_method(config) == "kvretrieval"
    assert config.additional_config["kv_retrieval"]["budget"] == 1792


def test_lengths_beyond_the_budget():
    assert lengths_of(8192, 2048) == [4096, 8192]
    assert lengths_of(4096, 2048) == [4096]
    assert lengths_of(2048, 256) == [2048]
    for longest, budget in ((2048, 2048), (1024, 256)):
        with pytest.raises(ValueError, match=r"raise --max-model-len, or lower --kv-retrieval\."):
            lengths_of(longest, budget)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--", "--attention-backend", "certified"], "behind which certificates are"),
        (["--", "--attention-backend", "TORCH_SDPA"], "torch_sdpa: name a method, or leave it out"),
        (["--text", "no-such-file"], "no-such-file"),
        (["--", "--enable-lora"], "no certificate covers LoRA adapters: leave --enable-lora out"),
        (["--", "--speculative-config", NGRAM], "covers drafts: leave --speculative-config out"),
        (["--", "--kv-retrieval.drafts", "3"], "covers drafts: leave --kv-retrieval.drafts out"),
        (["--", "--kv-retrieval.lossless", "true"], "leave --kv-retrieval.lossless out"),
    ],
)
def test_refused(tmp_path, capsys, more, message):
    model = shortened(tmp_path / "model", SMOL, 1)
    assert main(["certify", model, *more]) == 1
    assert message in capsys.readouterr().err


def test_a_certificate_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    """It is said before anything is measured."""
    model = shortened(tmp_path / "model", SMOL, 1)
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    monkeypatch.setattr("vllm.LLM.from_engine_args", lambda _: pytest.fail("an engine starts"))
    assert main(["certify", model, *options(256)]) == 1
    assert "name another directory of caches by VLLM_CACHE_ROOT" in capsys.readouterr().err


def test_a_certificate_is_written_at_once(tmp_path):
    """Of two runs each leaves a whole one, and one that is interrupted leaves the one before."""
    path = tmp_path / "folder" / "model.json"
    for text in "12":
        with certify_command._written_at_once(path) as new:
            new.write_text(text)
            assert not path.exists() or path.read_text() == "1"
    with (
        certify_command._written_at_once(path) as one,
        certify_command._written_at_once(path) as by,
    ):
        one.write_text("3")
        by.write_text("longer")
    assert path.read_text() == "3"

    def interrupted():
        with certify_command._written_at_once(path) as new:
            new.write_text("4")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "3"
    assert [*path.parent.iterdir()] == [path]


def test_pythons_documentation(monkeypatch):
    """It is longer than the longest context that is measured if none is named."""
    assert len(certify_command.own_text()) > 20 * certify_command.LONGEST
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="name a --text"):
        certify_command.own_text()


def test_help_names_the_gates(capsys):
    parser = argparse.ArgumentParser()
    certify_command.add_certify(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["certify", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "0.5 %" in said
    assert "0.01 nats" in said
