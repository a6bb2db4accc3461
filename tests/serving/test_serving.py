"""`vllm serve` over HTTP, with clients that come and go; and once as a user starts it, compiled."""

import json
import math
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
from vllm.engine.arg_utils import EngineArgs

from benchmarks.serving import soak
from benchmarks.serving.generators import GENERATORS
from tests.support.browser import tab
from tests.support.engine import (
    ROUNDING,
    Request,
    alone,
    assert_same,
    checkpoint,
    engine,
    shortened,
)
from tests.support.monitoring import board, expressions, names_in, rules
from tests.support.server import BUDGET, KEY, MODEL, PROMPT, ask, serving, tokens_of, until
from vllm_kvretrieval.command import main
from vllm_kvretrieval.doctor.server import PREFIX, Client, samples
from vllm_kvretrieval.engine.metrics import FREE, metric_name

pytestmark = [pytest.mark.engine, pytest.mark.model]


OPTIONS = (
    "--enforce-eager",
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--reasoning-parser", "granite"),
    *("--structured-outputs-config.enable_in_reasoning", "true"),
    *("--kv-retrieval.sources", "true"),
)
"""They read the text of answers. Granite's goes by words, so it is for any tokenizer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log.txt"
    settings = {"VLLM_PLUGINS": "kvretrieval"}
    with serving(log, *OPTIONS, forked=True, environment=settings) as server:
        yield server


@pytest.mark.parametrize("generator", ["vllm", pytest.param("guidellm", marks=pytest.mark.slow)])
def test_load(server, generator):
    """What the benchmark of loaded servers measures, by each of its load generators.

    guidellm's time per token with the first one is longer than without: a prompt has been read.
    """
    measure = GENERATORS[generator]
    model = Path(checkpoint(MODEL))
    prompts = [f"{number}. {PROMPT}" for number in range(3)]
    figures = measure(server.url, model, prompts, at_once=2, tokens=5)
    for name in ("first_token_ms", "token_ms", "answer_ms"):
        assert 0 < figures[name]["50"] <= figures[name]["99"]
    assert (
        figures["answer_ms"]["50"] > figures["first_token_ms"]["50"] + 3 * figures["token_ms"]["50"]
    )
    assert figures["tokens_per_s"] > 0
    with_first = figures.get("token_ms_with_first", {"50": math.inf})
    assert with_first["50"] > figures["token_ms"]["50"]
    with pytest.raises(ValueError, match="answered 1 of 2 requests"):
        measure(server.url, model, [prompts[0], 9 * PROMPT], at_once=1, tokens=1)


def test_soak(server):
    """Visits of all kinds, and what is found wrong with an answer; afterwards nothing runs.

    At the end a question has the answer to another one, and one is too long.
    """
    visitor = soak.Visitor(server.url, MODEL, tokens=8, context=4096)
    prompts = [tokens_of(server, f"{number}. {PROMPT}") for number in range(2)]
    answers = [visitor.ask(prompt)[0] for prompt in prompts]
    known = [soak.Question(*each) for each in zip(prompts, answers, strict=True)]
    chance = random.Random(1)
    for kind in soak.KINDS:
        for _ in range(3):
            visitor.visit(kind, chance, known, prompts[0][chance.randrange(900) :])
    for change in visitor.wrong_requests():
        visitor.refused(change)
    with soak.Clients(visitor, known, lambda _: prompts[1], count=2, seed=1):
        until(lambda: visitor.visits.total() > 20, server.log)
    visitor.await_idle()
    assert not visitor.wrong
    found = soak.memory(server.process.pid)
    assert found["own"] > 100
    assert found["threads"] > 3
    visitor.visit("known", chance, [soak.Question(prompts[0], [17] * 8)], ())
    visitor.visit("new", chance, (), [1] * 5000)
    assert [text.partition(":")[0] for text in visitor.wrong] == ["known", "new"]
    with pytest.raises(ValueError, match="has got status 200"):
        visitor.refused({"temperature": 0.5})


def test_growth():
    """Of own memory, when caches have filled."""
    samples = [{"own": float(own)} for own in (0, 50, 100, 100, 100, 101, 101, 103)]
    assert soak.growth(samples) == 2
    assert soak.growth(samples[:1]) == 0


@pytest.mark.parametrize(
    "forked",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["forked", "as a user starts it"],
)
def test_a_compiled_model(tmp_path, forked):
    """It answers as an eager one, also when the next start loads it.

    Compiled operations round to 16 bits less often, so this is in 32. For all layers of a model,
    the compiler takes four minutes.
    """
    model = shortened(tmp_path / "model", MODEL, 2)
    retrieval = {"kv_retrieval": {"budget": BUDGET}}
    options = {"attention_backend": "freekv", "additional_config": retrieval}
    exactly = {"dtype": "float32", "enforce_eager": True, "max_model_len": 4096}
    with engine(model, **exactly, **options) as llm:
        request = Request(llm.get_tokenizer().encode(PROMPT), 24, {})
        expected = alone(llm, request)
    for start in ("first", "next"):
        log, in_32_bits = tmp_path / f"{start}.txt", ("--dtype", "float32")
        with serving(log, *in_32_bits, model=model, forked=forked) as server:
            assert "DYNAMO_TRACE_ONCE" in server.text()
            assert ("load AOT compilation" in server.text()) == (start == "next")
            assert f"freekv: decode attends to at most {BUDGET} tokens per KV head" in server.text()
            reply = ask(server.url, request.prompt, request.tokens)
            assert server.usage(reply.id)["sparse_steps"] == request.tokens - 1
        assert_same(reply.answer, expected, ROUNDING)


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
    little = server.complete(PROMPT, kv_retrieval_budget=128, kv_retrieval_correction_threshold=1)
    noted = server.usage(little.id)
    assert noted["pages_attended"] == 128 / 32
    assert noted["corrected_share"] == 1
    blind = server.complete(PROMPT, kv_retrieval_method="streamingllm")
    assert KEY not in blind.choices[0].text
    assert server.usage(blind.id)["corrected_share"] == 0


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"kv_retrieval_budget": 1024}, "kv_retrieval.budget=1024 exceeds the server's limit"),
        ({"kv_retrieval_budget": 100}, "kv_retrieval.budget=100 must be a positive multiple"),
        ({"kv_retrieval_budget": "much"}, "kv_retrieval.budget='much' must be a whole number"),
        ({"kv_retrieval_bugdet": 256}, "kv_retrieval of a request has no option 'bugdet'"),
        ({"kv_retrieval_method": "quest"}, "kv_retrieval.method='quest' cannot be served"),
        ({"kv_retrieval_method": ["freekv"]}, "kv_retrieval.method=['freekv'] cannot be served"),
    ],
    ids=str,
)
def test_a_bad_option_gets_a_400(server, xargs, message):
    with pytest.raises(openai.BadRequestError) as error:
        server.complete("Hello", **xargs)
    assert message in error.value.message


CHAT = [{"role": "user", "content": "Hello"}]
BODIES = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
}
"""What the routes of vLLM's server that generate text take."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
def test_a_bad_option_is_refused_before_the_answer_begins(server, path, stream):
    """With the right one it is served; the log has one line, that of the request."""
    before = len(server.text())
    body = {"model": MODEL, "stream": stream, **BODIES[path]}
    for budget, status in ((100, 400), (128, 200)):
        xargs = {"vllm_xargs": {"kv_retrieval_budget": budget}}
        told, text = Client(server.url).ask(path, body | xargs)
        assert told == status, text
        assert ("kv_retrieval.budget=100 must be" in text) == (status == 400)
    said = server.text()[before:]
    assert said.count(f'"POST {path} HTTP/1.1" 400') == said.count(" 400 ") == 1
    assert "ERROR" not in said


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


