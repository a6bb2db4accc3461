"""The HTTP endpoints of a store, without a server: what they answer, and whom."""

import asyncio
import errno
from argparse import Namespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.support.store_model import new_store
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.disk.contexts import NO_PARENT
from vllm_kvretrieval.store.disk.files import Folder
from vllm_kvretrieval.store.disk.names import read_pins, write_names
from vllm_kvretrieval.store.disk.records import Record
from vllm_kvretrieval.store.endpoints import KEY_HEADER, KEY_VARIABLE, STATE, StoreEndpoints

IDENTITY = {"model": "m", "dtype": "x", "codec": "raw", "vllm": "0", "block_size": 128}
KEY = b"document".ljust(32)


@pytest.fixture
def store(tmp_path):
    """A store with a document that is called emma."""
    store = new_store(tmp_path / "store", identity=IDENTITY)
    store.commit(1, Record(KEY, NO_PARENT, 0, 0, 1000))
    write_names(store.folder, {"emma": KEY})
    yield store
    store.close()


def client_of(store):
    """What the endpoints of a server with this store answer."""
    app, endpoints = FastAPI(), StoreEndpoints()
    endpoints.attach_router(app)
    asyncio.run(endpoints.init_state(None, app.state, Namespace()))
    setattr(app.state, STATE, str(store.folder.path.parent))
    return TestClient(app)


def post(client, action, context):
    return client.post(f"/v1/kv_store/{action}", json={"context": context})


def test_changes(store):
    """What has been done where; to drop a context again changes nothing, and is no error."""
    client = client_of(store)
    other = Record(b"e" * 32, NO_PARENT, 0, 0, 1000)
    store.commit(2, other)
    where = {"store": store.folder.path.name, "asked": False, "remark": ""}
    for action in ("pin", "unpin", "drop"):
        answer = post(client, action, "emma")
        assert answer.status_code == 200
        assert answer.json()["stores"] == [where]
        assert read_pins(store.folder) == ({KEY} if action == "pin" else set())
    again = post(client, "drop", "emma")
    assert (again.status_code, again.json()["stores"]) == (200, [])
    assert [record.key for record in store.records().values()] == [other.key]
    for action, context in (("pin", "emma"), ("drop", "e"), ("drop", "none"), ("drop", "65")):
        assert post(client, action, context).status_code == 404
    assert len(store.records()) == 1


def test_a_change_that_fails(store, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Folder, "replace", fail)
    answer = post(client_of(store), "pin", "emma")
    assert answer.status_code == 500
    assert f"{store.folder.path.name}: pin has failed (" in answer.json()["detail"]


def test_a_key_of_their_own(store, monkeypatch):
    """Without it nobody learns anything, or changes anything."""
    monkeypatch.setenv(KEY_VARIABLE, "a secrét\n")
    client = client_of(store)
    for headers in ({}, {KEY_HEADER: ""}, {KEY_HEADER: "a secret"}, {"Authorization": "a secrét"}):
        raw = {name: value.encode() for name, value in headers.items()}
        for answer in (
            client.get("/v1/kv_store", headers=raw),
            client.post("/v1/kv_store/drop", json={"context": "emma"}, headers=raw),
            client.post("/v1/kv_store/drop", json={"context": ""}, headers=raw),
        ):
            assert answer.status_code == 403
            assert store.folder.path.name not in answer.text
    assert len(store.records()) == 1
    right = {KEY_HEADER: "a secrét".encode()}
    assert client.get("/v1/kv_store", headers=right).json()["stores"][0]["count"] == 1
    drop = client.post("/v1/kv_store/drop", json={"context": "emma"}, headers=right)
    assert drop.status_code == 200
    assert not store.records()


@pytest.mark.parametrize("key", ["", " \n"])
def test_a_key_that_is_none(store, monkeypatch, key):
    """As of a secret that has not been set: the server does not start."""
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(RetrievalConfigError, match="is empty"):
        client_of(store)
