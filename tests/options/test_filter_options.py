"""The options of layers that share a selection."""

from types import SimpleNamespace

import pytest

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.filters import shipped
from vllm_kvretrieval.retrieval.roles import roles_of


def config(method="freekv", **options):
    return RetrievalConfig.from_options(method, options)


def served_model(**shape):
    """vLLM's description of a model."""
    (file,) = (file for file in shipped() if file.model == "SmolLM2-135M-Instruct")
    text = SimpleNamespace(**{**file.shape, **shape})
    return SimpleNamespace(model=f"/models/{file.model}", hf_text_config=text), file


def test_roles_by_list_file_and_model(tmp_path):
    model, file = served_model()
    layers = range(30)
    assert config("freekv").roles(model, layers) == {}
    assert config("omnikv").roles(model, layers) == roles_of(file.filters, layers)
    assert config("omnikv", filters=[2, 8]).roles(model, layers) == roles_of([2, 8], layers)
    by_file = config("omnikv", filters=str(file.path))
    assert by_file.roles(model, layers) == roles_of(file.filters, layers)
    other, _ = served_model(vocab_size=7)
    with pytest.raises(RetrievalConfigError, match=r"filter layers of .* are not known"):
        config("omnikv").roles(other, layers)
    with pytest.raises(RetrievalConfigError, match=r"which is another model than .*vocab_size"):
        by_file.roles(other, layers)
    assert config("omnikv", filters=[2, 8]).roles(other, layers)
    with pytest.raises(RetrievalConfigError, match=r"filters=\[28\]: no layer would follow"):
        config("omnikv", filters=[28]).roles(model, layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observation": "first"}, "observation='first' is unknown; use one of last, un"),
        ({"observation": 16}, "observation=16 is unknown"),
        ({"filters": 2}, "filters=2 must be a list of layers"),
        ({"filters": [2, "8"]}, "must be a list of layers"),
        ({"filters": [True]}, "must be a list of layers"),
        ({"filters": "/nowhere.json"}, "filters='/nowhere.json' cannot be read"),
        ({"filters": __file__}, "is not valid JSON"),
        ({"memory_fraction": 0}, "memory_fraction=0 must be more than 0"),
        ({"memory_fraction": 30}, "memory_fraction=30 must be a number between"),
        ({"memory_fraction": "30 %"}, "memory_fraction='30 %' must be a number"),
        ({"also": {"mine": {}}}, "also: mine: its layers would select as omnikv does"),
    ],
    ids=str,
)
def test_impossible_filters(options, message):
    with pytest.raises(RetrievalConfigError, match=message):
        config("omnikv", **options)