def metrics(server):
    """What Prometheus gets from the server: values by name and labels."""
    return samples(Client(server.url).ask("/metrics")[1])


def sums(server):
    """The counters of retrieval, once the worker knows that earlier requests are done."""
    server.nudge()
    found = metrics(server)
    ours = [name for name in found if name.startswith(PREFIX) and name.endswith("_total")]
    return {name[len(PREFIX) : -len("_total")]: sum(found[name].values()) for name in ours}


def test_metrics_without_a_connector(server):
    """What was counted for a request is what its line in the log says."""
    before = sums(server)
    noted = server.usage(server.complete(PROMPT, 12).id)
    change = {name: value - before[name] for name, value in sums(server).items()}
    heads = 3 * 29  # of layers that retrieve
    assert change["heads_decoded"] == heads * noted["sparse_steps"] == heads * 11
    assert change["units_attended"] == heads * 11 * BUDGET / 32
    assert change["tokens_read"] == heads * 11 * BUDGET
    share = change["units_attended"] / change["units_in_context"]
    assert share == pytest.approx(noted["kv_read_share"], abs=1e-4)
    corrected = change["heads_corrected"] / change["heads_decoded"]
    assert corrected == pytest.approx(noted["corrected_share"], abs=1e-4)
    assert 0 < change["planning_seconds"] < 10
    assert change["bytes_recalled"] == change["units_missed"] == 0


