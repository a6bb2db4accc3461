"""Options of requests over HTTP, checked before vLLM's server begins to answer.

A server that ends answers none any more (``draining.py``).

The engine checks them, too, but when it has a request, the status of an answer that is streamed has
been sent. So this is a layer in front of vLLM's routes, as those that ``--middleware`` names. It
reads the body of a request along with the route: vLLM has asked for its API key before.
"""

import json
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.of_hints import ACTIONS, OURS
from vllm_kvretrieval.options.table import CONFIG_KEY
from vllm_kvretrieval.platforms.draining import Ending, send_away
from vllm_kvretrieval.platforms.requests import check_request, reader_of
from vllm_kvretrieval.values import resembles, shortened

logger = init_logger("vllm.kvretrieval.http")

XARGS = "vllm_xargs"
"""The field of a body where vLLM takes further options from."""
OTHERS = ("extra_args", "extra_body")
"""Names that the field has in Python. vLLM's server ignores them."""
HEADER, FIELD = "X-Request-Id", "request_id"
"""Where a client or a proxy may name its request."""
GENERATE = "/inference/v1/generate"
"""The route whose options are those of ``SamplingParams`` in Python."""


class RequestCheck:
    """A layer that answers requests with wrong options of ours with an HTTP 400, and with a 503
    when the server ends.

    Args:
        app: The layers behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._ending = app, Ending()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the specification of ASGI."""
        state = scope["app"].state
        serves = reader_of(state) is not None
        client = getattr(state, "engine_client", None)  # vLLM's render server has none
        if serves and client is not None and scope["type"] == "lifespan":
            self._ending.watch(client)
        if not serves or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._ending.refuses(scope):
            await send_away(scope, receive, send)
            return
        body = bytearray()

        async def checked() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                body.extend(message.get("body", b""))
                if not message.get("more_body"):
                    _check(scope, body)
                    body.clear()
            return message

        await self._app(scope, checked, send)


def _check(scope: Scope, body: bytearray) -> None:
    """Refuse a request; what is no JSON object is vLLM's matter.

    Raises:
        HTTPException: The options are wrong, or stand where nobody reads them.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return
    if not isinstance(fields, Mapping):
        return
    name = _name(scope, fields)
    try:
        _check_places(fields)
        if scope["path"].endswith(GENERATE):
            fields = fields.get("sampling_params")
            if not isinstance(fields, Mapping):
                return
            given, logprobs = fields.get("extra_args"), fields.get("prompt_logprobs")
        else:
            given, logprobs = fields.get(XARGS), _prompt_logprobs(fields)
        if given is None or isinstance(given, Mapping):
            check_request(scope["app"].state, given, logprobs, current_platform.setting)
    except RetrievalConfigError as e:
        logger.info("Refused a request for %s%s: %s", scope["path"], name, e)
        raise HTTPException(400, str(e)) from None


def _name(scope: Scope, fields: Mapping[str, Any]) -> str:
    """The name that a client or a proxy gave to its request, for the log; empty if it has none.

    A header's comes before a field's, as for vLLM.
    """
    given = {HEADER: Headers(scope=scope).get(HEADER), FIELD: fields.get(FIELD)}
    names = (f" ({key} {shortened(name)})" for key, name in given.items() if name is not None)
    return next(names, "")


def _prompt_logprobs(fields: Mapping[str, Any]) -> Any:
    """What vLLM makes of a request's fields for ``SamplingParams.prompt_logprobs``."""
    asked = fields.get("prompt_logprobs")
    if asked is not None or not fields.get("echo"):
        return asked
    return fields.get("top_logprobs", 0) if "messages" in fields else fields.get("logprobs")


def _check_places(fields: Mapping[str, Any]) -> None:
    """Refuse options of ours that vLLM's server ignores, or refuses without a word of ours."""
    right = f'"{XARGS}": {{"{CONFIG_KEY}_budget": 512}}'
    places = {"the top of a request": fields}
    places |= {name: fields[name] for name in OTHERS if isinstance(fields.get(name), Mapping)}
    for place, options in places.items():
        for name in options:
            if resembles(name, CONFIG_KEY):
                raise RetrievalConfigError(
                    f"{name!r} is not read at {place}; over HTTP write {right}."
                )
    hints = fields.get("kv_hints")
    actions = hints.get("actions") if isinstance(hints, Mapping) else None
    for action in actions if isinstance(actions, list) else ():
        if isinstance(action, Mapping) and resembles(action.get("action_type"), OURS):
            raise RetrievalConfigError(
                f"kv_hints is not read over HTTP, so {', '.join(ACTIONS)} have no effect there; "
                f'write "{XARGS}": {{"{CONFIG_KEY}_session": "NAME", "{CONFIG_KEY}_pin": true}}, '
                f"{CONFIG_KEY}_retain or {CONFIG_KEY}_prefetch."
            )
    xargs = fields.get(XARGS)
    if not isinstance(xargs, Mapping):
        return
    if CONFIG_KEY in xargs:
        raise RetrievalConfigError(
            f"{XARGS} has one value for each option: in place of {CONFIG_KEY!r} write {right}."
        )
    if fields.get("use_beam_search") and any(resembles(name, CONFIG_KEY) for name in xargs):
        raise RetrievalConfigError(
            f"options of {CONFIG_KEY} have no effect with use_beam_search: vLLM makes new options "
            "for its steps, each of which reads the prompt again. Leave them out."
        )
