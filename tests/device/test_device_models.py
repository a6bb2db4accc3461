"""Kinds of models in a GPU's engine, emulated: state spaces, convolutions, sliding windows, caps of
scores, learned sinks, images.

Small ones with random weights; see ``support/device_engine.py`` and ``device_models.py``. vLLM's
runner describes the steps of the first two in another way. Graphs are of two and four rows, so
that steps of one and three are padded; those with prompts are eager. What transformers says of an
answer is the reference where whole contexts are attended to; every selection is held against the
specification.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.device.test_device_engine import CHUNK, EMULATED, GRAPHS, PAGE, Served, prompt
from tests.device.test_device_engine import RETRIEVAL as ENGINE
from tests.support import device_engine, device_models, device_specification
from tests.support.device_models import IMAGE, ROTATED_IN_TORCH
from tests.support.engine import Request, assert_same, by

pytestmark = pytest.mark.engine

RETRIEVING = {"vision": 1, "sinks": 1}
"""The number of the layer that retrieves, where it is not the third."""
STATES = {"states": "MambaHybridModelState", "convolutions": "MambaHybridModelState"}
COMPILATION = GRAPHS | {"cudagraph_capture_sizes": [2, 4]}
OPTIONS: dict[str, dict[str, Any]] = {
    # Whose kernels for the CPU do not keep states from within a chunk.
    "states": {"enable_prefix_caching": False},
    "windows": {"dtype": "bfloat16"},  # vLLM refuses float16 for Gemma
    "capped": {"dtype": "bfloat16"},
    "convolutions": {"compilation_config": COMPILATION | ROTATED_IN_TORCH},
    "vision": {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}},
}
RETRIEVAL = ENGINE | {
    "additional_config": {
        "kv_retrieval": ENGINE["additional_config"]["kv_retrieval"] | {"also": ["streamingllm"]}
    }
}
ROUNDING = {"float16": 0.2, "bfloat16": 0.3}
"""The tolerance of log-probs against float32, which states amplify. Retrieval changes more than
that."""
EVEN = ("capped",)
"""Models whose attention is so even that retrieval changes some log-probs by less than that."""
SPARSE = Request(prompt(150, 15), 10, {})
OTHER = Request(prompt(170, 23), 8, by("streamingllm"))
EXACT = Request(prompt(140, 15), 4, {"exact": True})
SHORT = Request(prompt(70, 17), 3, {})


class Kind(Served):
    """The engine with a kind of model, and that model in float32.

    Attributes:
        kind: The name of the function that makes it.
        rounding: Of the engine's log-probs.
    """

    def __init__(self, pool: ProcessPoolExecutor, kind: str, path: Path) -> None:
        super().__init__(pool)
        self.kind, self._path = kind, path
        self._model = device_models.make(getattr(device_models, kind), path)
        ours = {"compilation_config": COMPILATION, "num_gpu_blocks_override": 64}
        options: dict[str, Any] = EMULATED | RETRIEVAL | ours | OPTIONS.get(kind, {})
        self.rounding = ROUNDING[options["dtype"]]
        self.open_engine(str(path), options)

    def expected(self, request: Request, tokens: list[int]) -> list[float]:
        """See ``tests.support.device_models.logprobs``."""
        return device_models.logprobs(self._model, self._path, request, tokens)


@pytest.fixture(
    scope="module",
    params=[
        "states",
        pytest.param("windows", marks=pytest.mark.slow),
        pytest.param("capped", marks=pytest.mark.slow),
        pytest.param("sinks", marks=pytest.mark.slow),
        pytest.param("convolutions", marks=pytest.mark.slow),
        pytest.param("vision", marks=pytest.mark.slow),
    ],
)
def served(request, tmp_path_factory):
    with device_engine.start() as pool:
        pool.submit(device_specification.install).result()
        yield Kind(pool, request.param, tmp_path_factory.mktemp("model"))


def test_layers_with_full_attention_retrieve(served):
    """One layer retrieves: others are dense, or attend to a window."""
    described = served.describe()
    assert described["state"] == STATES.get(served.kind, "DefaultModelState")
    (name,) = described["retrieving"]
    assert f".layers.{RETRIEVING.get(served.kind, 2)}." in name
    assert set(described["blocks"]) == {PAGE}
    assert described["graphs"] == [2, 4]


def test_a_prompts_last_token_alone_is_prefill(served):
    """Which vLLM tells layers with states is none, and replays a graph of decode steps for."""
    asked = Request(prompt(CHUNK + 1, 6), 2, by("streamingllm"))
    before = served.replays()
    answer = served.drive([asked])[0]
    assert served.replays() - before == 2, "the tail, and the step that decodes; one row, padded"
    whole = served.expected(asked, answer.tokens)
    assert answer.logprobs[0] == pytest.approx(whole[0], abs=served.rounding)
    if served.kind not in EVEN:
        assert abs(answer.logprobs[1] - whole[1]) > served.rounding, "the next step decodes"


def test_in_company_and_alone(served):
    """Prompts beside decode steps, one to four rows: eager, replays, and padded replays."""
    asked = [SPARSE, OTHER, EXACT, SHORT]
    served.replay(False)
    alone = [served.drive([request])[0] for request in asked[:2]]
    served.replay(True)
    before, checked = served.replays_by_rows(), served.selections()
    together = served.drive([replace(request, arrives=i) for i, request in enumerate(asked)])
    for answer, expected in zip(together, alone, strict=False):
        assert_same(answer, expected, served.rounding)
    pairs = zip(asked, together, strict=True)
    whole = [served.expected(request, answer.tokens) for request, answer in pairs]
    for answer, expected in zip(together[2:], whole[2:], strict=True):
        assert answer.logprobs == pytest.approx(expected, abs=served.rounding)
    for answer, expected in zip(together, whole[:2], strict=False):
        assert answer.logprobs != pytest.approx(expected, abs=2 * served.rounding)
    after = served.replays_by_rows()
    assert all(after[rows] > before[rows] for rows in (2, 4))
    assert served.selections() - checked == SPARSE.tokens + OTHER.tokens - 2


def test_images(served):
    """Part of what is retrieved from, in one chunk and across two."""
    if served.kind != "vision":
        pytest.skip("the model sees none")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (56, 84, 3), dtype=np.uint8))
    text = [token if token < IMAGE else 7 for token in prompt(150, 31)]
    for place in (20, CHUNK - 2):
        ids = [*text[:place], 502, IMAGE, 503, *text[place:]]
        exact, sparse = (
            served.drive([Request(ids, 4, options, images=[image])])[0]
            for options in ({"exact": True}, {})
        )
        for answer in (exact, sparse):
            answer.expected = served.expected(Request(ids, 4, images=[image]), answer.tokens)
        assert exact.logprobs == pytest.approx(exact.expected, abs=served.rounding)
        assert sparse.logprobs[0] == exact.logprobs[0]
        assert sparse.logprobs != pytest.approx(sparse.expected, abs=2 * served.rounding)


def test_nothing_is_compiled_while_serving(served):
    """Warm-up has launched all kernels that earlier requests launched, in steps of any number of
    rows."""
    served.drive([replace(SPARSE, tokens=2), replace(SHORT, arrives=1)])
    late, early = served.launched_late()
    assert early > 8
    assert late == []
