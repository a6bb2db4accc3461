"""What retrieval cannot serve on a GPU is refused at start-up, with what to do instead.

Engines are configured as ``vllm serve`` does it, and asked about by what the CUDA platform asks.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from tests.options.test_refusals import TRANSFER, configure, pattern  # noqa: F401
from tests.support.drafter import speculation
from tests.support.model_configs import LLAMA
from vllm_kvretrieval.attention.cpu import refusals as cpu_refusals
from vllm_kvretrieval.attention.cuda import refusals
from vllm_kvretrieval.engine.cuda.runner import MODEL_STATES, RetrievalModelRunner
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels.triton.resolve import MOST_SLOTS
from vllm_kvretrieval.kernels.triton.select import MOST_PAGES, TILE_PAGES
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.platforms.cpu import CpuRetrieval
from vllm_kvretrieval.platforms.cuda import CudaRetrieval
from vllm_kvretrieval.platforms.requests import RetrievalRequestError, check_request
from vllm_kvretrieval.retrieval import needs

HEADS = LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
LACKS = "a GPU does not serve every method yet, and"
INSTEAD = "use a method that selects pages by an index, such as freekv, quest or kvretrieval."


@pytest.fixture(autouse=True)
def runner(monkeypatch):
    """The platform checks as that of CUDA does; by default vLLM has its V2 model runner there."""
    runner = {"use_v2_model_runner": True}

    def check_engine(vllm_config, config):
        with monkeypatch.context() as ours:
            ours.setattr(VllmConfig, "use_v2_model_runner", runner["use_v2_model_runner"])
            refusals.check_engine(vllm_config, config)

    monkeypatch.setattr(cpu_refusals, "check_engine", check_engine)
    monkeypatch.delattr(CpuRetrieval, "finer_options")
    monkeypatch.setattr(CpuRetrieval, "add_drafter", CudaRetrieval.add_drafter)
    return runner


def retrieval(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"kv_retrieval": options}}


def bench(**extra: Any) -> dict[str, Any]:
    transfer = {"kv_connector_extra_config": extra, "kv_role": "kv_both"}
    return {"kv_transfer_config": KVTransferConfig(kv_connector="DecodeBenchConnector", **transfer)}


@pytest.mark.parametrize(
    "method",
    [
        *("freekv", "quest", "kvretrieval", "arkvale", "infllm", "twilight", "streamingllm"),
        *("oracle", "fier", "snapkv", "entropykv", "shadowkv", "h2o", "tova", "raas"),
    ],
)
def test_methods_that_are_served(configure, method):  # noqa: F811
    config = configure(LLAMA | {"num_hidden_layers": 3}, attention_backend=method)
    assert config.attention_config.backend.name == method.upper()


def test_drafts_that_are_served(configure):  # noqa: F811
    """As many as the kernel has rows for."""
    for method in ("ngram", "ngram_gpu"):
        configure(LLAMA, speculative_config={"method": method, "num_speculative_tokens": 7})


def test_other_methods_beside_them(configure):  # noqa: F811
    configure(LLAMA, **retrieval(also=["arkvale", "kvretrieval", "streamingllm"]))
    with pytest.raises(
        ValueError, match=pattern(f"{LACKS} reranked scores candidates * {INSTEAD}")
    ):
        configure(LLAMA, **retrieval(also={"reranked": {"rerank": 2}}))


METHODS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a need": (
        "freekv",
        {"rerank": 2},
        f"{LACKS} freekv scores candidates again by their keys (rerank); set rerank=0, or "
        f"{INSTEAD}",
    ),
    "drafts that would be dropped": (
        "h2o",
        {"drafts": 2},
        "kv_retrieval.drafts=2 verifies drafts, of which some are taken back, and h2o drops a "
        "token at each step (schedule running or sliding); set schedule=once, or leave it out",
    ),
    "dropped tokens and whole contexts": (
        "h2o",
        {"exact_below": 999},
        "kv_retrieval.exact_below=999 has no effect with h2o, which keeps tokens by the attention",
    ),
    "uneven pages in host memory": (
        "freekv",
        {"home": "host", "budget_shares": "pyramid"},
        "kv_retrieval.home=host gives all KV heads as many slots, and freekv divides pages "
        "unevenly (budget_shares); set budget_shares=uniform, or home=device",
    ),
    "everything from host memory": (
        "razor",
        {"home": "host", "heads": [[1] * 4] * 2},
        "home='host' is for methods that read little of a context at a step, and razor lets some "
        "heads read everything; use another method, or home=device",
    ),
    "more tokens than slots": (
        "fier",
        {"home": "host", "budget": 8192},
        f"kv_retrieval.home=host serves budgets of up to {MOST_SLOTS} tokens, {MOST_SLOTS} slots "
        "of 1, and a step may have 8192; lower budget (or max_budget).",
    ),
    "kept tokens beside pages": (
        "snapkv",
        {"also": ["freekv"]},
        "a GPU does not serve snapkv and freekv together yet: pages, single tokens, tokens that "
        "filters select, and tokens that are kept of prompts go apart. Leave one out",
    ),
    "kept tokens beside tokens": ("fier", {"also": ["entropykv"]}, "fier and entropykv together"),
    "kept tokens and whole contexts": (
        "streamingllm",
        {"exact_below": 999, "also": ["snapkv"]},
        "kv_retrieval.exact_below=999 cannot be used with snapkv on a GPU, whose steps attend to "
        "kept tokens whatever the length; leave one out.",
    ),
    "an index": ("freekv", {"index": "one_bit"}, "freekv is not served on a GPU yet, where index"),
}


@pytest.mark.parametrize(("method", "options", "what"), METHODS.values(), ids=METHODS.keys())
def test_methods(configure, method, options, what):  # noqa: F811
    model = HEADS | {"num_hidden_layers": 3}
    with pytest.raises(ValueError, match=pattern(what)):
        configure(model, attention_backend=method, **retrieval(**options))


ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dtype": (
        LLAMA,
        {"dtype": "float32"},
        "freekv does not support dtype torch.float32 on a GPU; use --dtype bfloat16 or float16.",
    ),
    "head size": (
        LLAMA | {"head_dim": 40},
        {},
        "freekv does not support head size 40 on a GPU, but multiples of 16 up to 256.",
    ),
    "group": (
        LLAMA | {"num_attention_heads": 32, "head_dim": 32},
        {},
        "freekv does not support 32 query heads per KV head, as * has, but up to 16. Serve it "
        "without --attention-backend.",
    ),
    "microbatches": (
        LLAMA,
        {"ubatch_size": 2},
        "freekv does not support microbatches; leave --enable-dbo and --ubatch-size out.",
    ),
    "offloading": (
        LLAMA,
        {"kv_offloading_size": 1},
        "freekv does not support vLLM's offloading on a GPU yet: * Leave --kv-offloading-size out.",
    ),
    "connector of another layout": (
        LLAMA,
        {"kv_transfer_config": TRANSFER},
        "freekv keeps keys and values of its retrieval layers token by token, and the KV connector "
        "ExampleConnector may bring them from instances that do not, which * say so: * got None.",
    ),
    "connector to host memory": (
        LLAMA,
        {"kv_transfer_config": TRANSFER} | retrieval(home="host"),
        "kv_retrieval.home=host cannot be combined with the KV connector ExampleConnector, which "
        "would write to host memory as to the device's; leave --kv-transfer-config out, or use "
        "home=device.",
    ),
    "filled late": (
        LLAMA,
        bench() | retrieval(home="host"),
        "with kv_retrieval.home=host DecodeBenchConnector has to fill the cache at the start: add "
        '"kv_connector_extra_config": {"startup_fill": true}.',
    ),
    "disk": (
        LLAMA,
        retrieval(home="disk"),
        "kv_retrieval.home='disk' is not served on a GPU yet; use home=host, which keeps the KV "
        "cache in host memory.",
    ),
    "a disk's directory": (
        LLAMA,
        retrieval(home="host", home_path="/tmp"),
        "kv_retrieval.home_path='/tmp' is for home=disk, which is not served on a GPU; leave it "
        "out.",
    ),
    "a store": (
        LLAMA,
        retrieval(store="/tmp/store"),
        "kv_retrieval.store='/tmp/store' is not served on a GPU yet: blocks are saved and fetched "
        "between steps, and those of a GPU are not waited for; keep no file of the KV cache, with "
        "store left out.",
    ),
    "a store of host memory": (
        LLAMA,
        retrieval(home="host", store="/tmp/store"),
        "kv_retrieval.store='/tmp/store' cannot be used with home=host, which is a GPU's: a store "
        "saves and fetches blocks between steps, and those of a GPU are not waited for. Leave "
        "store out.",
    ),
    "short contexts in host memory": (
        LLAMA,
        retrieval(home="host", exact_below=4096),
        "kv_retrieval.exact_below=4096 has no effect with home=host, where a whole context would "
        "have to come to the device at each step; leave it out.",
    ),
    "more than slots": (
        LLAMA,
        retrieval(home="auto", budget=(MOST_SLOTS + 1) * 32),
        f"kv_retrieval.home=auto serves budgets of up to {MOST_SLOTS * 32} tokens, {MOST_SLOTS} "
        f"slots of 32, and a step may have {(MOST_SLOTS + 1) * 32}; lower budget (or max_budget), "
        "or use larger pages.",
    ),
    "large pages": (
        LLAMA,
        retrieval(page_size=256, budget=2048),
        "kv_retrieval.page_size=256 is not served on a GPU yet; use 128 or less.",
    ),
    "sparse prefill": (
        LLAMA | {"num_hidden_layers": 3},
        retrieval(filters=[0], prefill_budget=1024) | {"attention_backend": "omnikv"},
        "kv_retrieval.prefill_budget=1024 is not served on a GPU yet: prefill exactly, with "
        "prefill_budget left out.",
    ),
    "drafter": (
        LLAMA,
        {"speculative_config": speculation(2)},
        "freekv does not verify the drafts of 'custom_class' on a GPU yet; use ngram or ngram_gpu "
        "as the method of --speculative-config, or leave that out.",
    ),
    "many drafts": (
        LLAMA,
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 8}},
        "num_speculative_tokens=8 of --speculative-config: freekv verifies drafts by 16 queries "
        "per KV head on a GPU, and * has 2 for each token; use 7 at most.",
    ),
    "many drafts of ours": (
        LLAMA,
        retrieval(drafts=9),
        "kv_retrieval.drafts=9: freekv verifies drafts by 16 queries per KV head on a GPU, and * "
        "use 7 at most.",
    ),
    "drafts of large groups": (
        LLAMA | {"num_attention_heads": 16, "head_dim": 32},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 1}},
        "* has 16 for each token; leave it out.",
    ),
}


@pytest.mark.parametrize(("model", "options", "message"), ENGINES.values(), ids=ENGINES.keys())
def test_engines(configure, model, options, message):  # noqa: F811
    with pytest.raises(ValueError, match=pattern(message)):
        configure(model, **options)


def test_sleep():
    """Which vLLM's CPU platform does not know."""
    refusals.check_home(RetrievalConfig(), sleeps=True)
    with pytest.raises(RetrievalConfigError, match=r"home=host cannot .* --enable-sleep-mode"):
        refusals.check_home(RetrievalConfig(home="host"), sleeps=True)


