"""The table of needs: each need is some method's, and settings refuse what they lack, no more."""

from typing import Any

import pytest

from vllm_kvretrieval.attention.cuda.refusals import check_method
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval import needs
from vllm_kvretrieval.retrieval.needs import SETTINGS, Need, Setting
from vllm_kvretrieval.retrieval.presets import OWN

HEADS = [[1, 0]] * 2
EXAMPLES: dict[Need, tuple[str, dict[str, Any]]] = {
    Need.TOKENS: ("fier", {}),
    Need.TOKEN_MASS: ("fier", {"mass": 0.9}),
    Need.STALE_TOKENS: ("fier", {"schedule": "speculative"}),
    Need.LATEST_QUERIES: ("omnikv", {"filters": [2], "observation": "uniform"}),
    Need.KEYS: ("oracle", {}),
    Need.READS: ("kvretrieval", {"rerank": 2, "index": "mean"}),
    Need.EVERYTHING: ("full", {}),
    Need.HEADS: ("razor", {"heads": HEADS}),
    Need.LAYERS_SHARE: ("omnikv", {"filters": [2]}),
    Need.DROPS: ("snapkv", {}),
    Need.DROPS_ALWAYS: ("h2o", {"schedule": "running"}),
    Need.PROMPTS: ("snapkv", {}),
    Need.UNEVEN_SHARES: ("freekv", {"budget_shares": "pyramid"}),
    Need.UNEVEN_PAGES: ("quest", {"budget_shares": "pyramid"}),
    Need.UNEVEN_TOKENS: ("fier", {"budget_shares": "pyramid"}),
    Need.MASS: ("twilight", {}),
    Need.REMAINDER: ("kvretrieval", {"remainder": 0.01}),
    Need.RERANK: ("freekv", {"rerank": 4}),
    Need.LONG_ENTRIES: ("kvretrieval", {"page_size": 16, "summary_size": 32}),
    Need.LAYER_NUMBERS: ("freekv", {"budget_shares": [1, 2]}),
}
TOLD: dict[str, dict[str, Any]] = {"razor": {"heads": HEADS}, "omnikv": {"filters": [2]}}
"""What a method has to be told of a model that is not known."""
ASKED: dict[str, tuple[Setting, dict[str, Any]]] = {
    "slow home": (needs.SLOW_HOME, {"home": "disk"}),
    "codec": (needs.CODEC, {"home": "disk", "codec": "k8v4"}),
    "streaming": (needs.STREAMING, {"home": "disk", "streaming_attention": True}),
    "fraction": (needs.MEMORY_FRACTION, {"memory_fraction": 0.3}),
}
"""Settings that options of an engine make, with these options."""


def test_every_need_is_some_methods():
    assert EXAMPLES.keys() == {*Need}
    for need, (method, options) in EXAMPLES.items():
        assert need in RetrievalConfig.from_options(method, options).own.needs
    assert {need for setting in SETTINGS for need in setting.lacks} == {*Need}


@pytest.mark.parametrize("need", Need)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_refuses_what_it_lacks(setting, need):
    method, options = EXAMPLES[need]
    own = RetrievalConfig.from_options(method, options).own
    if setting.serves(own):
        assert need not in setting.lacks
        return setting.check([own])
    lacking = [lack for lack in setting.lacks if lack in own.needs]
    why, remedy = setting.lacks[lacking[0]]
    with pytest.raises(RetrievalConfigError) as refused:
        setting.check([own], "this")
    assert str(refused.value) == f"this {why}, and {method} {lacking[0].value}; {remedy}."


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("asked", ASKED)
def test_options_ask_the_table(name, asked):
    """An engine of a preset is refused by a setting if, and only if, the table says so."""
    setting, given = ASKED[asked]
    options = TOLD.get(name, {})
    own = RetrievalConfig.from_options(name, options).own
    said = ""
    try:
        RetrievalConfig.from_options(name, {**options, **given})
    except RetrievalConfigError as error:
        said = str(error)
    lacking = [need for need in setting.lacks if need in own.needs]
    if own.whole and OWN[name].codec != "raw":
        lacking = []  # what lies in fewer bits is worth reading whole
    assert said or not lacking
    assert lacking or not any(lack.why in said for lack in setting.lacks.values())


@pytest.mark.parametrize("name", OWN)
def test_a_gpu_asks_the_table(name):
    options = TOLD.get(name, {})
    own = RetrievalConfig.from_options(name, options).own
    if needs.GPU.serves(own):
        check_method(own)
    else:
        with pytest.raises(RetrievalConfigError, match=f"a GPU does not .* and {name} "):
            check_method(own)
