"""The endpoints of the page for browsers, without an engine: what they answer, and whom."""

import asyncio
import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.engine.arg_utils import EngineArgs

from tests.support.engine import checkpoint
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.page import endpoints, library
from vllm_kvretrieval.page.endpoints import Endpoints
from vllm_kvretrieval.store.disk.files import Folder

pytestmark = pytest.mark.model

ROOT = "/v1/kv_retrieval"
TEXT = {"name": "<b>a</b>", "text": "The robot.\nWas built.", "pages": [0, 11]}
TOLD = {"page_size": 16, "tokens": 40, "steps": 3, "groups": [[1, 2]], "weights": [[0.5, 0, 0.25]]}
TOLD["peaks"] = [[0.75, 0, 0.25]]


@pytest.fixture(scope="module")
def vllm_config():
    options = {"sources": True, "budget": 512}
    return EngineArgs(
        checkpoint("SmolLM2-135M-Instruct"),
        max_model_len=4096,
        attention_backend="kvretrieval",
        additional_config={"kv_retrieval": options},
    ).create_engine_config()


@pytest.fixture
def client_of(vllm_config, monkeypatch):
    """What the endpoints of a server with these options and workers answer."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    def make(told=(), allowed_origins=(), api_key=None, **options):
        own = {**vllm_config.additional_config["kv_retrieval"], **options}
        monkeypatch.setitem(vllm_config.additional_config, "kv_retrieval", own)

        async def call(method, args):
            assert method == "retrieval_sources"
            return [worker if args == ("chatcmpl-1",) else None for worker in told]

        engine = SimpleNamespace(vllm_config=vllm_config, collective_rpc=call)
        app, plugin = FastAPI(), Endpoints()
        plugin.attach_router(app)
        args = Namespace(allowed_origins=allowed_origins, api_key=api_key)
        asyncio.run(plugin.init_state(engine, app.state, args))
        return TestClient(app)

    return make


def test_files_of_the_page(client_of):
    """They load nothing from elsewhere, and run nothing that is not theirs."""
    client = client_of()
    for path, kind in (
        ("", "text/html"),
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/page.css", "text/css"),
    ):
        answer = client.get(f"/kvretrieval{path}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        for dangerous in (
            "http:",
            "https:",
            "innerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
        ):
            assert dangerous not in answer.text


@pytest.mark.parametrize(
    "path", ["/library.py", "/../library.py", "/%2e%2e/endpoints.py", "/x", "x"]
)
def test_no_other_files(client_of, path):
    assert client_of().get(f"/kvretrieval{path}").status_code == 404


def test_only_if_asked_for(client_of):
    client = client_of(sources=False)
    for path in ("/kvretrieval", f"{ROOT}/options", f"{ROOT}/documents", f"{ROOT}/sources/a"):
        assert client.get(path).status_code == 404
    assert client.post(f"{ROOT}/documents", json=TEXT).status_code == 404


def test_options(client_of):
    told = client_of(max_budget=1024, page_size=16).get(f"{ROOT}/options").json()
    sizes = {"budget": 512, "most": 1024, "page_size": 16}
    assert told == {**sizes, "may": ["budget", "sources"], "exact": True, "stored": False}
    told = client_of(client_options=["budget"]).get(f"{ROOT}/options").json()
    assert (told["may"], told["exact"]) == (["budget"], False)


def test_documents_come_and_go(client_of):
    client = client_of()
    assert client.get(f"{ROOT}/documents").json() == []
    id = client.post(f"{ROOT}/documents", json=TEXT).json()["id"]
    assert client.post(f"{ROOT}/documents", json=TEXT).json()["id"] == id, "it is there"
    (listed,) = client.get(f"{ROOT}/documents").json()
    assert listed == {"id": id, "name": TEXT["name"], "characters": 21, "pages": 2}
    assert client.get(f"{ROOT}/documents/{id}").json() == TEXT
    assert client.delete(f"{ROOT}/documents/{id}").json() == {"removed": True}
    assert client.delete(f"{ROOT}/documents/{id}").json() == {"removed": False}
    assert client.get(f"{ROOT}/documents/{id}").status_code == 404


def test_documents_beside_a_store(client_of, tmp_path):
    """They outlive the server; only the user may read them. Damaged files are left out."""
    where = tmp_path / "store"
    options = {"home": "disk", "store": str(where)}
    id = client_of(**options).post(f"{ROOT}/documents", json=TEXT).json()["id"]
    file = where / library.FOLDER / f"{id}.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    (file.parent / f"{'0' * 32}.json").write_bytes(file.read_bytes())
    (file.parent / "other.json").write_text("{")
    client = client_of(**options)
    assert [listed["id"] for listed in client.get(f"{ROOT}/documents").json()] == [id]
    client.delete(f"{ROOT}/documents/{id}")
    assert not file.exists()
    file.parent.chmod(0o777)
    with pytest.raises(RetrievalConfigError):
        library.Library(str(where))


def test_the_oldest_document_makes_room(client_of, monkeypatch):
    monkeypatch.setattr(library, "MOST_DOCUMENTS", 2)
    client = client_of()
    for name in "abc":
        client.post(f"{ROOT}/documents", json={**TEXT, "name": name})
    assert [listed["name"] for listed in client.get(f"{ROOT}/documents").json()] == ["b", "c"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"name": "a"}',
        b'{"name": "", "text": "a"}',
        b'{"name": "a", "text": ""}',
        b'{"name": "a", "text": "\\ud800"}',
        b'{"name": "a", "text": "a", "pages": ["b"]}',
        json.dumps({"name": "a" * 201, "text": "a"}).encode(),
        b"[" * 100_000,
    ],
)
def test_what_is_no_document(client_of, body):
    answer = client_of().post(f"{ROOT}/documents", content=body)
    assert answer.status_code == 400
    assert "This is no document" in answer.json()["detail"]
    assert len(answer.text) < 600


def test_documents_have_a_size(client_of, monkeypatch):
    monkeypatch.setattr(endpoints, "MOST_BYTES", 100)
    large = json.dumps({**TEXT, "text": "a" * 100}).encode()
    pieces = (large[i : i + 10] for i in range(0, len(large), 10))  # of no length that is said
    assert client_of().post(f"{ROOT}/documents", content=pieces).status_code == 413


def test_a_client_that_goes_away(client_of):
    """In the middle of a document; any client could fill the server's log with tracebacks."""
    told = []
    messages = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )

    async def receive():
        return next(messages)

    async def send(message):
        told.append(message)

    scope = {
        **{"type": "http", "method": "POST", "path": f"{ROOT}/documents", "query_string": b""},
        "headers": [],
    }
    asyncio.run(client_of().app(scope, receive, send))
    assert told[0]["status"] == 400


