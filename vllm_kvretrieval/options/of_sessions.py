"""Options of sessions: what becomes of a request's context, and which other one is read ahead."""

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.option import Option, option
from vllm_kvretrieval.values import SWITCH, Kind, shortened

if TYPE_CHECKING:
    from vllm_kvretrieval.options.engine import RetrievalConfig

MOST_SECONDS = 86400
"""The longest time for which a request may have blocks kept."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SALT_DIGITS = 16
PREFIX = "session"
"""How the names of sessions in a store begin."""
MORE = "store.md#sessions"


def _require_session(key: str, value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise RetrievalConfigError(
            f"{key}={shortened(value)} cannot be a session's name; take up to 64 letters, digits, "
            "dots, dashes and underscores, a letter or a digit first."
        )
    return value


def _require_seconds(key: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MOST_SECONDS:  # NaN compares false
        raise RetrievalConfigError(
            f"{key}={shortened(value)} must be a number of seconds from 0 to {MOST_SECONDS}, e.g. "
            "600."
        )
    return float(value)


SESSION_NAME = Kind("up to 64 letters, digits, dots, dashes and underscores", _require_session)
SESSIONS: Any = option(
    False,
    SWITCH,
    "whether requests may pin and retain their contexts and have others read ahead (`pin`, "
    "`retain`, `prefetch`): clients then take room in the cache from each other",
    neutral=False,
    more=MORE,
)
OF_REQUEST: Mapping[str, Option] = {
    "session": Option(SESSION_NAME, "the client's name for the request's context", more=MORE),
    "pin": Option(
        SWITCH,
        "whether the context is pinned in the store, with its answer, when the request has ended, "
        "in place of what the session had pinned before; false: that is not pinned any more. With "
        "`session`, and the server's options `sessions` and `store`",
        "as before",
        more=MORE,
    ),
    "retain": Option(
        Kind(f"seconds, 0 to {MOST_SECONDS}", _require_seconds),
        "for how long the context is not evicted when the request has ended; with the server's "
        "option `sessions`",
        "as before",
        more=MORE,
    ),
    "prefetch": Option(
        SESSION_NAME,
        "the session whose pinned context the server reads ahead from its store, for the next "
        "request; with the server's options `sessions` and `store`",
        more=MORE,
    ),
}
"""What a request may ask for, by name."""


class SessionHints(NamedTuple):
    """What a request asks for its context and another; see :data:`OF_REQUEST`.

    Attributes:
        session: The name of the session; None: it has none.
        pin: Whether to pin the session's context, or to pin it no more; None: neither.
        retain: Seconds; None: what the session has retained before stays so.
        prefetch: The name of the other session; None: none is read ahead.
    """

    session: str | None = None
    pin: bool | None = None
    retain: float | None = None
    prefetch: str | None = None


NO_HINTS = SessionHints()


def hints_of(value: Mapping[str, Any], config: "RetrievalConfig") -> SessionHints:
    """What a request asks for.

    Args:
        value: Checked options that the request names.
        config: Options of the engine.

    Raises:
        RetrievalConfigError: The server does not allow it, or lacks what it needs.
    """
    hints = SessionHints(**{name: value.get(name) for name in SessionHints._fields})
    asked = next((name for name in ("pin", "retain", "prefetch") if name in value), None)
    if asked is None:
        return hints
    shown = f"{asked}={value[asked]!r}"
    if not config.sessions:
        raise RetrievalConfigError(
            f"{shown} is not served here; leave it out, or start the server with "
            "--kv-retrieval.sessions true."
        )
    if config.store is None and (hints.pin is not None or hints.prefetch is not None):
        raise RetrievalConfigError(
            f"{shown} needs a store; ask for retain, or start the server with "
            "--kv-retrieval.store DIR."
        )
    if hints.pin is not None and hints.session is None:
        raise RetrievalConfigError(f"pin={hints.pin} needs the name of a session; add session.")
    return hints


def stored_name(session: str, salt: str | None) -> str:
    """What a session is called in a store.

    Requests with another ``cache_salt`` have other sessions, whatever these are called.

    Args:
        session: The client's name for it.
        salt: The request's ``cache_salt``.
    """
    if not salt:
        return f"{PREFIX}.{session}"
    digits = hashlib.sha256(salt.encode()).hexdigest()[:SALT_DIGITS]
    return f"{PREFIX}-{digits}.{session}"
