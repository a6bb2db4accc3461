"""Options of requests over HTTP, as vLLM's own routes see them; nothing is computed here.

``test_serving`` has a server, whose answers are streamed.
"""

import json
import logging

import pytest
from starlette.testclient import TestClient
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.support.engine import checkpoint
from vllm_kvretrieval.platforms import http
from vllm_kvretrieval.platforms.arguments import REQUEST_CHECK

pytestmark = pytest.mark.model
TOKEN = "a-key"
JSON = {"Content-Type": "application/json"}
RIGHT = 'over HTTP write "vllm_xargs": {"kv_retrieval_budget": 512}'


def application(**options):
    """vLLM's routes and what stands in front of them, for an engine with such options."""
    given = ["--api-key", TOKEN, "--enable-scale-out"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    app = build_app(args, ("generate",))
    model = checkpoint("SmolLM2-135M-Instruct")
    app.state.vllm_config = EngineArgs(model, enforce_eager=True, **options).create_engine_config()
    return TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"})


@pytest.fixture(scope="module")
def served():
    depth = {"prefill_budget": 256, "prefill_depth": 0.5}
    options = {"kv_retrieval": {"budget": 256, **depth}}
    return application(attention_backend="quest", additional_config=options)


def refusal(client, fields, path="/v1/completions"):
    """Why a streamed request is refused."""
    reply = client.post(path, json={"prompt": "Hello", "stream": True, **fields})
    assert reply.status_code == 400
    return reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vllm_xargs": {"kv_retrieval_budget": 100}}, "kv_retrieval.budget=100 must be a pos"),
        ({"vllm_xargs": {"budget": 128}}, "'budget' is not read; write kv_retrieval_budget"),
        ({"vllm_xargs": {"exact": True}}, "'exact' is not read; write kv_retrieval_exact"),
        ({"vllm_xargs": {"kvRetrieval-budget": 9}}, "'kvRetrieval-budget' is not read"),
        ({"vllm_xargs": {"kv_retrieval": {"budget": 512}}}, "one value for each option"),
        ({"kv_retrieval_budget": 128}, "'kv_retrieval_budget' is not read at the top of a requ"),
        ({"kv_retrieval": {"budget": 128}}, RIGHT),
        ({"KV-Retrieval.budget": 128}, RIGHT),
        ({"extra_args": {"kv_retrieval": {"budget": 128}}}, f"not read at extra_args; {RIGHT}"),
        ({"extra_body": {"kv_retrieval_budget": 1}}, "'kv_retrieval_budget' is not read at extra"),
        ({"vllm_xargs": {"kv_retrieval_session": "../x"}}, "cannot be a session's name"),
        ({"vllm_xargs": {"kv_retrieval_retain": 10}}, "retain=10.0 is not served here"),
        ({"vllm_xargs": {"kv_retrieval_pin": 1}}, "pin=True is not served here"),
        ({"vllm_xargs": {"retain": 10}}, "'retain' is not read; write kv_retrieval_retain"),
        (
            {"kv_hints": {"actions": [{"action_type": "kvretrieval.pin", "payload": {}}]}},
            "kv_hints is not read over HTTP",
        ),
        (
            {"use_beam_search": True, "vllm_xargs": {"kv_retrieval_budget": 128}},
            "no effect with use_beam_search",
        ),
        ({"prompt_logprobs": 1}, "prompt_logprobs cannot be served with prefill_depth=0.5"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs cannot be served with prefill_depth=0.5"),
    ],
    ids=str,
)
def test_what_is_refused(served, fields, message):
    assert message in refusal(served, fields)


@pytest.mark.parametrize(
    ("name", "field", "said"),
    [
        ("7f3a", None, " (X-Request-Id '7f3a'): kv_retrieval.budget=100 must be"),
        ("a" * 500, None, f" (X-Request-Id '{'a' * 195}...): kv_retrieval"),
        (None, None, "for /v1/completions: kv_retrieval.budget=100 must be"),
        (None, "7f\n3a", r" (request_id '7f\n3a'): kv_retrieval.budget=100 must be"),
        ("7f3a", "8b", " (X-Request-Id '7f3a'): kv_retrieval.budget=100 must be"),
    ],
    ids=["named", "long", "unnamed", "by a field", "by both"],
)
def test_a_refusal_is_logged(served, name, field, said):
    records: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Kept()
    http.logger.addHandler(handler)
    headers = {} if name is None else {"X-Request-Id": name}
    body = {"prompt": "Hello", "vllm_xargs": {"kv_retrieval_budget": 100}}
    body |= {} if field is None else {"request_id": field}
    try:
        assert served.post("/v1/completions", json=body, headers=headers).status_code == 400
    finally:
        http.logger.removeHandler(handler)
    (line,) = [record.getMessage() for record in records]
    assert said in line
    assert "\n" not in line