def test_a_benchmark_that_fills_the_cache_at_the_start(configure):  # noqa: F811
    config = configure(LLAMA, **bench(startup_fill=True))
    assert config.kv_transfer_config.kv_connector == "DecodeBenchConnector"


def test_contexts_longer_than_kernels_take(configure):  # noqa: F811
    longest = MOST_PAGES * 16
    model = LLAMA | {"max_position_embeddings": longest + 1}
    configure(model, max_model_len=longest, **retrieval(page_size=16))
    with pytest.raises(ValueError, match=pattern(f"use {longest}, or larger pages.")):
        configure(model, max_model_len=longest + 1, **retrieval(page_size=16))
    configure(model, max_model_len=longest + 1)


def test_the_v1_model_runner(configure, runner):  # noqa: F811
    runner["use_v2_model_runner"] = False
    with pytest.raises(ValueError, match="vLLM's V2 model runner; unset VLLM_USE_V2_MODEL_RUNNER"):
        configure(LLAMA)


def test_models_that_describe_their_steps_themselves(configure, monkeypatch):  # noqa: F811
    """Whatever class vLLM's runner has for it: one of those that are served, or refused by name."""
    sources = (path.read_text() for path in Path(vllm.__path__[0]).rglob("*.py"))
    found = {
        name for text in sources for name in re.findall(r"^class (\w+ModelState)\(", text, re.M)
    }
    served = {state.__name__ for state in MODEL_STATES}
    assert found - {"ExecuteModelState", "ModelState"} > served, "the runner's own are left out"
    runner = RetrievalModelRunner.__new__(RetrievalModelRunner)
    runner.vllm_config = configure(LLAMA)
    for name in sorted(found):
        state = next((s for s in MODEL_STATES if s.__name__ == name), None)
        state = state or type(name, (DefaultModelState,), {})

        def load_model(self, state=state):
            self.model_state = state.__new__(state)

        monkeypatch.setattr(GPUModelRunner, "load_model", load_model)
        if name in served:
            runner.load_model()
            continue
        refused = pattern(
            f"freekv does not support * on a GPU: its steps are described by {name}, "
        )
        with pytest.raises(RetrievalConfigError, match=refused):
            runner.load_model()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"head_size": 40}, "head size 40 on a GPU, but multiples of 16 up to 256"),
        ({"dtype": torch.float32}, r"dtype torch\.float32 on a GPU; use --dtype bfloat16"),
    ],
    ids=str,
)
def test_layers(change, what):
    layer = AttentionSelectorConfig(64, torch.bfloat16, "auto", 32)
    for served in (layer, layer._replace(has_sink=True)):
        refusals.check_layer(served)
    with pytest.raises(RetrievalConfigError, match=f"KV retrieval does not support {what}"):
        refusals.check_layer(layer._replace(**change))


