"""Roles of a model's layers if layers share the selection of one of them (OmniKV)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from vllm_kvretrieval.errors import RetrievalConfigError

MOST_FILTERS = 3
"""Most filters, as in the paper (section 4.1): every filter adds two dense layers."""


@dataclass(frozen=True)
class Dense:
    """Attends to the whole context, as in vLLM."""


@dataclass(frozen=True)
class Filters:
    """Attends to the whole context, and selects tokens for the layers after it."""


@dataclass(frozen=True)
class Follows:
    """Attends to the tokens that layer ``filter`` selected in the same step."""

    filter: int


Role = Dense | Filters | Follows

WINDOW = 16
"""Queries of an observation window (section 5)."""

OBSERVATIONS = {
    "last": (1.0,),
    "uniform": (1.0,) * WINDOW,
    "exponential": tuple(2.0 ** (j - WINDOW) for j in range(WINDOW)),
}
"""The weights of a request's latest queries, the latest at the end (section 4.2), by name."""


def roles_of(filters: Sequence[int], layers: Collection[int]) -> dict[int, Role]:
    """The role of each layer (OmniKV, equation 2).

    Dense are the layers below the first filter and the one right after each filter, beside whose
    attention a slow home would be read.

    Args:
        filters: Numbers of layers, rising.
        layers: The layers with plain full attention; the model's others are counted, but have no
            role.

    Raises:
        RetrievalConfigError: The named layers cannot be filters; says why.
    """
    if not 1 <= len(filters) <= MOST_FILTERS:
        raise RetrievalConfigError(
            f"filters={list(filters)} must be 1 to {MOST_FILTERS} layers: each adds two that read "
            "the whole context."
        )
    if list(filters) != sorted(set(filters)):
        raise RetrievalConfigError(f"filters={list(filters)} must be in rising order.")
    roles: dict[int, Role] = {}
    for layer in sorted(layers):
        last = max((f for f in filters if f <= layer), default=None)
        if last is None or layer == last + 1:
            roles[layer] = Dense()
        else:
            roles[layer] = Filters() if layer == last else Follows(last)
    for layer in filters:
        if layer not in roles:
            raise RetrievalConfigError(
                f"filters={list(filters)}: layer {layer} has no full attention; those that have "
                f"are {_listed(roles)}."
            )
        if Follows(layer) not in roles.values():
            raise RetrievalConfigError(
                f"filters={list(filters)}: no layer would follow layer {layer}, since the one "
                f"after a filter is dense, too. Layers with full attention: {_listed(roles)}."
            )
    return roles


def stage_roles(roles: Mapping[int, Role], layers: Collection[int]) -> dict[int, Role]:
    """The roles of the layers that one stage of a pipeline has (OmniKV, appendix D.9).

    A stage has no selection of another one. So the first of its layers that would follow an earlier
    stage's filter is a filter itself, and the others of these follow it. A filter that no layer
    would follow is dense.

    Args:
        roles: The roles of all layers of the model; see :func:`roles_of`.
        layers: The stage's, with plain full attention.
    """
    own = {layer: roles[layer] for layer in sorted(layers)}
    follows = ((layer, role) for layer, role in own.items() if isinstance(role, Follows))
    if apart := [layer for layer, role in follows if role.filter not in own]:
        first = apart[0]
        own[first] = Filters()
        for layer in apart[1:]:
            own[layer] = Dense() if layer == first + 1 else Follows(first)
    for layer, role in own.items():
        if isinstance(role, Filters) and Follows(layer) not in own.values():
            own[layer] = Dense()
    return own


def _listed(layers: Collection[int]) -> str:
    numbers = sorted(layers)
    if not numbers:
        return "none"
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
