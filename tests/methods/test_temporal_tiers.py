"""ttkv in an engine: recent tokens raw in memory, what leaves their window encoded in a file."""

import pytest

from tests.support.engine import Request, engine, model_of, prompt, random_llama
from tests.support.home_requests import (
    BLOCKS,
    HEAD_SIZE,
    KV_HEADS,
    LAYERS,
    OPTIONS,
    SEQUENCES,
    metrics,
    settle,
)

pytestmark = pytest.mark.engine

model = model_of(random_llama, LAYERS, KV_HEADS)


@pytest.mark.parametrize("block", [128, 256])
def test_temporal_tiers(model, block):
    """ttkv: the window raw in memory, what leaves it in few bytes in the file."""
    least = SEQUENCES * KV_HEADS * 4
    sizes = {"page_size": block, "budget": 4 * block, "sink": block, "window": 2 * block}
    slot = LAYERS * (2 * block * HEAD_SIZE * 4 + 24)
    options = {"kv_retrieval": sizes | {"recall_cache_bytes": least * slot}}
    ttkv = OPTIONS | {"attention_backend": "ttkv", "disable_log_stats": False}
    with engine(model, additional_config=options, **ttkv) as llm:
        (tiers,) = llm.collective_rpc(lambda worker: vars(worker.planner.tiers))
        unit = 2 * (64 + block) + block * 64 * 3 // 2
        assert tiers["home"] == LAYERS * BLOCKS * KV_HEADS * unit
        settle(llm)
        before = metrics(llm)
        llm.collective_rpc("record_writes")
        prompts = prompt(7 * block + 4, 40), prompt(5 * block + 60, 41)
        requests = [Request(prompts[0], 140, {}), Request(prompts[1], 30, {}, arrives=9)]
        core = llm.llm_engine
        for i, request in enumerate(requests):
            core.add_request(f"r{i}", {"prompt_token_ids": request.prompt}, request.params())
        held, step = [], 0
        while core.has_unfinished_requests():
            core.step()
            step += 1
            assert llm.collective_rpc("check_caches")[0][0] == []
            if step % 8 == 0:  # a look at all of the process's memory
                held.append(llm.collective_rpc("open_bytes")[0])
        page = LAYERS * KV_HEADS * 2 * block * HEAD_SIZE * 4
        assert max(held) <= 2 * 3 * page, "two full pages and one that is being filled, of each"
        assert 2 * page <= held[-1] <= 3 * page
        after = metrics(llm)
        read = after["bytes_recalled"] - before["bytes_recalled"]
        assert read % unit == 0
        assert read >= (after["units_missed"] - before["units_missed"]) * unit > 0
        settle(llm)
        assert llm.collective_rpc("open_bytes")[0] < page, "of its last request"
        (compared,) = llm.collective_rpc("compare_home")
        written = [len(r.prompt) + r.tokens - 1 for r in requests]
        assert compared == LAYERS * sum(tokens // block * block for tokens in written)
