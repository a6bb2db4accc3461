"""`vllm serve` as a user starts it: torch.compile, HTTP, clients that come and go."""

import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.engine import checkpoint
from tests.server import BUDGET, KEY, MODEL, PROMPT, serving

pytestmark = [pytest.mark.engine, pytest.mark.model]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server") / "log.txt") as server:
        yield server


def test_the_model_is_compiled(server):
    assert "DYNAMO_TRACE_ONCE" in server.text()
    assert f"freekv: decode attends to at most {BUDGET} tokens per KV head" in server.text()


def test_streamed_completion(server):
    stream = server.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert len(pieces) >= 12
    assert KEY in "".join(pieces)
    context = chunks[-1].usage.prompt_tokens + 11
    assert context > 3 * BUDGET
    noted = server.usage(chunks[0].id)
    assert noted["context"] == context
    assert noted["decode_steps"] == noted["sparse_steps"] == 11
    assert noted["pages_attended"] == BUDGET / 32
    assert noted["kv_read_share"] == pytest.approx(BUDGET / context, rel=0.05)


def test_chat(server):
    reply = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
    )
    assert reply.choices[0].message.content
    assert server.usage(reply.id)["sparse_steps"] == 0, "a context within the budget"


def test_request_options(server):
    exact = server.complete(PROMPT, kv_retrieval_exact=True)
    assert KEY in exact.choices[0].text
    assert server.usage(exact.id)["sparse_steps"] == 0
    little = server.complete(PROMPT, kv_retrieval_budget=256, kv_retrieval_correction_threshold=1)
    noted = server.usage(little.id)
    assert noted["pages_attended"] == 256 / 32
    assert noted["corrected_share"] == 1
    blind = server.complete(PROMPT, kv_retrieval_method="streamingllm")
    assert KEY not in blind.choices[0].text
    assert server.usage(blind.id)["corrected_share"] == 0


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"kv_retrieval_budget": 1024}, "kv_retrieval.budget=1024 exceeds the server's limit"),
        ({"kv_retrieval_budget": 500}, "kv_retrieval.budget=500 must be a positive multiple"),
        ({"kv_retrieval_budget": "much"}, "kv_retrieval.budget='much' must be a whole number"),
        ({"kv_retrieval_bugdet": 512}, "kv_retrieval of a request has no option 'bugdet'"),
        ({"kv_retrieval_method": "quest"}, "kv_retrieval.method='quest' cannot be served"),
        ({"kv_retrieval_method": ["freekv"]}, "kv_retrieval.method=['freekv'] cannot be served"),
    ],
    ids=str,
)
def test_a_bad_option_gets_a_400(server, xargs, message):
    with pytest.raises(openai.BadRequestError) as error:
        server.complete("Hello", **xargs)
    assert message in error.value.message


def test_a_bad_option_hurts_nobody_else(server):
    with ThreadPoolExecutor() as pool:
        good = pool.submit(server.complete, PROMPT, 60)
        time.sleep(0.5)
        with pytest.raises(openai.BadRequestError):
            server.complete(PROMPT, kv_retrieval_budget=1024)
        assert KEY in good.result().choices[0].text
    assert KEY in server.complete(PROMPT).choices[0].text


def test_a_lost_client_frees_its_slot(server):
    stream = server.client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=1000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    first = next(iter(stream))
    stream.close()
    noted = server.usage(first.id)
    assert 0 < noted["decode_steps"] < 500


def test_many_clients(server):
    """More than run at once; everybody gets the answer."""
    options: list[dict[str, object]] = [{}, {"kv_retrieval_exact": True}, {}, {}]
    with ThreadPoolExecutor(max_workers=12) as pool:
        waiting = [pool.submit(server.complete, PROMPT, 8 + i, **options[i % 4]) for i in range(12)]
    assert all(KEY in answer.result().choices[0].text for answer in waiting)


def test_vllm_schedules_synchronously_on_a_cpu():
    """So ``--async-scheduling`` is accepted here and does nothing; once it does, test it."""
    config = EngineArgs(
        model=checkpoint(MODEL), attention_backend="freekv", async_scheduling=True
    ).create_engine_config()
    assert config.scheduler_config.async_scheduling is False
