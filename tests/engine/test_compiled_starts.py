"""What a saved model that torch has compiled depends on, beside vLLM's own key."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable
from torch._inductor import cpu_vec_isa
from vllm.config import VllmConfig

from vllm_kvretrieval.upstream import compiled


class Network(nn.Module):
    """A part that vLLM compiles, and a linear layer as vLLM leaves it on a CPU."""

    def __init__(self, product, inputs=4, images=False, eager=False):
        super().__init__()
        self.part, self.layer = nn.Module(), nn.Linear(inputs, 2)
        self.layer.cpu_linear = product
        self.part.do_not_compile = eager
        self.part.vllm_config = VllmConfig(additional_config={"other": 1})
        self.part.vllm_config.model_config = SimpleNamespace(
            supports_multimodal_inputs=images, compute_hash=lambda: "the same"
        )


def onednn(handler):
    return lambda x, weight, bias: handler(x, bias)


def packed(prepacked):
    return lambda x, weight, bias, _p=prepacked: (x, _p)


def fallback(x, weight, bias):
    return nn.functional.linear(x, weight, bias)


def found_by(product=fallback, **options):
    """The hash by which vLLM finds the saved model."""
    network = Network(product, **options)
    compiled.load_compiled(network)
    config = network.part.vllm_config
    assert config.additional_config["other"] == 1
    return config.compute_hash()


@pytest.fixture
def change(monkeypatch, tmp_path):
    other = tmp_path / "cpuinfo"
    other.write_text("processor : 0\nflags : fpu sse avx2\n")
    return {
        "version": lambda: monkeypatch.setattr(compiled, "__version__", "0.0.1"),
        "CPU": lambda: monkeypatch.setattr(compiled, "CPUINFO", other),
        "vectors": lambda: monkeypatch.setattr(compiled, "pick_vec_isa", lambda: "other"),
        "torch": lambda: monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default"),
        "oneDNN": lambda: monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41"),
        "code": lambda: monkeypatch.setattr(compiled, "CODE", compiled.CODE[1:]),
    }


@pytest.mark.parametrize("what", ["version", "CPU", "vectors", "torch", "oneDNN", "code"])
def test_another_machine_or_build_compiles(change, what):
    here = found_by()
    assert found_by() == here
    change[what]()
    assert found_by() != here


def test_other_products_and_inputs_compile():
    kinds = [found_by(product) for product in (fallback, onednn(0), packed(True), packed(False))]
    kinds += [found_by(inputs=8), found_by(images=True)]
    assert len({*kinds}) == len(kinds)
    assert found_by(onednn(1)) == kinds[1], "the handle of a product is another at each start"


def test_eager_models_need_no_compiler(monkeypatch):
    monkeypatch.delattr(compiled, "pick_vec_isa")
    network = Network(fallback, eager=True)
    compiled.load_compiled(network)
    assert network.part.vllm_config.additional_config == {"other": 1}


def test_a_model_without_retrieval_is_not_loaded():
    """Its key does not say what CPU it was compiled for. vLLM takes an error for: compile."""
    network = Network(fallback)
    config = network.part.vllm_config
    stock = VllmConfig(additional_config=config.additional_config)
    compiled.load_compiled(network)
    BundledAOTAutogradSerializableCallable.finalize_loading(None, config)
    with pytest.raises(ValueError, match="nothing says which CPU"):
        BundledAOTAutogradSerializableCallable.finalize_loading(None, stock)


def test_vectors_are_tried_once(monkeypatch, tmp_path):
    """What cannot be loaded is tried again."""
    started = []
    run = subprocess.run

    def noted(*args, **options):
        started.append(args)
        return run(*args, **options)

    monkeypatch.setattr(cpu_vec_isa.subprocess, "run", noted)
    compiled.load_compiled(Network(fallback))
    good, bad = tmp_path / "good.so", tmp_path / "bad.so"
    good.write_bytes((Path(torch.__file__).parent / "lib" / "libc10.so").read_bytes())
    bad.write_bytes(b"no library")
    isa = cpu_vec_isa.VecAVX2()
    assert [isa._probe_load(str(path)) for path in (good, good, bad, bad)] == [
        *(True, True),
        *(False, False),
    ]
    tried = [str(good) in call[0][2] for call in started]
    assert tried == [True, False, False]
