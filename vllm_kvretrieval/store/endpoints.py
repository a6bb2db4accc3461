"""HTTP endpoints for the store, beside vLLM's: list contexts, pin them, unpin them, drop them.

vLLM loads them only where ``VLLM_PLUGINS`` names ``kvretrieval``. As they are below ``/v1``, vLLM
asks for its API key.
"""

from argparse import Namespace
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request
from pydantic import BaseModel, Field
from starlette.datastructures import State

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.store.changes import change
from vllm_kvretrieval.store.listing import listed

STATE = "kv_retrieval_store"
"""Attribute of the application's state: the directory of all stores, or None."""

router = APIRouter(prefix="/v1/kv_store", tags=["kv_store"])


class Meant(BaseModel):
    """A context, by its name, or the first digits of its id."""

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
) -> dict[str, str]:
    """Pin, unpin or drop a context, before the next request is served."""
    try:
        change(_directory(request), meant.context, action)
    except RetrievalConfigError as error:
        raise HTTPException(404, str(error)) from None
    except OSError as error:
        raise HTTPException(500, str(error)) from None
    return {"context": meant.context, "action": action}


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
        """Note where the engine's store is."""
        config = None if engine_client is None else engine_client.vllm_config
        own = config and RetrievalConfig.from_vllm(config)
        setattr(state, STATE, own and own.store)
