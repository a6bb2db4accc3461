"""NIXL moves blocks of the KV cache between instances; those that vLLM would misread are refused.

Stock vLLM on a CPU takes blocks of another attention backend for those of a GPU, and packs them for
its own kernel. Ours are packed already, and it would pack them once more, without a word. vLLM's
check at the handshake prevents this, unless the receiving instance has switched the check off
(``enforce_handshake_compat``). This instance cannot see that, so its user has to say what receives.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvretrieval.errors import RetrievalConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

NAMES = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
KEY = "kv_retrieval_consumers"
"""The key by which a connector's configuration states who reads what it sends."""

OURS = "kvretrieval"
"""The value of :data:`KEY` that says: only instances with retrieval."""


class Connector(NamedTuple):
    """A KV connector as vLLM's configuration describes it."""

    name: str | None
    role: str | None
    extra: dict[str, Any]


def connectors(transfer: "KVTransferConfig") -> Iterator[Connector]:
    """The connectors of a configuration: one, or those that vLLM's ``MultiConnector`` holds."""
    extra = transfer.kv_connector_extra_config
    yield Connector(transfer.kv_connector, transfer.kv_role, extra)
    if transfer.kv_connector == "MultiConnector":
        for held in extra.get("connectors", []):
            yield Connector(
                held.get("kv_connector"),
                held.get("kv_role"),
                held.get("kv_connector_extra_config", {}),
            )


def uses_nixl(transfer: "KVTransferConfig | None") -> bool:
    """Whether one of the connectors of a configuration is NIXL's."""
    return transfer is not None and any(held.name in NAMES for held in connectors(transfer))


def check_consumers(transfer: "KVTransferConfig", method: str) -> None:
    """Refuse to send blocks by NIXL, unless only instances with retrieval read them.

    Raises:
        RetrievalConfigError: The configuration does not say so.
    """
    for name, role, extra in connectors(transfer):
        if name in NAMES and role != "kv_consumer" and extra.get(KEY) != OURS:
            raise RetrievalConfigError(
                f"{method} cannot send KV by {name} to instances of vLLM without retrieval: where "
                "their enforce_handshake_compat is false, they would misread it, which would go "
                f"unnoticed. If this instance only receives, set kv_role to kv_consumer (got "
                f"{role}). If all that receive from it run with an --attention-backend of "
                f'vllm-kvretrieval, say so: "kv_connector_extra_config": {{"{KEY}": "{OURS}"}}; '
                f"got {extra.get(KEY)!r}."
            )