def test_board_and_rules_ask_for_what_the_server_has(server):
    found = metrics(server)
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for part in (board(), rules()):
        asked = {name for text in expressions(part) for name in names_in(text)}
        assert asked - recorded - {metric_name(FREE)} <= found.keys()
    (tokens,) = found["vllm:generation_tokens_total"]
    assert {name for name, _ in tokens} >= {"model_name", "engine"}, "by which the rules group"
    ((labels, value),) = found[f"{PREFIX}info"].items()
    assert value == 1
    used = {"method": "freekv", "budget": str(BUDGET), "max_budget": str(BUDGET)}
    assert dict(labels).items() >= used.items()
    assert "None" not in dict(labels).values(), "what nobody has named, is in use, too"


def test_the_doctor_reads_the_options(server, capsys):
    """And shares of what was counted, which nobody has to divide."""
    noted = server.usage(server.complete(PROMPT, 12).id)
    assert noted["sparse_steps"]
    assert main(["doctor", server.url]) == 0
    said = capsys.readouterr().out
    assert f"engine 0: allow_exact=True, also=streamingllm, attention=vllm, budget={BUDGET}" in said
    assert f"max_budget={BUDGET}" in said
    assert "None" not in said
    assert re.search(r"decode steps read \d+% of the KV cache", said)
    assert re.search(r"\d+% of KV heads selected anew", said)
    assert "e+0" not in said