def test_a_document_that_cannot_be_kept(client_of, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    client = client_of(home="disk", store=str(tmp_path / "store"))
    monkeypatch.setattr(Folder, "replace", full)
    answer = client.post(f"{ROOT}/documents", json=TEXT)
    assert (answer.status_code, "No space left on device" in answer.text) == (500, True)
    assert client.get(f"{ROOT}/documents").json() == []


@pytest.mark.parametrize("id", ["a", "..%2f..%2fetc%2fpasswd", "A" * 32, "0" * 33])
def test_ids_are_no_paths(client_of, id):
    client = client_of()
    assert client.get(f"{ROOT}/documents/{id}").status_code in (404, 422)
    assert client.delete(f"{ROOT}/documents/{id}").status_code in (404, 422)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://testserver"}, 200),
        ({"Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://testserver:81"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_pages_of_others_may_not_ask(client_of, headers, status):
    """Where there is no API key, any page that the user opens could ask this machine."""
    client = client_of()
    assert client.get(f"{ROOT}/documents", headers=headers).status_code == status
    assert client.post(f"{ROOT}/documents", json=TEXT, headers=headers).status_code == status
    told = client.get("/v1/kv_store", headers=headers)
    assert told.status_code == (403 if status == 403 else 404), "this server has no store"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("localhost:8000", 200),
        ("server", 200),
        ("server.local", 200),
        ("good.example", 200),
        ("evil.example:8000", 403),
        ("good.example:81", 403),
        ("127.0.0.1.evil.example", 403),
        ("[evil.example", 403),
    ],
)
@pytest.mark.parametrize("header", ["Accept-Language", "Sec-Fetch-Site"])
def test_a_name_that_its_owner_lets_lead_here(client_of, host, status, header):
    """His page counts as the server's own; it has no API key, and is no program of the user's."""
    allowed = ["*", "https://good.example"]
    headers = {"Host": host, header: "same-origin"}
    ask = client_of(allowed_origins=allowed).get
    assert ask(f"{ROOT}/documents", headers=headers).status_code == status
    assert ask(f"{ROOT}/documents", headers={"Host": host}).status_code == 200
    assert client_of(api_key=["k"]).get(f"{ROOT}/documents", headers=headers).status_code == 200


def test_sources(client_of):
    """Workers with other heads have the larger share; workers with other layers add groups."""
    other = {**TOLD, "weights": [[0.25, 0.125, 0.25]]}
    below = {**TOLD, "groups": [[3, 4]], "weights": [[1.0, 0, 0]]}
    shares = {"weights": [[0.5, 0.125, 0.25], [1.0, 0, 0]], "peaks": [[0.75, 0, 0.25]] * 2}
    client = client_of([TOLD, other, None, below])
    told = client.get(f"{ROOT}/sources/chatcmpl-1").json()
    assert told["groups"] == [[1, 2], [3, 4]]
    assert {field: told[field] for field in shares} == shares
    assert client.get(f"{ROOT}/sources/chatcmpl-2").status_code == 404
    assert client.get(f"{ROOT}/sources/{'a' * 129}").status_code == 422
