"""Which pages a browser may let ask the endpoints beside vLLM's: the server's own.

A page of another server asks in the name of a user whose browser can reach this one. A browser says
which page asks (``Origin``, ``Sec-Fetch-Site``); one of another server is refused. But the owner of
a name can let it lead to this machine once his page is there, which then counts as our own. So
without an API key, which such a page does not have, browsers have to name the server by its
address, by a name that nobody can own, or by one of ``--allowed-origins``.
"""

import os
from argparse import Namespace
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from starlette.datastructures import State

STATE = "kv_retrieval_origins"
BROWSERS = ("Origin", "Sec-Fetch-Site", "Accept-Language")
"""Headers that browsers send, some of them with each request, and other clients do not."""
OWN = ("same-origin", "none")
"""What a browser says (``Sec-Fetch-Site``) of the server's own pages, and of the user."""


class Origins(NamedTuple):
    """Whom a server trusts.

    Attributes:
        allowed: Origins that the operator has named.
        keyed: Whether the server asks for an API key.
    """

    allowed: frozenset[str] = frozenset()
    keyed: bool = False


def note_origins(state: State, args: Namespace) -> None:
    """Note whom a server with these arguments trusts."""
    keys = getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")]
    allowed = frozenset(getattr(args, "allowed_origins", ()) or ()) - {"*"}
    setattr(state, STATE, Origins(allowed, any(keys)))


def check_origin(request: Request) -> None:
    """Refuse what a browser sends for a page of another server.

    Raises:
        HTTPException: It does, or that cannot be ruled out (403).
    """
    trusted: Origins = getattr(request.app.state, STATE, Origins())
    origin, host = request.headers.get("Origin"), request.headers.get("Host", "")
    if origin in trusted.allowed:
        return
    foreign = origin is not None and _host(origin) != host
    if foreign or request.headers.get("Sec-Fetch-Site", OWN[0]) not in OWN:
        raise HTTPException(403, "Pages of other servers may not ask this.")
    browser = any(name in request.headers for name in BROWSERS)
    if browser and not trusted.keyed and not _is_ours(host, trusted.allowed):
        raise HTTPException(
            403,
            f"This server has no API key, and {host[:100]} may be anybody's name for it: name its "
            "address, or start it with --api-key, or with this name in --allowed-origins.",
        )


def _is_ours(host: str, allowed: frozenset[str]) -> bool:
    """Whether no other can own this name of a server."""
    if host in map(_host, allowed):
        return True
    try:
        ip_address(_host(f"//{host}", whole=False))
    except ValueError:
        name = host.rpartition(":")[0] or host
        return "." not in name or name.endswith((".localhost", ".local"))
    return True


def _host(url: str, whole: bool = True) -> str:
    """The name of a server in an address, with its port if ``whole``; empty: it has none."""
    try:
        parts = urlsplit(url)
        return (parts.netloc if whole else parts.hostname) or ""
    except ValueError:
        return ""
