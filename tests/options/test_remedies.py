"""Who follows the advice of refusals arrives: every preset, with every home, on CPUs and on GPUs.

The options of an engine are checked as its start checks them. A refusal is then followed by the
words of its own remedy, wherever it names several, until an engine is served.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.config import VllmConfig

from tests.options.test_refusals import configure  # noqa: F401
from tests.support.model_configs import LLAMA
from vllm_kvretrieval.attention.cpu import refusals as cpu_refusals
from vllm_kvretrieval.attention.cuda import refusals as cuda_refusals
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.choices import HOMES
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.source import add_options, options_of, selected_method
from vllm_kvretrieval.platforms.cpu import CpuRetrieval
from vllm_kvretrieval.platforms.cuda import CudaRetrieval
from vllm_kvretrieval.retrieval.presets import OWN

GIVEN = ((), *((("home", home),) for home in HOMES))
OPTIONS: dict[str, dict[str, Any]] = {
    "razor": {"heads": [[1, 0]] * 6},
    "omnikv": {"filters": [0, 3]},
}
"""What a method has to be told of a model that is not known."""
Engine = tuple[str, tuple[tuple[str, str], ...]]
"""A preset's name, and the options `home` and `codec` as far as they are given."""


def followed(message: str, engine: Engine) -> Iterator[Engine]:
    """The engines that a refusal advises, one for each of its remedies."""
    name, given = engine
    options = dict(given)
    for key, value in re.findall(r"(?:[Uu]se|or|, with) (home|codec)=(\w+)", message):
        yield name, tuple(sorted((options | {key: value}).items()))
    if re.search(r"leave (it|one) out", message):
        for subject in (key for key in options if f"{key}=" in message):
            yield name, tuple(item for item in given if item[0] != subject)
    for other, home in re.findall(r"on a GPU: --attention-backend (\w+)(.* home host)?", message):
        yield other, (("home", "host"),) if home else ()
    if listed := re.search(r"such as ([\w, ]+)\.$", message):
        for other in re.split(r", | or ", listed[1]):
            yield other, given


class Device:
    """Asks about engines what a platform asks at their start."""

    def __init__(self, device: str, base: VllmConfig) -> None:
        self.device, self.base = device, base
        self.support = {"cpu": cpu_refusals, "cuda": cuda_refusals}[device]

    def refusal(self, engine: Engine) -> str | None:
        """Why the engine is not served; None: it is."""
        name, given = engine
        config = copy.deepcopy(self.base)
        config.attention_config.backend = config.attention_config.backend.__class__[name.upper()]
        config.additional_config = {"kv_retrieval": OPTIONS.get(name, {}) | dict(given)}
        method = selected_method(config)
        assert method == name
        try:
            if self.device == "cuda":
                cuda_refusals.check_preset(method, options_of(config))
                add_options(config, CudaRetrieval.finer_options(config, method))
            own: Any = RetrievalConfig.from_vllm(config)
            self.support.check_engine(config, own)
        except RetrievalConfigError as error:
            return str(error)
        return None

    def follow(self, engine: Engine, path: tuple[Engine, ...] = ()) -> None:
        """Every remedy, to its end."""
        assert engine not in path, f"in a circle: {[*path, engine]}"
        message = self.refusal(engine)
        if message is None:
            return
        advised = {*followed(message, engine)}
        assert advised, f"{engine}: no remedy in {message!r}"
        for other in advised:
            self.follow(other, (*path, engine))


@pytest.fixture(params=["cpu", "cuda"])
def device(request, configure, monkeypatch):  # noqa: F811
    model = LLAMA | {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    base = configure(model)
    if request.param == "cuda":
        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    return Device(request.param, base)


@pytest.mark.parametrize("name", OWN)
def test_remedies_lead_to_an_engine(device, name):
    for given in GIVEN:
        device.follow((name, given))


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_every_method_is_served_on_gpus(device):
    """With one home or the other."""
    for name in OWN:
        assert any(device.refusal((name, given)) is None for given in GIVEN), name


def test_the_cuda_platform_asks_first():
    """Before the options are read, of which a home would be found to contradict the codec."""
    CpuRetrieval.check_preset("ttkv", {})
    with pytest.raises(
        RetrievalConfigError, match=r"which a GPU does in host memory; use home=host\.$"
    ):
        CudaRetrieval.check_preset("ttkv", {"home": "device"})
    CudaRetrieval.check_preset("ttkv", {})
    CudaRetrieval.check_preset("ttkv", {"codec": "raw"})


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("name", ["ttkv", "kivi", "kvquant"])
def test_what_lies_on_a_disk_of_a_cpu_lies_in_host_memory_of_a_gpu(device, name):
    assert device.refusal((name, ())) is None
    assert "home=host" in device.refusal((name, (("home", "disk"),)))
