"""Retrieval heads: their files, which are taken of scores, and what is refused."""

import json
from pathlib import Path

import pytest

from tests.options.test_refusals import configure  # noqa: F401  # a fixture
from tests.support.heads_recorder import scored
from tests.support.model_configs import LLAMA
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.heads import SHIPPED, choose_heads, read_heads, shipped

MODEL = "SmolLM2-135M-Instruct"
FILE = SHIPPED / f"{MODEL}.json"
LAYERS, KV_HEADS = 30, 3

# ------------------------------------------------------------------------------------ refusals


def config(method="razor", **options):
    return RetrievalConfig.from_options(method, options)


def test_the_budget_is_sink_and_window():
    made = config(budget=512)
    assert made.page_budget() == (1, 15, 0)
    assert made.most_selected == {"razor": 0, "streamingllm": 0}
    assert config(budget=512, sink=64).page_budget() == (2, 14, 0)
    assert [*config("freekv").methods] == ["freekv", "streamingllm"], "only where it is asked for"
    assert [*config("freekv", also=["razor"]).methods] == ["freekv", "razor", "streamingllm"]


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("razor", {"heads": "/nowhere.json"}, "heads='/nowhere.json' cannot be read .*heads MODEL"),
        ("razor", {"heads": __file__}, "is not valid JSON"),
        ("razor", {"heads": 3}, "heads=3 must be the path of a file that vllm-kvretrieval heads"),
        ("razor", {"heads": False}, "heads=False must be the path of a file"),
        ("razor", {"heads": {"top": 0.2}}, "heads={'top': 0.2} must be the path of a file"),
        ("razor", {"heads": {"file": 3}}, "heads={'file': 3} must be the path of a file"),
        ("razor", {"heads": {"share": 0}}, "share must be a number above 0 and up to 1"),
        ("razor", {"heads": {"share": 1.5}}, "share must be a number above 0 and up to 1"),
        ("razor", {"heads": {"share": True}}, "share must be a number above 0 and up to 1"),
        ("razor", {"heads": [1, 0]}, "must be a list per retrieval layer of 0 or 1 per KV head"),
        ("razor", {"heads": []}, "must be a list per retrieval layer of 0 or 1 per KV head"),
        ("razor", {"heads": [[2, 0]]}, "must hold 1 for a retrieval head, and 0 for any other"),
        ("razor", {"heads": [[0.5]]}, "must hold 1 for a retrieval head, and 0 for any other"),
        ("razor", {"top": 3}, "no option 'top'"),
        ("razor", {"home": "disk"}, "home='disk' is for methods that read little .* razor"),
        ("razor", {"home": "auto"}, "home='auto' is for methods that read little of"),
        ("freekv", {"home": "disk", "also": ["razor"]}, "home='disk' is for methods that read"),
        (
            "razor",
            {"memory_fraction": 0.3},
            "and razor lets some heads read everything",
        ),
        ("freekv", {"also": {"mine": {"preset": "razor", "heads": [2]}}}, "also: mine: heads="),
    ],
    ids=str,
)
def test_impossible_options(method, options, message):
    with pytest.raises(RetrievalConfigError, match=message):
        config(method, **options)


