"""Models that cap logits (Gemma 2) or have learned attention sinks (gpt-oss), in an engine.

Small ones with random weights, against transformers, with layers of sliding windows between those
that retrieve.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

from tests.spec import ops as reference
from tests.support.bare_engine import BareEngine
from tests.support.device_models import SHAPE
from tests.support.engine import Request, assert_same, drive, engine, likely, prompt
from vllm_kvretrieval.engine.cpu.refusals import check_logits
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import TokenLists, cpu
from vllm_kvretrieval.methods import watching

pytestmark = pytest.mark.engine

BUDGET = 256
CAP = 2.0
"""A cap of logits that are far larger."""
TOLERANCE = 2e-3
LAYERS = {"num_hidden_layers": 4, "head_dim": 64, "sliding_window": 128}
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 300,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "num_gpu_blocks_override": 48,
}


def capped():
    config = Gemma2Config(
        attn_logit_softcapping=CAP,
        final_logit_softcapping=None,
        query_pre_attn_scalar=16,
        attn_implementation="eager",
        **LAYERS,
        **SHAPE,
    )
    model = Gemma2ForCausalLM(config)
    model.model.embed_tokens.weight.data *= 0.3  # else the last token is repeated, whatever it sees
    return model


def sinks():
    config = GptOssConfig(
        num_local_experts=4,
        num_experts_per_tok=2,
        attn_implementation="eager",
        **LAYERS,
        **SHAPE,
    )
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, 3.0, 3.0)
    return model


@pytest.fixture(scope="module", params=[capped, sinks], ids=lambda model: model.__name__)
def model(request, tmp_path_factory):
    """It, and where it is saved."""
    torch.manual_seed(0)
    made = request.param().eval()
    path = tmp_path_factory.mktemp("model")
    made.save_pretrained(path)
    return made, str(path)


@pytest.fixture(scope="module")
def llm(model):
    retrieval = {"budget": BUDGET, "attention": "own", "also": ["snapkv"]}
    with engine(
        model[1],
        attention_backend="kvretrieval",
        additional_config={"kv_retrieval": retrieval},
        **OPTIONS,
    ) as llm:
        yield llm


def test_whole_contexts(llm, model):
    """Prompts in chunks, contexts within the budget, and exact steps, together."""
    (layers,) = llm.collective_rpc(lambda worker: [*worker.retrieval_layers])
    assert [int(name.split(".")[2]) for name in layers] == [1, 3]
    requests = [
        Request(prompt(700), 8, {"exact": True}),
        Request(prompt(120), 12, {}),
        Request(prompt(500), 4, {"exact": True}, arrives=2),
    ]
    for request, answer in zip(requests, drive(llm, requests), strict=True):
        assert_same(answer, likely(model[0], request.prompt, answer), TOLERANCE)


def test_selected_pages(llm, model):
    """Attention of decode steps uses the cap and the sinks of the model."""

    def watch(worker):
        worker.compared = 0

        def attend(query, lists, cache, output, layout, scale, **rule):
            cpu.attend(query, lists, cache, output, layout, scale, **rule)
            expected = torch.empty_like(output)
            own = impl_of[cache.data_ptr()]
            own_rule = {"softcap": own[0], "sinks": own[1], "remainder": rule["remainder"]}
            reference.attend(query, lists, cache, expected, layout, scale, **own_rule)
            torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
            worker.compared += 1

        def decode_layer(query, key, value, slots, output, rows, chooser, layer):
            nanoseconds = cpu.decode_layer(query, key, value, slots, output, rows, chooser, layer)
            assert not chooser.remainder
            size, heads = layer.cache.shape[2], layer.cache.shape[1]
            lists = TokenLists(rows.lists, rows.lengths, size, heads)
            expected, (softcap, sinks) = torch.empty_like(output), impl_of[layer.cache.data_ptr()]
            known = query, lists, layer.cache, expected, layer.layout, layer.scale
            reference.attend(*known, softcap=softcap, sinks=sinks)
            torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
            worker.compared += 1
            return nanoseconds

        impl_of = {}
        layers = worker.vllm_config.compilation_config.static_forward_context
        for name, impl in worker.retrieval_layers.items():
            weight = impl.sinks
            impl_of[layers[name].kv_cache.data_ptr()] = (
                CAP if weight is None else 0.0,
                None if weight is None else weight.float(),
            )
            impl.kernels = SimpleNamespace(**vars(cpu))
            impl.kernels.attend, impl.kernels.decode_layer = attend, decode_layer

    llm.collective_rpc(watch)
    request = Request(prompt(700), 8, {})
    answer = drive(llm, [request])[0]
    (compared,) = llm.collective_rpc(lambda worker: worker.compared)
    assert compared == 2 * 7, "each decode step, in both layers"
    expected = likely(model[0], request.prompt, answer)
    assert answer.logprobs[0] == pytest.approx(expected.logprobs[0], abs=TOLERANCE)
    assert answer.logprobs[1:] != pytest.approx(expected.logprobs[1:], abs=TOLERANCE)


def test_observed_prompts(llm):
    """Tokens are rated by the attention that the model has."""

    def watch(worker):
        names = vars(watching)
        worker.rules, observe = [], names["observe"]

        def noting(*args, softcap, sinks):
            worker.rules.append((softcap, sinks))
            return observe(*args, softcap=softcap, sinks=sinks)

        names["observe"] = noting

    def told(worker):
        heads = [impl.num_kv_heads for impl in worker.retrieval_layers.values()]
        sinks = [impl.sinks for impl in worker.retrieval_layers.values()]
        return worker.rules, heads, sinks

    llm.collective_rpc(watch)
    drive(llm, [Request(prompt(700), 4, {"method": "snapkv"})])
    ((rules, heads, sinks),) = llm.collective_rpc(told)
    parts = [None] * sum(heads)
    if sinks[0] is not None:
        pairs = zip(sinks, heads, strict=True)
        parts = [part for own, count in pairs for part in own.float().chunk(count)]
    assert len(rules) == len(parts), "the last queries are in one chunk"
    for (softcap, given), expected in zip(rules, parts, strict=True):
        assert softcap == (CAP if expected is None else 0)
        assert (given is None) == (expected is None)
        assert given is None or torch.equal(given, expected)


def test_filters_know_the_rules(model):
    """A filter's own attention decides what the layers after it attend to."""
    with engine(
        model[1],
        attention_backend="omnikv",
        additional_config={"kv_retrieval": {"budget": BUDGET, "max_budget": 1024, "filters": [1]}},
        **OPTIONS,
    ) as llm:
        rules = llm.collective_rpc(_filter_rules)
        answer = drive(llm, [Request(prompt(700), 4, {"budget": 768})])[0]
    assert_rules(model[0], *rules[0])
    assert_same(answer, likely(model[0], prompt(700), answer), TOLERANCE)


