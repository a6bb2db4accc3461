"""Options of sessions, of requests and as vLLM's KV hints: what is read, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.of_hints import ACTIONS, with_hints
from vllm_kvretrieval.options.of_sessions import NAME, SessionHints, stored_name
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.store.disk.names import NAME as STORED
from vllm_kvretrieval.store.disk.names import check_name, sessions

STORE = {"home": "disk", "store": "/tmp/store", "sessions": True}
SERVER = RetrievalConfig.from_options("kvretrieval", STORE)


def hints(extra_args: dict[str, Any] | None, config: RetrievalConfig = SERVER) -> SessionHints:
    return RequestOptions.parse(extra_args, config).hints


def envelope(*actions: tuple[Any, ...]) -> Any:
    """As vLLM's ``KvHintsEnvelope``, which 0.32 has not; ``test_next`` compares them."""
    made = [
        SimpleNamespace(action_id="1", action_type=name, action_version=version, payload=payload)
        for name, payload, version in ((*action, "1")[:3] for action in actions)
    ]
    return SimpleNamespace(protocol_version="0.1", message_id="1", actions=made)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, SessionHints()),
        ({"session": "a"}, SessionHints("a")),
        ({"session": "chat-17.b_C", "pin": 1}, SessionHints("chat-17.b_C", True)),
        ({"session": "a", "pin": False, "retain": 0}, SessionHints("a", False, 0.0)),
        ({"retain": 0.5, "prefetch": "b"}, SessionHints(retain=0.5, prefetch="b")),
    ],
)
def test_what_a_request_asks_for(given, meant):
    assert hints({"kv_retrieval": given}) == meant
    assert hints({f"kv_retrieval_{key}": value for key, value in given.items()}) == meant


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "a b", ".a", "-a", "a\n", "a\0", "ä", "x" * 65]
)
def test_names_that_are_refused(name):
    for key in ("session", "prefetch"):
        with pytest.raises(RetrievalConfigError, match=f"{key}=.* cannot be a session's name"):
            hints({f"kv_retrieval_{key}": name})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"session": 3}, "session=3 cannot be a session's name"),
        ({"session": ["a"]}, "cannot be a session's name"),
        ({"pin": True}, r"kv_retrieval\.pin=True needs the name of a session"),
        ({"session": "a", "pin": "yes"}, "pin='yes' must be true or false"),
        *(
            ({"retain": value}, "retain=.* must be a number of seconds from 0 to 86400")
            for value in (-1, 86401, float("nan"), float("inf"), True, "60", None, [1], 10**30)
        ),
        ({"retain": 10**5000}, "number of more than"),
        ({"prefetch": None}, "prefetch=None cannot be a session's name"),
        ({"retains": 5}, "has no option 'retains'.*Did you mean 'retain'"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(RetrievalConfigError, match=message):
        hints({"kv_retrieval": given})


def test_a_server_has_to_allow_it():
    """By default it does not; without a store only ``retain`` is served."""
    plain = RetrievalConfig.from_options("kvretrieval", {})
    memory = RetrievalConfig.from_options("kvretrieval", {"sessions": True})
    assert hints({"kv_retrieval_session": "a"}, plain) == SessionHints("a")
    assert hints({"kv_retrieval_retain": 5}, memory).retain == 5
    asked: list[tuple[dict[str, Any], str]] = [
        ({"session": "a", "pin": True}, "pin=True"),
        ({"retain": 5}, "retain=5.0"),
        ({"prefetch": "a"}, "prefetch='a'"),
    ]
    for given, shown in asked:
        with pytest.raises(RetrievalConfigError, match=f"{shown} is not served here; .*sessions t"):
            hints({"kv_retrieval": given}, plain)
        if "retain" not in given:
            with pytest.raises(RetrievalConfigError, match=f"{shown} needs a store; .*store DIR"):
                hints({"kv_retrieval": given}, memory)
    few = RetrievalConfig.from_options("kvretrieval", {**STORE, "client_options": ["budget"]})
    with pytest.raises(RetrievalConfigError, match="retain cannot be set by a request"):
        hints({"kv_retrieval_retain": 5}, few)


def test_names_in_a_store():
    """Tenants have sessions of their own, whatever they call them; users can name all of them."""
    names = [stored_name(name, salt) for name in ("a", "x" * 64) for salt in (None, "s", "t")]
    assert len(set(names)) == len(names)
    assert stored_name("a", "") == stored_name("a", None) == "session.a"
    assert all(STORED.fullmatch(name) for name in names)
    for name in names:
        check_name(name)
    own = stored_name("a", "s").partition(".")[0]
    assert not NAME.fullmatch(f"/{own}")
    assert stored_name(f"{own}.a", None) != stored_name("a", "s")
    known = {"emma": b"1", names[0]: b"2", "session": b"3", names[1]: b"4", "session-x.y": b"5"}
    assert sessions(known) == [names[1], names[0]]


@pytest.mark.parametrize(
    ("actions", "meant"),
    [
        ([], SessionHints()),
        ([("kvretrieval.pin", {"session": "a"})], SessionHints("a", True)),
        ([("kvretrieval.unpin", {"session": "a"})], SessionHints("a", False)),
        (
            [
                ("kvretrieval.pin", {"session": "a"}),
                ("kvretrieval.retain", {"seconds": 9.0}),
                ("kvretrieval.prefetch", {"session": "b"}),
                ("router.placed", {"session": 3}, "7"),
            ],
            SessionHints("a", True, 9.0, "b"),
        ),
    ],
    ids=["none", "pin", "unpin", "all"],
)
def test_vllms_hints(actions, meant):
    """Actions of others are left to them."""
    assert hints(dict(with_hints({"other": 1}, envelope(*actions)) or {})) == meant


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([("kvretrieval.erase", {})], "there is no action 'kvretrieval.erase'; use one of kvretr"),
        ([("KV-Retrieval.pin", {"session": "a"})], "no action 'KV-Retrieval.pin'"),
        ([(["kvretrieval.pin"], {})], r"no action \['kvretrieval.pin'\]"),
        ([("kvretrieval.pin", {"session": "a"}, "2")], "has version '2', and here it is '1'"),
        ([("kvretrieval.pin", {})], "payload of kvretrieval.pin is {}; it must have session"),
        ([("kvretrieval.pin", {"session": "a", "x": 1})], "must have session and nothing else"),
        ([("kvretrieval.pin", None)], "payload of kvretrieval.pin is None"),
        ([("kvretrieval.retain", {"seconds": 10**5000})], "number of more than"),
        ([("kvretrieval.retain", {"seconds": -1})], r"retain=-1 must be a number of seconds"),
        ([("kvretrieval.prefetch", {"session": "../x"})], "cannot be a session's name"),
        ([("kvretrieval.pin", {"session": n}) for n in "ab"], "session is 'a' and 'b'; send one"),
        (
            [(f"kvretrieval.{name}", {"session": "a"}) for name in ("pin", "unpin")],
            "pin is True and False; send one",
        ),
    ],
)
def test_vllms_hints_that_are_refused(actions, message):
    with pytest.raises(RetrievalConfigError, match=message):
        hints(dict(with_hints(None, envelope(*actions)) or {}))


@pytest.mark.parametrize("given", [{"kv_retrieval": {"retain": 5}}, {"kv_retrieval_retain": 5}])
def test_an_option_that_is_given_twice(given):
    """Even with the same value; ``kv_retrieval`` itself may be anything, which is refused later."""
    action = ("kvretrieval.retain", {"seconds": 5})
    with pytest.raises(RetrievalConfigError, match="retain is also an option of the request"):
        with_hints(given, envelope(action))
    both = with_hints({"kv_retrieval": 3}, envelope(action))
    with pytest.raises(RetrievalConfigError, match="kv_retrieval=3 must be a mapping"):
        RequestOptions.parse(both, SERVER)


def test_all_actions_have_options():
    served = {option for fields, own in ACTIONS.values() for option in (*fields.values(), *own)}
    assert served == {*SessionHints._fields}
