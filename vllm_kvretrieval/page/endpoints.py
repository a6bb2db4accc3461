"""HTTP endpoints beside vLLM's: what answers attend to, texts of documents, and a page that asks.

vLLM loads them only where ``VLLM_PLUGINS`` names ``kvretrieval``, and those of this file answer
only with the server's option ``sources``. As data is below ``/v1``, vLLM asks for its API key. The
page itself is three files of this package, and has no data. Requests that a browser sends for pages
of other servers are refused.
"""

from argparse import Namespace
from collections.abc import Sequence
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi import Path as InPath
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import State
from starlette.requests import ClientDisconnect

from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.page.library import MOST_CHARACTERS, Library, Text
from vllm_kvretrieval.store.endpoints import StoreEndpoints
from vllm_kvretrieval.store.origins import check_origin

STATE = "kv_retrieval_page"
"""The attribute of the application's state with what the page has; None: it is not asked for."""
MOST_BYTES = 4 * MOST_CHARACTERS + (1 << 20)
STATIC = {
    "": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
"""The files of the page, by the end of their path."""
OPTIONS = ("budget", "sources")
"""Options of requests that the page sets, beside full attention."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
Id = Annotated[str, InPath(pattern="^[0-9a-f]{32}$")]
RequestId = Annotated[str, InPath(pattern="^[A-Za-z0-9_.-]{1,128}$")]


class Page:
    """What the page of a server has.

    Attributes:
        engine: vLLM's client of the engine.
        config: Options of the engine.
        library: Texts of documents.
    """

    def __init__(self, engine: Any, config: RetrievalConfig) -> None:
        self.engine, self.config = engine, config
        self.library = Library(config.store)


def _page(request: Request) -> Page:
    page: Page | None = getattr(request.app.state, STATE, None)
    if page is None:
        raise HTTPException(404, "This server has no page (--kv-retrieval.sources true).")
    return page


router = APIRouter(tags=["kv_retrieval"])
data = APIRouter(prefix="/v1/kv_retrieval", dependencies=[Depends(check_origin)])


@router.get("/kvretrieval{file:path}", include_in_schema=False)
def get_file(file: str, request: Request) -> Response:
    """One of the page's own files."""
    _page(request)
    file = file.rstrip("/")
    if file not in STATIC:
        raise HTTPException(404)
    name, kind = STATIC[file]
    content = files("vllm_kvretrieval.page").joinpath("static", name).read_bytes()
    return Response(content, media_type=kind, headers=HEADERS)


@data.get("/options")
def get_options(request: Request) -> dict[str, Any]:
    """What requests may ask for: which options, and of the budget the largest and the default."""
    config = _page(request).config
    return {
        "budget": config.budget,
        "most": config.budget_limit,
        "page_size": config.page_size,
        "may": [name for name in OPTIONS if config.lets_set(name)],
        "exact": config.allow_exact and config.lets_set("exact"),
        "stored": config.store is not None,
    }


@data.get("/sources/{request_id}")
async def get_sources(request_id: RequestId, request: Request) -> dict[str, Any]:
    """The pages that an answer attended to, if its request asked for it not long ago.

    The answer has no text, only places in the prompt, which its client knows.
    """
    told = await _page(request).engine.collective_rpc("retrieval_sources", args=(request_id,))
    known = [worker for worker in told if worker is not None]
    if not known:
        raise HTTPException(
            404,
            "Nothing is noted of this request: its id is another, it is too long ago, or it did "
            "not ask (kv_retrieval_sources).",
        )
    return merged(known)


def merged(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What workers with other heads, or other layers, tell of a request."""
    groups = dict.fromkeys(tuple(group) for worker in told for group in worker["groups"])
    found: dict[str, Any] = {**told[0], "groups": [*groups]}
    for field in ("weights", "peaks"):
        by_group: dict[Any, list[float]] = {}
        for worker in told:
            for group, shares in zip(map(tuple, worker["groups"]), worker[field], strict=True):
                known = by_group.get(group, shares)
                by_group[group] = [max(pair) for pair in zip(known, shares, strict=True)]
        found[field] = [by_group[group] for group in groups]
    return found


@data.get("/documents")
def list_documents(request: Request) -> list[dict[str, Any]]:
    """The documents, without their texts."""
    return [
        {"id": text.id, "name": text.name, "characters": len(text.text), "pages": len(text.pages)}
        for text in _page(request).library.all()
    ]


@data.get("/documents/{id}")
def get_document(id: Id, request: Request) -> Text:
    """A document."""
    text = _page(request).library.get(id)
    if text is None:
        raise HTTPException(404, "There is no such document.")
    return text


@data.post("/documents")
async def add_document(request: Request) -> dict[str, str]:
    """Take in the text of a document."""
    library, body = _page(request).library, bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > MOST_BYTES:
                raise HTTPException(413, f"A document has {MOST_BYTES} bytes at most.")
    except ClientDisconnect:  # nobody reads the answer; the server's log would have a traceback
        raise HTTPException(400, "The document has broken off.") from None
    try:
        text = Text.model_validate_json(bytes(body))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise HTTPException(400, f"This is no document: {wrong}"[:500]) from None
    try:
        return {"id": await run_in_threadpool(library.add, text)}
    except OSError as error:
        raise HTTPException(500, f"The document cannot be kept: {error.strerror}.") from None


@data.delete("/documents/{id}")
def remove_document(id: Id, request: Request) -> dict[str, bool]:
    """Forget the text of a document; what the store has of its KV cache stays."""
    return {"removed": _page(request).library.remove(id)}


class Endpoints(StoreEndpoints):
    """The endpoints of the store and of the page, as vLLM's ``EndpointPlugin``."""

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        super().attach_router(app)
        app.include_router(router)
        app.include_router(data)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Note what the page has; see :meth:`StoreEndpoints.init_state`."""
        await super().init_state(engine_client, state, args)
        config = engine_client and RetrievalConfig.from_vllm(engine_client.vllm_config)
        page = Page(engine_client, config) if config and config.sources else None
        setattr(state, STATE, page)