def _filter_rules(worker):
    """The soft cap and the sinks of the filter's selector, and its layer's sinks."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    impls: list[Any] = [layer.impl for layer in layers.values() if hasattr(layer, "impl")]
    (impl,) = (impl for impl in impls if getattr(impl, "watchers", None))
    (selector,) = (watcher.selectors.rows for watcher in impl.watchers.values())
    return selector.softcap, selector.sinks, impl.sinks


def assert_rules(made, softcap, sinks, of_layer):
    if made.config.model_type == "gpt_oss":
        assert softcap == 0
        torch.testing.assert_close(sinks, of_layer.float())
    else:
        assert (softcap, sinks) == (CAP, None)


def test_a_mass_is_refused_where_logits_are_capped():
    """Indexes estimate shares of the attention by logits that are not capped."""
    bare = BareEngine("twilight", {})
    logits = bare.worker.planner, [layer.impl for layer in bare.layers.values()], {bare.builder.isa}
    assert check_logits(*logits) == (False, False)
    bare.layers["model.layers.2"].impl.sinks = torch.zeros(4)
    assert check_logits(*logits) == (False, True)
    bare.layers["model.layers.2"].impl.logits_soft_cap = CAP
    with pytest.raises(RetrievalConfigError, match=r"twilight selects up to a mass .*mass=1"):
        check_logits(*logits)


def test_the_mass_of_a_request_has_no_effect_where_logits_are_capped(model):
    """Its answer is that of a request without a mass."""
    with engine(
        model[1],
        attention_backend="twilight",
        additional_config={"kv_retrieval": {"budget": BUDGET, "sink": 32, "window": 64, "mass": 1}},
        **OPTIONS,
    ) as llm:
        ids = prompt(700)
        whole, part = drive(llm, [Request(ids, 8, {}), Request(ids, 8, {"mass": 0.05})])
        (plain,) = llm.collective_rpc(
            lambda worker: [known.name for known in worker.requests.plain]
        )
    by_mass = "mass" not in plain
    assert by_mass == (model[0].config.model_type == "gpt_oss")
    if by_mass:
        assert part.logprobs[1:] != pytest.approx(whole.logprobs[1:], abs=TOLERANCE)
    else:
        assert_same(part, whole, TOLERANCE)