def test_models_that_are_refused(configure, tmp_path, monkeypatch):  # noqa: F811
    def razor(heads=None, **options):
        retrieval = {} if heads is None else {"heads": heads}
        retrieval |= {"dense_layers": options.pop("dense_layers", 0)}
        return configure(
            LLAMA,
            attention_backend="razor",
            additional_config={"kv_retrieval": retrieval},
            **options,
        )

    assert "Retrieval" in razor([[1], [0]]).parallel_config.worker_cls
    assert razor([[0]], dense_layers=1)
    for heads, options, message in (
        (None, {}, r"retrieval heads of .* are not known .*'vllm-kvretrieval heads MODEL', and na"),
        ([[1], [0], [1]], {}, r"heads=.*: 3 layers, but 2 retrieve"),
        ([[1], [0]], {"dense_layers": 1}, r"heads=.*: 2 layers, but 1 retrieve"),
        ([[1], [0, 1]], {}, r"heads=.*: 2 KV heads for layer 1, which has 1; give as many"),
        (str(FILE), {}, f"was made for {MODEL}, which is another model than .*hidden_size 576"),
        ([[1], [0]], {"pipeline_parallel_size": 2}, "razor lets some heads read everything"),
    ):
        with pytest.raises(ValueError, match=message):
            razor(heads, **options)
    with pytest.raises(ValueError, match=r"retrieval heads of .* are not known"):
        configure(LLAMA, additional_config={"kv_retrieval": {"also": ["razor"]}})
    scores = json.loads(FILE.read_text())
    shape = {key: LLAMA.get(key) for key in scores["shape"]}
    few = scores | {"shape": shape, "layers": [0], "induction": [[0.5]], "echo": [[0.5]]}
    monkeypatch.chdir(tmp_path)
    Path("few.json").write_text(json.dumps(few))
    with pytest.raises(ValueError, match=r"few.json' has no scores of layer 1, which retrieves"):
        razor("few.json")


# --------------------------------------------------------------------------------------- files


def test_files_that_are_none(tmp_path):
    good = json.loads(FILE.read_text())
    path = tmp_path / "broken.json"
    for broken, why in (
        ([], "is no file of heads"),
        (good | {"format": "vllm-kvretrieval filters 1"}, "is no file of heads"),
        (good | {"layers": "all"}, "has no list of layers"),
        (good | {"layers": good["layers"][1:]}, "has no scores of induction and echo"),
        (good | {"echo": good["echo"][1:]}, "has no scores of induction and echo"),
        (good | {"echo": [row[1:] for row in good["echo"]]}, "has no scores of induction and echo"),
        (good | {"induction": [["1"]] * LAYERS}, "has no scores of induction and echo"),
        (good | {"induction": [[1.5] * KV_HEADS] * LAYERS}, "has no scores of induction and echo"),
    ):
        path.write_text(json.dumps(broken))
        with pytest.raises(RetrievalConfigError, match=f"heads=.*broken.json' {why}"):
            read_heads(path)


def test_shipped_files():
    """Heads are those of layers with full attention. Their default share is as in the docs."""
    counts = {}
    for file in shipped():
        assert file.path.stem == file.model
        flags = choose_heads(file.induction, file.echo, 0.15)
        assert [list(row) for row in flags] == scored(file.path, 0.15)
        counts[file.model] = sum(map(sum, flags)), sum(map(len, flags))
    assert counts == {
        MODEL: (14, 90),
        f"{MODEL}-32K": (14, 90),
        "Qwen2.5-Coder-0.5B-Instruct": (7, 48),
        "gemma-3-270m": (1, 3),
    }


def test_choice():
    induction = [[0.9, 0.1], [0.8, 0.3], [0.2, 0.0], [0.0, 0.0]]
    echo = [[0.9, 0.0], [0.9, 0.1], [0.3, 0.4], [0.0, 0.0]]
    assert sum(map(sum, choose_heads(induction, echo, 0.01))) == 1
    half = choose_heads(induction, echo, 0.5)
    assert half == ((True, False), (True, True), (True, False), (False, False))
    assert all(map(all, choose_heads(induction, echo, 1)))
    # Of 30 heads 15: 14 by induction, and of the others one by echo.
    falling = [[(30 - head) / 100 for head in range(first, first + 15)] for first in (0, 15)]
    looking = [[1.0] * 14 + [0.5], [0.1] * 7 + [0.7] + [0.1] * 7]
    first, second = choose_heads(falling, looking, 0.5)
    assert first == (*[True] * 14, False)
    assert [head for head, flag in enumerate(second) if flag] == [7]
