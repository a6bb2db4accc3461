"""Engines on the CPU with vLLM's V1 model runner and its V2 model runner, in one process.

V2 needs Triton. Here Triton's interpreter runs vLLM's kernels; those that walk through a vocabulary
have stand-ins in torch, by the hook that vLLM has for that. All else is as it is served: vLLM's
platform, runner and scheduler, our worker and our kernels in C++.
"""

import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.support import device_engine, interpreter


def start() -> ProcessPoolExecutor:
    """The process; functions of this module can be submitted to it."""
    pool = interpreter.start()
    pool.submit(_prepare).result()
    return pool


def _prepare():
    device_engine.pretend_triton()
    from vllm.triton_utils.dispatcher import register_kernels

    of_sampling = "vllm.v1.worker.gpu.sample."
    register_kernels(
        {
            of_sampling + "gumbel._gumbel_sample_kernel": _greedy_sample,
            of_sampling + "logprob._topk_log_softmax_kernel": _log_softmax,
            of_sampling + "logprob._ranks_kernel": _ranks,
        }
    )


def _greedy_sample(best, _0, most, _1, *args, BLOCK_SIZE, **options):
    """The likeliest token of each block of the vocabulary, and its logit."""
    logits, rows, temperature = args[6], args[8], args[11]
    assert not temperature[rows.long()].any()
    for number, block in enumerate(logits.float().split(BLOCK_SIZE, dim=1)):
        place = block.argmax(1)
        best[:, number] = number * BLOCK_SIZE + place
        most[:, number] = block.gather(1, place[:, None])[:, 0]


def _log_softmax(output, logits, _0, ids, _1, topk, vocabulary, **options):
    output.copy_(logits.float().log_softmax(-1).gather(1, ids))


def _ranks(output, logits, _0, ids, vocabulary, **options):
    output.copy_((logits >= logits.gather(1, ids[:, None])).sum(1))


def open_engine(runner: str, model: str, options: dict[str, Any]) -> None:
    """Start an engine with the model runner ``v1`` or ``v2``."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "v2"))
    from vllm import envs

    envs.disable_envs_cache()
    device_engine.open_engine(model, options)


def close_engine() -> None:
    """Stop the engine, so that another one can start."""
    import gc

    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    device_engine.close_engine()
    device_engine._engine = None
    gc.collect()
    cleanup_dist_env_and_memory()


def describe() -> list[dict[str, Any]]:
    """The module of each worker's model runner, its parts of the model, and whether its KV cache
    is in order."""
    return device_engine._engine.collective_rpc(_describe_worker)


def _describe_worker(worker):
    layers = worker.retrieval_layers
    return {
        "runner": type(worker.model_runner).__module__,
        "layers": sorted(layers),
        "kv_heads": {layer.num_kv_heads for layer in layers.values()},
        "wrong": worker.storage.check(),
        "slots": worker.storage.usage.slots > 0,
    }


def make_room():
    """Make the room for a stage's inputs, which V1 without compiled steps lacks on a CPU."""
    device_engine._engine.collective_rpc(_make_room)


def _make_room(worker):
    runner = worker.model_runner
    runner._dummy_run(runner.max_num_tokens, is_profile=True)


def drive(requests):
    """See ``tests.support.engine.drive``."""
    return device_engine.drive(requests)


def drive_preempting(requests):
    """See ``tests.support.device_engine.drive_preempting``."""
    return device_engine.drive_preempting(requests)


def converse(prompts, tokens, options):
    """What a session generates that gets one input after the other: token ids of each turn."""
    from vllm.inputs import TokensPrompt

    from tests.support.engine import Request

    engine, turns = device_engine._engine.llm_engine, []
    for prompt in prompts:
        request = engine.input_processor.process_inputs(
            "session",
            TokensPrompt(prompt_token_ids=prompt),
            Request(prompt, tokens, options).params(),
            supported_tasks=engine.get_supported_tasks(),
            resumable=True,
        )
        engine.engine_core.add_request(request)
        said: list[int] = []
        while len(said) < tokens:
            for output in engine.engine_core.get_output().outputs:
                said += output.new_token_ids
        turns.append(said)
    engine.engine_core.abort_requests(["session"])
    return turns


def _core():
    return device_engine._engine.llm_engine.engine_core.engine_core


def _worker():
    return _core().model_executor.driver_worker.worker


def counted(request):
    """The counts of heads and units that go with the worker's outputs while a request is served."""
    from vllm_kvretrieval.engine.reports import FIELD

    scheduler, told = _core().scheduler, Counter[str]()
    take_up = scheduler.update_from_output

    def look(step, output):
        told.update(getattr(output, FIELD, {}))
        return take_up(step, output)

    scheduler.update_from_output = look
    drive([request])
    scheduler.update_from_output = take_up
    return {name: told[name] for name in told if name.startswith(("heads", "units"))}


def idle():
    """Whether a step without requests, as of idle ranks of data parallelism, leaves those alone
    that have seats."""
    table = _worker().requests
    assert len(table)
    before = table.counts(), table._context.tolist()
    _worker().execute_dummy_batch()
    return before == (table.counts(), table._context.tolist())


def left():
    """Requests with a seat when all have ended; of the last one the worker may not know yet."""
    from tests.support.engine import Request, prompt

    drive([Request(prompt(5), 1, {})])
    return len(_worker().requests)
