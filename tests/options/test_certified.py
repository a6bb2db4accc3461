"""The backend ``certified``: retrieval by a certificate, or full attention, and the log says why.

Engines are configured as ``vllm serve`` does it; none is started.
"""

import json
import logging
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.support.model_configs import LLAMA
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.source import options_of, selected_method
from vllm_kvretrieval.platforms import certified
from vllm_kvretrieval.platforms.measured import facts_of, weights_of
from vllm_kvretrieval.retrieval import certificates
from vllm_kvretrieval.retrieval.certificates import Quality, Steps, path_for, read_certificate
from vllm_kvretrieval.retrieval.model_files import name_of, shape_of

OPTIONS = {"budget": 512, "dense_layers": 1}
QUALITY = Quality(2048, 8, 8, 0, 5.0, 5.0 * certificates.PERPLEXITY, certificates.DIVERGENCE)
STEPS = Steps(2048, 10.0, 10.3, certificates.STEP)


@pytest.fixture
def model(tmp_path):
    """A directory with a config.json, and a file in place of weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    return folder


@pytest.fixture
def configure(model):
    def configure(backend="certified", **options):
        return EngineArgs(
            model=str(model), attention_backend=backend, skip_tokenizer_init=True, **options
        ).create_engine_config()

    return configure


@pytest.fixture
def write(configure, model, tmp_path, monkeypatch):
    """Writes a certificate as ``certify`` does, with other fields where they are given."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    vllm_config = configure("kvretrieval", additional_config={"kv_retrieval": OPTIONS})
    config = RetrievalConfig.from_vllm(vllm_config)
    assert config is not None
    fields = {
        "format": certificates.FORMAT,
        "model": name_of(str(model)),
        "shape": shape_of(vllm_config.model_config.hf_text_config),
        "method": "kvretrieval",
        "options": dict(options_of(vllm_config)),
        "longest": 2048,
        "facts": facts_of(vllm_config, config),
        "quality": [vars(QUALITY)],
        "steps": [vars(STEPS)],
        "date": "2026-11-29",
    }
    path = path_for(tmp_path / "cache", str(model))
    path.parent.mkdir(parents=True)

    def write(**others):
        path.write_text(json.dumps(fields | others))
        return path

    return write


@pytest.fixture
def said(caplog, monkeypatch):
    """What the log says of the backend."""
    monkeypatch.setattr(certified.logger, "propagate", False)  # wherever vLLM hands it on
    certified.logger.addHandler(caplog.handler)
    yield lambda: [record for record in caplog.records if record.name == certified.logger.name]
    certified.logger.removeHandler(caplog.handler)


def test_a_certificate_decides(configure, write, said):
    path = write()
    vllm_config = configure(additional_config={"kv_retrieval": {"sources": True}})
    config = RetrievalConfig.from_vllm(vllm_config)
    assert config is not None
    assert (config.method, config.budget, config.sources) == ("kvretrieval", 512, True)
    ((record),) = said()
    assert record.levelno == logging.INFO
    assert str(path) in record.getMessage()
    assert "8 of 8 pass keys, perplexity +0.50 %, KL 0.0100, steps 1.03" in record.getMessage()


