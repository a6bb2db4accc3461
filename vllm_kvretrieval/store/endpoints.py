"""HTTP endpoints for the store, beside vLLM's: list contexts, pin them, unpin them, drop them.

vLLM loads them only where ``VLLM_PLUGINS`` names ``kvretrieval``. As they are below ``/v1``, vLLM
asks for its API key, which all clients have. So they may have a key of their own, too. Pages of
other servers are refused.
"""

import os
import secrets
from argparse import Namespace
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from pydantic import BaseModel, Field
from starlette.datastructures import State

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.store.disk.changes import change
from vllm_kvretrieval.store.disk.names import UnknownContextError
from vllm_kvretrieval.store.listing import listed
from vllm_kvretrieval.store.origins import check_origin, note_origins

KEY_VARIABLE = "KVRETRIEVAL_STORE_API_KEY"
KEY_HEADER = "X-Store-API-Key"
STATE, KEY_STATE = "kv_retrieval_store", "kv_retrieval_store_key"
"""Attributes of the application's state: the directory of all stores, or None; the key, or None."""


def _check_key(request: Request) -> None:
    """Refuse who does not have the key of the endpoints, if there is one."""
    key: bytes | None = getattr(request.app.state, KEY_STATE, None)
    given = request.headers.get(KEY_HEADER, "").encode("latin-1")  # as it was sent
    if key is not None and not secrets.compare_digest(given, key):
        raise HTTPException(403, f"The store's own API key is needed ({KEY_HEADER}).")


router = APIRouter(
    prefix="/v1/kv_store",
    tags=["kv_store"],
    dependencies=[Depends(check_origin), Depends(_check_key)],
)


class Meant(BaseModel):
    """A context, by its name, or by its id: the first 8 digits or more."""

    context: str = Field(min_length=1, max_length=128)


@router.get("")
def list_stores(
    request: Request, contexts: Annotated[int, Query(ge=0, le=1000)] = 20
) -> dict[str, Any]:
    """The stores of the server's directory, and so many of the latest contexts of each.

    Also why other entries of the directory are left out.
    """
    try:
        stores, refused = listed(_directory(request), contexts)
    except (RetrievalConfigError, OSError) as error:
        raise HTTPException(500, str(error)) from None
    return {"stores": [asdict(store) for store in stores], "refused": refused}


@router.post("/{action}")
def change_context(
    request: Request, action: Literal["pin", "unpin", "drop"], meant: Meant
) -> dict[str, Any]:
    """Pin, unpin or drop a context in all stores that have it, before the next request is served.

    To drop it once more changes nothing. The answer says which stores have been changed.
    """
    try:
        made, refused = change(_directory(request), meant.context, action)
    except UnknownContextError as error:
        raise HTTPException(404, str(error)) from None
    except (RetrievalConfigError, OSError) as error:
        raise HTTPException(500, str(error)) from None
    stores = [asdict(one) for one in made]
    return {"context": meant.context, "action": action, "stores": stores, "refused": refused}


def _directory(request: Request) -> str:
    directory: str | None = getattr(request.app.state, STATE, None)
    if directory is None:
        raise HTTPException(404, "This server has no store (--kv-retrieval.store).")
    return directory


class StoreEndpoints:
    """The endpoints, as vLLM's ``EndpointPlugin``."""

    name = "kvretrieval"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Note where the engine's store is, the key, and which pages may ask.

        Raises:
            RetrievalConfigError: The key is empty.
        """
        config = None if engine_client is None else engine_client.vllm_config
        own = config and RetrievalConfig.from_vllm(config)
        setattr(state, STATE, own and own.store)
        note_origins(state, args)
        key = os.environ.get(KEY_VARIABLE)
        if key is not None and not key.strip():
            raise RetrievalConfigError(
                f"{KEY_VARIABLE} is empty, which protects nothing: give the endpoints of the store "
                "a key, or unset it."
            )
        setattr(state, KEY_STATE, key and key.strip().encode())
