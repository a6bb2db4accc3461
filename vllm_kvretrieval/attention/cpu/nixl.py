"""NIXL moves blocks of the KV cache between instances; those that vLLM would misread are refused.

Stock vLLM on a CPU takes blocks of another attention backend for those of a GPU, and packs them for
its own kernel. Ours are packed already, and it would pack them once more, without a word. vLLM's
check at the handshake prevents this, unless the receiving instance has switched the check off
(``enforce_handshake_compat``). This instance cannot see that, so its user has to say what receives.

The other way round vLLM packs nothing here, and without that check takes blocks of GPUs, which are
not packed, and those of CPUs with another layout of keys. So the user has to say what sends, too.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_kvretrieval.errors import RetrievalConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

NAMES = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
CHECK = "enforce_handshake_compat"
"""The key by which a connector's configuration switches vLLM's check off."""

CONSUMERS = "kv_retrieval_consumers"
"""The key by which a connector's configuration states who reads what it sends."""
OURS = "kvretrieval"
"""The value of :data:`CONSUMERS` that says: only instances with retrieval."""

PRODUCERS = "kv_retrieval_producers"
"""The key by which it states who sends what it reads, where vLLM's check is off."""
ALIKE = "cpu"
"""The value of :data:`PRODUCERS` that says: only instances on CPUs of the same kind."""


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


def check_exchange(transfer: "KVTransferConfig", method: str) -> None:
    """Refuse to exchange blocks by NIXL, unless those who read them know what they read.

    Raises:
        RetrievalConfigError: The configuration does not say that only instances with retrieval
            read what is sent, or, without vLLM's check, that only CPUs of the same kind send.
    """
    for name, role, extra in connectors(transfer):
        if name not in NAMES:
            continue
        if role != "kv_consumer" and extra.get(CONSUMERS) != OURS:
            raise RetrievalConfigError(
                f"{method} cannot send KV by {name} to instances of vLLM without retrieval: where "
                "their enforce_handshake_compat is false, they would misread it, which would go "
                f"unnoticed. If this instance only receives, set kv_role to kv_consumer (got "
                f"{role}). If all that receive from it run with an --attention-backend of "
                f'vllm-kvretrieval, say so: "kv_connector_extra_config": {{"{CONSUMERS}": '
                f'"{OURS}"}}; got {extra.get(CONSUMERS)!r}.'
            )
        if role != "kv_producer" and not extra.get(CHECK, True) and extra.get(PRODUCERS) != ALIKE:
            raise RetrievalConfigError(
                f"{method} would misread KV that {name} brings from a GPU, or from a CPU with AMX "
                f"to one without or the other way round, and with {CHECK} false nobody would "
                "notice. If all that send to this instance run on CPUs of its kind, say so: "
                f'"kv_connector_extra_config": {{"{PRODUCERS}": "{ALIKE}"}}; '
                f"got {extra.get(PRODUCERS)!r}."
            )
