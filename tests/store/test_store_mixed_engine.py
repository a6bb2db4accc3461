"""Engines with a store over models that mix kinds of layers: what is found and answered."""

import pytest
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.store.test_store_engine import (
    BLOCK,
    GENERATED,
    OPTIONS,
    PAGE,
    ask,
    damage,
    follow_up,
    opened,
    prompt,
)
from tests.support.device_models import LAYERS, SHAPE, convolutions, make, sinks, states, windows
from tests.support.engine import engine
from vllm_kvretrieval.attention.cpu.refusals import STABLE_HASH
from vllm_kvretrieval.store.add import context_keys
from vllm_kvretrieval.store.disk.contexts import beside, reachable
from vllm_kvretrieval.store.disk.groups import Parts, groups_of

pytestmark = [pytest.mark.engine]


def larger_heads(path):
    """Gemma 4: layers with full attention have larger heads, so their blocks have fewer tokens."""
    config = Gemma4TextConfig(
        global_head_dim=128,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=512,
        num_kv_shared_layers=0,
        **LAYERS,
        **SHAPE,
    )
    return Gemma4ForCausalLM(config)


def delta_nets(path):
    """Qwen3-Next: three of four layers are gated delta nets."""
    config = Qwen3NextConfig(
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        head_dim=64,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        **SHAPE,
    )
    return Qwen3NextForCausalLM(config)


def few_attending(path):
    """Nemotron-H: state spaces (Mamba 2), attention, and layers with neither."""
    config = NemotronHConfig(
        num_hidden_layers=6,
        layers_block_type=["mamba", "attention", "mlp", "mamba", "attention", "mlp"],
        head_dim=64,
        mamba_num_heads=8,
        mamba_head_dim=64,
        n_groups=1,
        ssm_state_size=16,
        **SHAPE,
    )
    return NemotronHForCausalLM(config)


FAMILIES = [
    windows,
    *(
        pytest.param(family, marks=pytest.mark.slow)
        for family in (larger_heads, sinks, convolutions, delta_nets, states, few_attending)
    ),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.__name__)
def lives(request, tmp_path_factory):
    """Answers of an engine, and of one that was started when it had ended, with a damaged block of
    a window or state; and how much of that document is whole."""
    path, directory = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("lives") / "store"
    make(request.param, path)
    retrieval = {"store": str(directory), "budget": 512, "page_size": PAGE}

    def life():
        return engine(str(path), **OPTIONS, additional_config={"kv_retrieval": retrieval})

    with life() as llm:
        first = {"new": ask(llm, prompt(1), GENERATED), "damaged": ask(llm, prompt(2))}
        first["found"] = ask(llm, prompt(1), GENERATED)
        first["damaged, found"] = ask(llm, prompt(2))
        first["follow-up"] = follow_up(llm, first["found"])
    store = opened(directory)
    groups, records = groups_of(store.identity), store.records()
    known = reachable(records)
    keys = context_keys(prompt(2), store.identity, STABLE_HASH, None)
    parts = Parts(groups, beside(records, known))
    lost = parts.blocks[[*parts.of_whole(keys)][-1]]
    assert records[lost].group
    left = beside({block: r for block, r in records.items() if block != lost}, known)
    whole = Parts(groups, left).whole(keys) * groups[0].size
    store.close()
    damage(directory, lost)
    with life() as llm:
        second = {"found": ask(llm, prompt(1), GENERATED), "damaged": ask(llm, prompt(2))}
        second["follow-up"] = follow_up(llm, first["found"])
        second["exact"] = follow_up(llm, first["found"], exact=True)
        second["exact, found"] = follow_up(llm, first["found"], exact=True)
        second["new"] = ask(llm, prompt(3))
    return first, second, whole


def test_a_restart_changes_nothing(lives):
    """A prefix is found as far as without a restart, and answers are the same bit by bit."""
    first, second, _ = lives
    assert first["new"].cached == second["new"].cached == 0
    assert first["found"].cached >= 8 * BLOCK
    assert second["found"] == first["found"]
    assert first["found"].tokens == first["new"].tokens
    assert second["follow-up"].tokens == first["follow-up"].tokens


def test_levels_are_kept(lives):
    """Blocks of generated tokens are not found by a request for exact answers, unless a prompt with
    these tokens has been read."""
    first, second, _ = lives
    if first["follow-up"].cached > len(prompt(1)):
        assert second["exact"].cached <= len(prompt(1))
    assert second["exact, found"].cached > len(prompt(1))
    assert second["exact, found"].tokens == second["exact"].tokens


def test_a_document_is_found_as_far_as_it_is_whole(lives):
    """Without the last block of a window, or a state, up to an earlier one."""
    first, second, whole = lives
    assert second["damaged"].cached == whole < first["damaged, found"].cached
    assert second["damaged"].tokens == first["damaged"].tokens