def test_without_one(configure, said, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    assert selected_method(configure()) == "full"
    ((record),) = said()
    assert record.levelno == logging.WARNING
    assert "there is no certificate of" in record.getMessage()
    assert "`vllm-kvretrieval certify MODEL`" in record.getMessage()


FACTS = {
    "dtype": ({"dtype": "float32"}, "dtype bfloat16, not float32"),
    "quantization": ({"quantization": "kvr_int8"}, "quantization None, not kvr_int8"),
    "rotations": (
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        "rotations {.*}, not {.*500000",
    ),
    "overrides": (
        {"hf_overrides": {"rms_norm_eps": 0.5}},
        'overrides None, not {"rms_norm_eps": 0.5}',
    ),
}


@pytest.mark.parametrize(("options", "message"), FACTS.values(), ids=FACTS.keys())
def test_another_engine(configure, write, said, options, message):
    write()
    assert selected_method(configure(**options)) == "full"
    assert_says(said, rf"was measured otherwise \(.*{message}.*measure anew by")


def assert_says(said, message):
    """One warning, which says so."""
    ((record),) = said()
    assert record.levelno == logging.WARNING
    assert re.search(message, record.getMessage()), record.getMessage()
    assert "is served with full attention" in record.getMessage()


@pytest.mark.parametrize("name", ["vllm", "vllm-kvretrieval", "kernels", "pages", "ranks"])
def test_a_stale_one(configure, write, said, name):
    """Of other versions, or another machine."""
    facts = json.loads(write().read_text())["facts"]
    write(facts=facts | {name: "another"})
    assert selected_method(configure()) == "full"
    assert_says(said, rf"was measured otherwise \({name} another, not ")


def test_a_foreign_one(configure, write, said, model):
    """Of a model of the same name, by its weights, or by its shape."""
    write()
    changed = bytearray((model / "model.safetensors").read_bytes())
    changed[len(changed) // 2] ^= 1
    (model / "model.safetensors").write_bytes(changed)
    assert selected_method(configure()) == "full"
    assert_says(said, r"was measured otherwise \(weights \w+, not \w+\)")


def test_one_of_another_shape(configure, write, said):
    shape = json.loads(write().read_text())["shape"]
    write(shape=shape | {"hidden_size": 256})
    assert selected_method(configure()) == "full"
    assert_says(said, r"was made for model, which is another model .*\(hidden_size 256, not 128\)")


def test_longer_contexts(configure, write, said):
    write(longest=1024)
    assert selected_method(configure()) == "full"
    assert_says(said, r"up to 1024 tokens, and --max-model-len is 2048; set it to 1024, or")


def test_a_model_that_does_not_pass(configure, write, said):
    write(quality=[vars(replace(QUALITY, missed=1))])
    assert selected_method(configure()) == "full"
    assert_says(said, "retrieval does not pass: 1 of 8 pass keys are missed at 2,048 tokens")


@pytest.mark.parametrize("text", ["no JSON", "{}", '{"format": "another"}'])
def test_a_damaged_one(configure, write, said, text):
    write().write_text(text)
    assert selected_method(configure()) == "full"
    assert_says(said, "certificate=.*write it anew by vllm-kvretrieval certify MODEL")


def with_figures(**others):
    """Fields of a certificate, of whose figures some are others."""
    return {
        "quality": [vars(QUALITY) | {k: v for k, v in others.items() if k in vars(QUALITY)}],
        "steps": [vars(STEPS) | {k: v for k, v in others.items() if k in vars(STEPS)}],
    }


PARTS = {
    "a figure missing": ({"quality": [{"tokens": 2048}]}, "is not whole"),
    "text for a number": (with_figures(perplexity="5.0"), "is not whole"),
    "null for a number": (with_figures(missed=None), "is not whole"),
    "null for a time": (with_figures(ratio=None), "is not whole"),
    "switch for a number": (with_figures(keys=True), "is not whole"),
    "no length": ({"longest": math.inf}, "is not whole"),
    "no perplexity": (with_figures(whole=0, perplexity=0), "perplexity 0.000 is more than"),
    "shorter figures": (with_figures(tokens=1024), "were not measured at 2,048 tokens"),
    "no method": ({"method": "gone"}, "is of gone, which is no method; measure anew by"),
    "vLLM's method": ({"method": "flash_attn"}, "is of flash_attn, which is no method"),
    "itself": ({"method": "certified"}, "is of certified, which is no method"),
}


@pytest.mark.parametrize(("fields", "message"), PARTS.values(), ids=PARTS.keys())
def test_one_that_is_not_whole(configure, write, said, fields, message):
    write(**fields)
    assert selected_method(configure()) == "full"
    assert_says(said, message)


def test_a_name_that_is_too_long_for_a_file(configure, model, tmp_path, said, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    path_for(tmp_path / "cache", "model").parent.mkdir(parents=True)
    long = model.rename(tmp_path / ("m" * 252))
    config = EngineArgs(str(long), attention_backend="certified", skip_tokenizer_init=True)
    assert selected_method(config.create_engine_config()) == "full"
    assert_says(said, "File name too long")


DRAFTING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
UNCOVERED = {
    "adapters": ({"enable_lora": True}, "no certificate covers LoRA adapters"),
    "drafts": ({"speculative_config": DRAFTING}, "no certificate covers drafts"),
}


@pytest.mark.parametrize(("options", "message"), UNCOVERED.values(), ids=UNCOVERED.keys())
def test_what_no_certificate_covers(configure, write, said, options, message):
    write()
    assert selected_method(configure(**options)) == "full"
    assert_says(said, message)


def test_weights_of_which_there_are_no_files(configure, write, model, said):
    """A certificate of the user is of weights that have been seen."""
    (model / "model.safetensors").rename(model / "model.other")
    facts = json.loads(write().read_text())["facts"]
    write(facts=facts | {"weights": None})
    assert selected_method(configure()) == "full"
    assert_says(said, "no files with the weights of this model are found")


def test_one_of_options_that_there_are_no_more(configure, write, said):
    write(options={"budget": 512, "no_such_option": 1})
    assert selected_method(configure()) == "full"
    assert options_of(configure()) == {}
    assert "no_such_option" in said()[0].getMessage()


def test_options_of_the_certificate_are_not_the_users(configure, write):
    write()
    with pytest.raises(
        ValueError, match=r"kv_retrieval\.budget cannot be set with --attention-backend certified"
    ):
        configure(additional_config={"kv_retrieval": {"budget": 1024}})


def test_open_options_are_the_users(configure, write):
    """Whatever the engine had that was measured."""
    write(options=OPTIONS | {"client_options": ["budget", "exact"], "reuse": "all"})
    own = {"client_options": ["exact"], "reuse": "exact"}
    assert options_of(configure(additional_config={"kv_retrieval": own})) == OPTIONS | own


@pytest.mark.parametrize("name", ["drafts", "lossless"])
def test_drafts_are_not_for_certify(configure, write, name):
    write()
    with pytest.raises(ValueError, match=f"{name} cannot be .* a method; no certificate covers"):
        configure(additional_config={"kv_retrieval": {name: 1}})


def test_options_that_are_no_mapping(configure, write):
    write()
    with pytest.raises(ValueError, match=r"kv_retrieval must be a mapping of options, got \[1\]"):
        configure(additional_config={"kv_retrieval": [1]})


@pytest.mark.parametrize("options", [{"allow_exact": True}, {"reuse": "all"}, {"sources": True}])
def test_open_options_go_with_full_attention(configure, options, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    config = configure(additional_config={"kv_retrieval": options})
    assert selected_method(config) == "full"


GATES = {
    "as measured": ({}, {}, ""),
    "keys": ({"missed": 1}, {}, "1 of 8 pass keys are missed"),
    "no keys": ({"found": 3}, {}, "finds 3 of 8 pass keys"),
    "none asked": ({"keys": 0, "found": 0}, {}, "finds 0 of 0"),
    "perplexity": ({"perplexity": 5.03}, {}, "perplexity 5.030"),
    "no perplexity": ({"perplexity": math.nan}, {}, "perplexity nan"),
    "divergence": ({"divergence": 0.0101}, {}, "KL 0.0101"),
    "steps": ({}, {"ratio": 1.04}, "1.04 of full"),
    "no steps": ({}, {"ratio": math.nan}, "nan of full"),
}


@pytest.mark.parametrize(("quality", "steps", "why"), GATES.values(), ids=GATES.keys())
def test_gates(write, quality, steps, why):
    read = read_certificate(write())
    answers, times = replace(QUALITY, **quality), replace(STEPS, **steps)
    failed = replace(read, quality=(answers,), steps=(times,)).failures()
    assert bool(failed) == bool(why)
    assert all(why in each for each in failed)


def test_figures_that_are_missing(write):
    assert replace(read_certificate(write()), steps=()).failures()
    assert replace(read_certificate(write()), quality=()).failures()


def test_certificates_of_this_package(write, monkeypatch, tmp_path):
    """They are for a name and a shape, whatever the weights; all that there are can be read."""
    assert all(each.failures() is not None for each in certificates.shipped())
    path = write()
    own = replace(read_certificate(path), path=certificates.SHIPPED / path.name)
    facts = dict(own.facts) | {certificates.WEIGHTS: "others"}
    assert not own.differences(facts)
    assert replace(own, path=path).differences(facts)
    monkeypatch.setattr(certificates, "shipped", lambda: (own,))
    config = SimpleNamespace(**own.shape)
    assert certificates.shipped_for("some/Model", config) is own
    assert certificates.shipped_for("some/other", config) is None
    config.hidden_size += 1
    assert certificates.shipped_for("some/Model", config) is None


def test_a_name_of_a_hub_without_files():
    assert weights_of("owner/no-such-model-anywhere") is None


def test_the_name_is_taken(monkeypatch):
    from vllm_kvretrieval.retrieval import presets

    monkeypatch.setattr(presets, "entry_points", lambda _: {"certified": presets.OWN["quest"]})
    with pytest.raises(RetrievalConfigError, match="entry point certified"):
        presets.presets.__wrapped__()