def test_a_number_of_a_request_that_its_methods_may_not_have_on_a_gpu(configure):  # noqa: F811
    owner = type("Owner", (), {})()
    owner.vllm_config = configure(LLAMA, attention_backend="kvretrieval")
    given = {"kv_retrieval": {"mass": 0.9}}
    check_request(owner, {"kv_retrieval": {"mass": 1}}, None, needs.GPU)
    with pytest.raises(RetrievalRequestError, match=r"mass=0\.9 is not served on a GPU yet; leave"):
        check_request(owner, given, None, needs.GPU)
    check_request(owner, given, None, needs.CPU)
    named = {"kv_retrieval": {"mass": 0.9, "method": "twilight"}}
    owner = type("Owner", (), {})()
    owner.vllm_config = configure(
        LLAMA, attention_backend="kvretrieval", **retrieval(also=["twilight"])
    )
    check_request(owner, named, None, needs.GPU)


def test_requests_for_fewer_drafts(configure):  # noqa: F811
    """A GPU drafts for all requests of a step alike."""
    owner = type("Owner", (), {})()
    owner.vllm_config = configure(LLAMA, **retrieval(drafts=3))
    check_request(owner, {"kv_retrieval": {"drafts": 3}}, None, needs.GPU)
    check_request(owner, {"kv_retrieval": {"drafts": 2}}, None, needs.CPU)
    for given in ({"drafts": 2}, {"lossless": True}):
        with pytest.raises(RetrievalRequestError, match="drafts for all requests alike, 3 tokens"):
            check_request(owner, {"kv_retrieval": given}, None, needs.GPU)


def test_a_mass_in_contexts_that_are_ranked_in_parts(configure):  # noqa: F811
    longest = TILE_PAGES * 16
    model = LLAMA | {"max_position_embeddings": longest + 1}
    options = {"attention_backend": "twilight", **retrieval(page_size=16)}
    configure(model, max_model_len=longest, **options)
    with pytest.raises(ValueError, match=pattern(f"use {longest}, or larger pages.")):
        configure(model, max_model_len=longest + 1, **options)
