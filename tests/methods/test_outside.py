"""Indexes and presets of other packages: found, or refused with the reason. No engine runs."""

import re
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from benchmarks.common import ROOT
from tests.support.engine import checkpoint
from tests.support.outside import MEDIAN, POINTS, install, installed
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.extend import Field, Index, Rule
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.families.dropping import DroppingMethod
from vllm_kvretrieval.retrieval.families.scored import MASS
from vllm_kvretrieval.retrieval.index import OWN, IndexKind
from vllm_kvretrieval.retrieval.index.check import check_index, check_outside
from vllm_kvretrieval.retrieval.presets import preset_names

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def test_found(tmp_path):
    with installed(install(tmp_path, MEDIAN, POINTS)):
        assert preset_names()[-2:] == ("ruled", "toy")
        toy = RetrievalConfig.from_options("toy", {})
        index = toy.own.index
        assert index is not None
        assert (index.name, toy.own.name) == ("median", "toy")
        check_outside(toy.index_kinds, 64, torch.float32)
        options = {"also": {"slow": {"index": {"median": {"factor": 2}}}, "toy": {}}}
        slow = RetrievalConfig.from_options("freekv", options).methods["slow"].index
        assert slow != index, "equal ones alone share their records"
        assert len(RetrievalConfig.from_options("freekv", options).index_kinds) == 3
    assert "toy" not in preset_names()
    with pytest.raises(RetrievalConfigError, match="index='median' is unknown"):
        RetrievalConfig.from_options("freekv", {"index": "median"})


def test_the_package_of_the_documentation(tmp_path):
    """Its files, as the page has them: pip installs them, and all names are found."""
    page, package, site = (ROOT / "docs/extending.md").read_text(), tmp_path / "package", "site"
    package.mkdir()
    files = re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in files] == ["my_index.py", "pyproject.toml", "my_rule.py"]
    for name, text in files:
        (package / name).write_text(text)
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", site, package]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with installed(str(tmp_path / site)):
        mine = RetrievalConfig.from_options("mymedian", {})
        check_outside(mine.index_kinds, 64, torch.bfloat16)
        other = RetrievalConfig.from_options("kvretrieval", {"index": "median"})
        assert mine.own.index == other.own.index
        nearest = RetrievalConfig.from_options("mynearest", {})
        check_outside(nearest.index_kinds, 64, torch.bfloat16)
        pyramid = RetrievalConfig.from_options("pyramid", {}).own
        assert isinstance(pyramid, DroppingMethod)
        assert pyramid.keeping.observation == 8


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            {"indexes": {"median": "toy_index:Missing"}},
            r"entry point median = toy_index:Missing of vllm_kvretrieval\.indexes cannot be loaded"
            r".*no attribute 'Missing'.*Mend or uninstall",
        ),
        ({"presets": {"toy": "missing_module:TOY"}}, "toy = missing_module:TOY .*cannot be loaded"),
        ({"presets": {"toy": "toy_index:Median"}}, "entry point toy of .* must name a Preset"),
        ({"presets": {"Toy": "toy_index:TOY"}}, "entry point Toy .* in lower case"),
        ({"presets": {"freekv": "toy_index:TOY"}}, "entry point freekv .* unlike kvretrieval,"),
        ({"indexes": {"mean": "toy_index:Taken"}}, "entry point mean .* an index of this name; re"),
        ({"indexes": {"other": "toy_index:Median"}}, "other of .* name, a .*got <class 'toy_"),
        ({"indexes": {"median": "toy_index:TOY"}}, "median of .* must be a frozen dataclass"),
        ({"indexes": {"open": "toy_index:Open"}}, "open of .* must be a frozen dataclass"),
        ({"indexes": {"half": "toy_index:Half"}}, "half of .* that has all its methods"),
    ],
    ids=str,
)
def test_refused(tmp_path, points, message):
    code = MEDIAN + (
        "\n\nclass Taken(Median):\n    name = 'mean'\n"
        "\n\nclass Open(Index):\n    name = 'open'\n"
        "    fields = build = score = lambda self: None\n"
        "\n\n@dataclass(frozen=True)\nclass Half(Index):\n    name: ClassVar[str] = 'half'\n"
    )
    with (
        installed(install(tmp_path, code, points)),
        pytest.raises(RetrievalConfigError, match=message),
    ):
        RetrievalConfig.from_options("freekv", {})