def test_the_doctor_compares_replicas(server, capsys):
    """Here the same server twice, and one that does not answer."""
    assert main(["doctor", server.url, server.url + "/v1"]) == 0
    assert (
        "2 servers have the same model, options, block size and versions" in capsys.readouterr().out
    )
    assert main(["doctor", "--json", server.url, "http://127.0.0.1:9"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {one["server"] for one in found if one["severity"] == "error"} == {"http://127.0.0.1:9"}


SCHEMA = {
    "type": "object",
    "properties": {"key": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["key"],
    "additionalProperties": False,
}
LITTLE = {"kv_retrieval_budget": 128}
"""Options of a request, in pages of 32: four of each context."""


def asked(server, tokens, **options):
    """The answer in a chat about the pass key."""
    extra = {"vllm_xargs": LITTLE} | options.pop("extra_body", {})
    reply = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=tokens,
        temperature=0,
        extra_body=extra,
        **options,
    )
    return reply.choices[0].message


def structured(server):
    """Structured output."""
    form = {"type": "json_schema", "json_schema": {"name": "key", "schema": SCHEMA}}
    message = asked(server, 30, response_format=form)
    assert re.fullmatch(r"[0-9]{5}", json.loads(message.content)["key"])


TOOL = {
    "type": "function",
    "function": {
        "name": "unlock",
        "description": "Open the door.",
        "parameters": SCHEMA,
        "strict": True,
    },
}


def called(message):
    """The key with which a message calls the tool."""
    (call,) = message.tool_calls
    assert call.function.name == "unlock"
    return json.loads(call.function.arguments)["key"]


def named_tools(server):
    """A tool that has to be called."""
    choice = {"type": "function", "function": {"name": "unlock"}}
    message = asked(server, 60, tools=[TOOL], tool_choice=choice)
    assert re.fullmatch(r"[0-9]{5}", called(message))


def parsed_tools(server):
    """A tool that the text of the answer calls."""
    call = r'<tool_call>\{"name": "unlock", "arguments": \{"key": "[0-9]{5}"\}\}</tool_call>'
    forced = {"structured_outputs": {"regex": call}}
    message = asked(server, 60, tools=[TOOL], tool_choice="auto", extra_body=forced)
    assert re.fullmatch(r"[0-9]{5}", called(message))
    assert not message.content


def reasoning(server):
    """Reasoning apart from the answer."""
    text = r"Here is my thought process: [a-z]{4,9}\. Here is my response: [0-9]{5}"
    message = asked(server, 40, extra_body={"structured_outputs": {"regex": text}})
    assert re.fullmatch(r"[a-z]{4,9}\.", message.reasoning.strip())
    assert re.fullmatch(r"[0-9]{5}", message.content.strip())


def responses(server):
    """OpenAI's Responses API."""
    reply = server.client.responses.create(
        model=MODEL,
        input=PROMPT,
        max_output_tokens=12,
        temperature=0,
        extra_body={"vllm_xargs": LITTLE},
    )
    assert reply.output_text


def messages(server):
    """Anthropic's Messages API."""
    body = {
        "model": MODEL,
        "max_tokens": 12,
        "messages": [{"role": "user", "content": PROMPT}],
        "vllm_xargs": LITTLE,
    }
    status, text = Client(server.url).ask("/v1/messages", body)
    assert status == 200
    assert json.loads(text)["content"][0]["text"]


@pytest.mark.parametrize(
    "feature", [structured, named_tools, parsed_tools, reasoning, responses, messages]
)
def test_features_of_vllm(server, feature):
    """Long contexts are retrieved from, with the options of the request."""
    before = sums(server)
    feature(server)
    change = {name: value - before[name] for name, value in sums(server).items()}
    assert change["heads_decoded"] >= 3 * 29 * 5
    assert change["units_attended"] == change["heads_decoded"] * 128 / 32


def test_chat_over_a_document(server, tmp_path, capsys):
    """``vllm-kvretrieval chat``: the second question finds the document in the prefix cache.

    It names the passage that the answer is from, by selected pages and by full attention.
    """
    path = tmp_path / "text.txt"
    path.write_text(PROMPT.partition("\nWhat is")[0])
    hits = "vllm:prefix_cache_hits_total"
    before = sum(metrics(server)[hits].values())
    asked = ["What is the pass key?", "/sources", "/full What is the pass key?", "/sources"]
    lines = [part for line in asked for part in ("--question", line)]
    options = ("--url", server.url, "--budget", str(BUDGET), "--max-tokens", "24")
    assert main(["chat", str(path), *options, *lines]) == 0
    told = capsys.readouterr()
    assert told.err.count("[first token after ") == 2, told.err
    answers = re.split(r"^text.txt, ", told.out, flags=re.MULTILINE)
    assert KEY in answers[0]
    shares = [line for line in told.out.splitlines() if line.startswith("text.txt, ")]
    assert all(re.match(r"text.txt, \d+% of the text, [\d.]+%: ", line) for line in shares)
    assert sum(f"{KEY} is the pass" in line or f"key is {KEY}" in line for line in shares) >= 2
    assert sum(metrics(server)[hits].values()) - before > 3 * BUDGET


def test_what_answers_attended_to_is_told_to_those_who_asked(server):
    """By the name of the answer, which nobody guesses; others find nothing."""
    asked = {"kv_retrieval_budget": BUDGET}
    noted = server.complete(PROMPT, 4, kv_retrieval_sources=True, **asked)
    silent = server.complete(PROMPT, 4, **asked)
    client = Client(server.url)
    status, text = client.ask(f"/v1/kv_retrieval/sources/{noted.id}-0")
    told = json.loads(text)
    assert (status, told["steps"]) == (200, 3)
    assert len(told["groups"]) == 4
    assert told["groups"][-1][1] == 29
    shares = np.array(told["peaks"])
    assert shares.shape == (4, -(-told["tokens"] // told["page_size"]))
    assert (shares >= np.array(told["weights"])).all()
    assert 0 < shares.max() <= 1
    for other in (f"{silent.id}-0", "cmpl", "x" * 100):
        assert client.ask(f"/v1/kv_retrieval/sources/{other}")[0] == 404


def test_page_of_a_request(server, tmp_path, capsys):
    """``vllm-kvretrieval explain --url``: an answer's passages in one file."""
    path, page = tmp_path / "text.txt", tmp_path / "page.html"
    path.write_text(PROMPT)
    model = json.loads(Client(server.url).ask("/v1/models")[1])["data"][0]["id"]
    options = ("--url", server.url, "--answer-tokens", "12", "--html", str(page))
    assert main(["explain", model, str(path), *options]) == 0
    assert KEY in capsys.readouterr().out
    (text,) = re.findall(r'id="data">(.*?)</script>', page.read_text())
    shown = json.loads(text)
    assert KEY in shown["facts"]
    assert "".join(shown["texts"]).endswith(PROMPT[-40:])
    assert len(shown["rows"]) == 4
    best = max(
        (weight, number)
        for row in shown["rows"][1:]
        for number, weight in enumerate(row["steps"][0]["weights"])
        if KEY in shown["texts"][number]
    )
    assert best[0] > 2 / len(shown["texts"]), "the passage with the key is attended to"


HOSTILE = '<script>bad = 1</script><img src="x" onerror="bad = 1">\n'


def test_page_in_a_browser(server, tmp_path):
    """It reads a document, answers twice, and marks the passage that the answer is from.

    What a document holds, and is called, stays text.
    """
    text = HOSTILE + PROMPT.partition("\nWhat is")[0]
    with tab(tmp_path / "profile") as page:
        page.open(f"{server.url}/kvretrieval")
        page.wait("typeof at == 'function' && !at('main').hidden")
        page.run(
            f"""(() => {{
                const files = new DataTransfer();
                files.items.add(new File([{json.dumps(text)}], {json.dumps(HOSTILE + ".txt")}));
                at("file").files = files.files;
                at("file").dispatchEvent(new Event("change"));
            }})()"""
        )
        page.wait("state.document?.tokens && !at('send').disabled")
        assert re.fullmatch(r"([\d,]+) of \1 tokens read.*", page.run("at('far').textContent"))
        page.picture(tmp_path / "read.png")
        page.run(
            f"""(() => {{
                at("budget").value = {BUDGET};
                at("beside").checked = true;
                at("question").value = "What is the pass key?";
                at("ask").requestSubmit();
            }})()"""
        )
        page.wait("state.turns.length || at('error').textContent")
        assert page.run("at('error').textContent") == ""
        answers = page.run("[...document.querySelectorAll('.answer')].map((a) => a.innerText)")
        assert [answer.partition(":")[0] for answer in answers] == [
            f"budget {BUDGET}",
            "full attention",
        ]
        assert all(KEY in answer for answer in answers)
        marked = "[...document.querySelectorAll('mark')].map((mark) => mark.textContent)"
        assert any(KEY in passage for passage in page.run(marked))
        assert page.run("at('group').options.length") == 5
        page.run("at('group').value = '4'; at('group').onchange()")
        assert page.run(marked)
        assert page.run("at('text').textContent") == text
        page.picture(tmp_path / "answered.png")
        assert page.run("typeof bad") == "undefined"
        assert page.run("document.images.length + document.scripts.length") == 1
        elsewhere = [url for url in page.requested if not url.startswith(server.url)]
        assert (page.complaints, elsewhere) == ([], [])


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
