"""vLLM's warm-up of its V2 runner stays within what a worker has room for."""

from types import SimpleNamespace

import pytest

from vllm_kvretrieval.compat import bound_warm_up


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