def test_two_packages_of_one_name(tmp_path):
    paths = [
        install(tmp_path / name, MEDIAN, {"indexes": {"median": f"{name}_index:Median"}}, name)
        for name in ("toy", "other")
    ]
    message = "two packages bring an entry point median of vllm_kvretrieval.indexes. Uninstall one"
    with installed(*paths), pytest.raises(RetrievalConfigError, match=message):
        RetrievalConfig.from_options("freekv", {})


def test_refused_before_an_engine_starts(tmp_path):
    code = MEDIAN.replace("keys.median(1).values", "keys.median(2).values")
    engine = EngineArgs(
        model=checkpoint("SmolLM2-135M-Instruct"), dtype="float32", attention_backend="toy"
    )
    reason = (
        r"index median \(toy_index\.Median\) cannot serve entries of 32 tokens of head size 64 in "
        r"torch\.float32: build's median has the shape \[5, 32\], wanted is \[5, 64\]\. Mend"
    )
    with installed(install(tmp_path, code, POINTS)):
        with pytest.raises(ValueError, match=reason):
            engine.create_engine_config()
        engine.attention_backend = "freekv"
        engine.create_engine_config()


# ---------------------------------------------------------------- what an index gives, tried out


@dataclass(frozen=True)
class Good(Index):
    """An index that tests spoil: the mean, and a byte that is never read."""

    name: ClassVar[str] = "good"

    def fields(self, head_size, entry_tokens):
        return Field("mean", None, (head_size,)), Field("count", torch.int8, (1,))

    def build(self, keys):
        return {"mean": keys.mean(1), "count": torch.full((len(keys), 1), keys.shape[1])}

    def score(self, query, record, scale):
        return query @ record["mean"].float().T * scale


def spoilt(reads_keys=False, **methods):
    """The index with other methods."""
    named = {"__module__": __name__, "__qualname__": "Spoilt"}
    return type("Spoilt", (Good,), methods | named | {"reads_keys": reads_keys})()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [*(index() for index in OWN), Good()], ids=lambda i: i.name)
def test_good_ones_pass(index, dtype):
    check_index(index, 32, 64, dtype)


def raising(self, keys):
    raise KeyError("radius")


SPOILT = {
    "build without a field": (
        {"build": lambda self, keys: {"mean": keys.mean(1)}},
        r"build's count is None, where \[5, 1\] numbers are wanted",
    ),
    "build of another shape": (
        {"build": lambda self, keys: Good.build(self, keys) | {"mean": keys.mean(2)}},
        r"build's mean has the shape \[5, 32\], wanted is \[5, 64\]",
    ),
    "build not finite": (
        {"build": lambda self, keys: Good.build(self, keys) | {"mean": keys.mean(1) / 0}},
        "build's mean is not finite in torch.float16",
    ),
    "build that overflows": (
        {"build": lambda self, keys: Good.build(self, keys) | {"mean": keys.mean(1) * 1e6}},
        "build's mean is not finite in torch.float16",
    ),
    "build that does not fit": (
        {
            "build": lambda self, keys: (
                Good.build(self, keys) | {"count": torch.full((len(keys), 1), 200)}
            )
        },
        "build's count does not fit in torch.int8",
    ),
    "build that raises": ({"build": raising}, r"it raises KeyError \('radius'\)"),
    "build that looks at its company": (
        {"build": lambda self, keys: Good.build(self, keys - keys.mean(0))},
        "depends on what else is built or scored with it",
    ),
    "score that looks at its company": (
        {"score": lambda self, *given: Good.score(self, *given).softmax(-1)},
        "depends on what else is built or scored with it",
    ),
    "score of another shape": (
        {"score": lambda self, *given: Good.score(self, *given).T},
        r"score has the shape \[5, 3\], wanted is \[3, 5\]",
    ),
    "score of whole numbers": (
        {"score": lambda self, *given: Good.score(self, *given).long()},
        "score gives torch.int64 that are not all finite numbers",
    ),
    "score not finite": (
        {"score": lambda self, *given: Good.score(self, *given).log()},
        "score gives torch.float32 that are not all finite numbers",
    ),
    "no score of tokens": ({"per_token": True}, "it raises NotImplementedError"),
    "score of tokens of another shape": (
        {"per_token": True, "score_tokens": lambda self, *given: Good.score(self, *given)},
        r"score_tokens has the shape \[3, 5\], wanted is \[3, 5, 32\]",
    ),
    "records that grow": ({"grows": True}, "grows is True, and only records of min_max can grow"),
    "entries of several pages": (
        {"spans": True},
        "spans is True, and only indexes of this package",
    ),
    "fields of something else": (
        {"fields": lambda self, *sizes: [("mean", None, (64,))]},
        r"fields has \('mean', None, \(64,\)\), which is no Field",
    ),
    "fields without a shape": (
        {"fields": lambda self, *sizes: (Field("mean", None, (0,)),)},
        "fields has .* which has no shape",
    ),
    "fields of one name": (
        {"fields": lambda self, *sizes: 2 * Good.fields(self, *sizes)},
        "fields has names that are not its own: mean, count, mean, count",
    ),
    "a field of keys beside the keys": (
        {"reads_keys": True, "fields": lambda self, *sizes: (Field("keys", None, (64,)),)},
        "fields has names that are not its own: keys, keys",
    ),
}


