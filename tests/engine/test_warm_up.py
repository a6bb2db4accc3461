"""vLLM's warm-ups stay within what a worker has room for, and are no longer than they must be."""

from types import SimpleNamespace

import pytest
from vllm import envs

from vllm_kvretrieval.compat import bound_warm_up
from vllm_kvretrieval.upstream.compiled import warm_up_briefly


def a_runner(v2):
    vllm_config = SimpleNamespace(
        use_v2_model_runner=v2, kernel_config=SimpleNamespace(enable_jit_warmup=True)
    )
    scheduler_config = SimpleNamespace(max_num_seqs=8)
    return SimpleNamespace(vllm_config=vllm_config, scheduler_config=scheduler_config)


@pytest.mark.parametrize(("seats", "requests"), [(3, 3), (20, 8)])
@pytest.mark.parametrize("writes", [True, False])
def test_requests_have_seats_and_write_where_they_may(seats, requests, writes):
    runner = a_runner(v2=True)
    shared = runner.scheduler_config
    bound_warm_up(runner, seats, writes)
    assert runner.scheduler_config.max_num_seqs == requests
    assert shared.max_num_seqs == 8, "the scheduler has its own number"
    assert runner.vllm_config.kernel_config.enable_jit_warmup == writes


def test_v1_has_no_such_requests():
    runner = a_runner(v2=False)
    bound_warm_up(runner, 3, writes=False)
    assert runner.scheduler_config.max_num_seqs == 8
    assert runner.vllm_config.kernel_config.enable_jit_warmup


@pytest.mark.parametrize(("saved", "tokens"), [(True, [64]), (False, [64, 4096])])
def test_a_model_that_is_loaded_warms_up_with_few_tokens(monkeypatch, saved, tokens):
    """One that is compiled is compiled for as many as a step may have."""
    monkeypatch.delenv("VLLM_FORCE_AOT_LOAD", raising=False)
    seen = []

    def warming_up_model():
        seen.append(runner.max_num_tokens)
        if envs.VLLM_FORCE_AOT_LOAD and not saved:
            raise FileNotFoundError

    runner = SimpleNamespace(max_num_tokens=4096, warming_up_model=warming_up_model)
    warm_up_briefly(runner)
    runner.warming_up_model()
    assert seen == tokens
    assert runner.max_num_tokens == 4096
    assert not envs.VLLM_FORCE_AOT_LOAD