@pytest.mark.parametrize("more", [{}, {"top_logprobs": 2, "logprobs": True}, {"logprobs": False}])
def test_a_chat_that_echoes(served, more):
    """vLLM then takes its ``top_logprobs``, 0 by default, for the prompt, too."""
    fields = {"messages": [{"role": "user", "content": "Hello"}], "echo": True, **more}
    assert "prompt_logprobs cannot be" in refusal(served, fields, "/v1/chat/completions")


def test_options_in_the_form_of_python(served):
    given = {"sampling_params": {"extra_args": {"kv_retrieval": {"budget": 100}}}}
    assert "budget=100 must be" in refusal(served, given, "/inference/v1/generate")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b'"text"', b'{"prompt": ' + b"[" * 100_000, b"\xff{}"]
    + [b'{"prompt": "a", "vllm_xargs": %s}' % given for given in (b"3", b"[1]", b'{"a": {}}')]
    + [b'{"prompt": %s}' % (b"9" * 5000)],
    ids=lambda body: body[:20],
)
def test_what_is_vllms_matter(served, body):
    """It answers as it does without retrieval."""
    reply = served.post("/v1/completions", content=body, headers=JSON)
    assert reply.status_code == 400
    assert "retrieval" not in reply.text


def test_other_fields_are_not_looked_at(served):
    """A request comes through, to routes that have no engine here."""
    fields = {"user": "kv_retrieval", "metadata": {"kv_retrieval_budget": 1}, "budget": 3}
    xargs = {"kv_retrieval_budget": 128, "another_plugin": 3}
    for hints in (3, {}, {"actions": 3}, {"actions": [3, {"action_type": "router.placed"}]}):
        body = {"prompt": "Hello", "vllm_xargs": xargs, "kv_hints": hints, **fields}
        with pytest.raises(AttributeError, match="openai_serving_completion"):
            served.post("/v1/completions", json=body)


def test_strangers_learn_nothing(served):
    """Without the key of the server, they are not told what it serves."""
    body = {"prompt": "Hello", "vllm_xargs": {"kv_retrieval_budget": 100}}
    reply = served.post("/v1/completions", json=body, headers={"Authorization": "Bearer other"})
    assert reply.status_code == 401


def test_a_body_in_pieces(served):
    """The options are in none of them as a whole."""
    text = json.dumps({"prompt": "Hello", "vllm_xargs": {"kv_retrieval_budget": 100}})
    pieces = (text[i : i + 7].encode() for i in range(0, len(text), 7))
    reply = served.post("/v1/completions", content=pieces, headers=JSON)
    assert "kv_retrieval.budget=100 must be" in reply.json()["error"]["message"]


def test_other_readers_of_options():
    """Where an engine has processors of logits, names without our prefix may be theirs."""
    processor = "vllm.v1.sample.logits_processor.builtin.MinPLogitsProcessor"
    client = application(attention_backend="quest", logits_processors=[processor])
    body = {"prompt": "Hello", "vllm_xargs": {"budget": 128}}
    with pytest.raises(AttributeError, match="openai_serving_completion"):
        client.post("/v1/completions", json=body)


def test_a_server_without_retrieval():
    body = {"prompt": "Hello", "kv_retrieval_budget": 5, "vllm_xargs": {"kv_retrieval_budget": 1}}
    with pytest.raises(AttributeError, match="openai_serving_completion"):
        application().post("/v1/completions", json=body)


def test_the_layer_is_in_front_of_servers_only(monkeypatch):
    """And behind layers of the user's, which may change a request."""
    parser = make_arg_parser(FlexibleArgumentParser())
    assert parser.parse_args([]).middleware == [REQUEST_CHECK]
    given = parser.parse_args(["--middleware", "mine.Layer"])
    assert given.middleware == [REQUEST_CHECK, "mine.Layer"]
    monkeypatch.setattr("sys.argv", ["vllm", "snapshot", "create"])
    assert make_arg_parser(FlexibleArgumentParser()).parse_args([]).middleware == []