@pytest.mark.parametrize(("methods", "message"), SPOILT.values(), ids=SPOILT.keys())
def test_spoilt_ones_are_refused(methods, message):
    index = spoilt(**methods)
    prefix = (
        r"index good \(tests\.methods\.test_outside\.Spoilt\) cannot serve entries of 32 tokens of "
    )
    message = prefix + f"head size 64 in torch.float16: .*{message}"
    with pytest.raises(RetrievalConfigError, match=message):
        check_outside([IndexKind(Good(), 32), IndexKind(index, 32)], 64, torch.float16)


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, "pooling=max has no effect with index=highest, a rule, which chooses"),
        ({"rerank": 4}, "rerank=4 has no effect with index=highest, a rule"),
        ({"summary_size": 16}, "summary_size=16 has no effect with index=highest, a rule"),
        ({"unit": "token"}, "index=highest scores several at once"),
        ({"mass": 0.9}, "mass=0.9 cannot be reached with ruled"),
        ({"remainder": 0.1}, "remainder=0.1 cannot be added up with ruled"),
        ({"outliers": 0.1}, "outliers=0.1 cannot be told by index=highest"),
        ({"home": "disk"}, "keeps keys where they are slow to read, and ruled selects by the keys"),
    ],
    ids=str,
)
def test_options_without_effect_on_a_rule(tmp_path, options, message):
    with installed(install(tmp_path, MEDIAN, POINTS)):
        own = RetrievalConfig.from_options("ruled", {"summary_size": 32}).own
        assert (MASS.of(own), own.rerank, own.entry_tokens) == (1, 0, 32)
        with pytest.raises(RetrievalConfigError, match=message):
            RetrievalConfig.from_options("ruled", options)


@dataclass(frozen=True)
class First(Rule):
    """A rule that tests spoil: the first pages, by a record that it keeps."""

    name: ClassVar[str] = "first"
    reads_keys: ClassVar[bool] = False

    def fields(self, head_size, entry_tokens):
        return (Field("norm", torch.float32, (1,)),)

    def build(self, keys):
        return {"norm": keys.norm(dim=(1, 2))[:, None]}

    def select(self, query, record, state):
        assert record["norm"].shape == (5, 1)
        return torch.arange(state.first, state.first + state.count)


SPOILT_RULES = {
    "no tensor": ({"select": lambda *_: [1, 2]}, r"select gives \[1, 2\], where 2 different pages"),
    "floats": ({"select": lambda *_: torch.tensor([1.0, 2])}, r"select gives torch.float32 \[2\]"),
    "too few": ({"select": lambda *_: torch.tensor([1])}, r"select gives torch.int64 \[1\], where"),
    "one twice": ({"select": lambda *_: torch.tensor([2, 2])}, "select gives a page twice, where"),
    "of the sink": (
        {"select": lambda *_: torch.tensor([0, 2])},
        "gives page 0, where .* 1 to 3 ",
    ),
    "of the window": ({"select": lambda *_: torch.tensor([2, 4])}, "select gives page 4, where"),
    "an error": ({"select": lambda *given: given[9]}, "it raises IndexError"),
    "tokens": ({"per_token": True}, "per_token is True, and a rule chooses pages"),
}


@pytest.mark.parametrize(("methods", "message"), SPOILT_RULES.values(), ids=SPOILT_RULES.keys())
def test_spoilt_rules_are_refused(methods, message):
    check_outside([IndexKind(First(), 32)], 64, torch.bfloat16)
    rule = type("Spoilt", (First,), methods)()
    with pytest.raises(RetrievalConfigError, match=message):
        check_outside([IndexKind(rule, 32)], 64, torch.bfloat16)
