"""Engines with a store over models that mix kinds of layers: what is found and answered."""

import pytest
import torch

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
from tests.support import mixed_models
from tests.support.engine import engine
from vllm_kvretrieval.attention.cpu.refusals import STABLE_HASH
from vllm_kvretrieval.store.add import context_keys
from vllm_kvretrieval.store.disk.contexts import beside, reachable
from vllm_kvretrieval.store.disk.groups import Parts, groups_of

pytestmark = [pytest.mark.engine]


CASES = [("gemma3", "device")]
OTHERS = (
    "gemma3n",
    "gemma4",
    "gemma4_shared",
    "gpt_oss",
    "llama4",
    "lfm2",
    "qwen3_next",
    "qwen3_5",
)
STATES = ("granite", "nemotron", "falcon_h1", "zamba2")
SLOW = [
    ("gemma3", "disk"),
    *((name, home) for name in (*OTHERS, *STATES) for home in ("device", "disk")),
]


@pytest.fixture(
    scope="module",
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids="-".join,
)
def lives(request, tmp_path_factory):
    """Answers of an engine, and of one that was started when it had ended, with a damaged block of
    a window or state; and how much of that document is whole."""
    path, directory = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("lives") / "store"
    name, home = request.param
    torch.manual_seed(0)
    getattr(mixed_models, name)().save_pretrained(path)
    retrieval = {"home": home, "store": str(directory), "budget": 512, "page_size": PAGE}

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
