"""The groups of a model's layers, as vLLM makes them and as a store numbers them."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.store.disk.groups import Group

KEPT = FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec
"""vLLM's specs of the layers whose blocks a store keeps."""


def numbers_of(specs: Sequence[KVCacheSpec]) -> list[int]:
    """vLLM's numbers of groups in a store's order: one with full attention, and then the others.

    Args:
        specs: The groups' specs, as vLLM numbers them.
    """
    numbers = range(len(specs))
    full = [number for number in numbers if isinstance(specs[number], FullAttentionSpec)]
    first = full[0] if full else 0
    return [first, *(number for number in numbers if number != first)]


def groups_of(specs: Sequence[KVCacheSpec]) -> list[Group]:
    """The groups in a store's order; see :func:`numbers_of`."""
    ordered = (specs[number] for number in numbers_of(specs))
    return [Group(spec.block_size, _needs(spec), _chunk(spec)) for spec in ordered]


def described(groups: Sequence[KVCacheGroupSpec], model: str) -> list[dict[str, Any]]:
    """Groups of layers in a store's order, for its identity.

    Args:
        groups: vLLM's, of a model that mixes kinds of layers.
        model: What the model is called.

    Raises:
        RetrievalConfigError: A store does not keep the blocks of some layers.
    """
    specs, found = [_spec(group) for group in groups], []
    for number, known in zip(numbers_of(specs), groups_of(specs), strict=True):
        group, spec = groups[number], specs[number]
        if type(spec) not in KEPT:
            raise RetrievalConfigError(
                "kv_retrieval.store keeps blocks of full attention, sliding windows, chunks and "
                f"recurrent states, and {model} has layers of another kind "
                f"({type(spec).__name__}); leave the store out."
            )
        chunk = {} if known.chunk is None else {"chunk": known.chunk}
        found.append(
            {
                "size": known.size,
                "needs": known.needs,
                **chunk,
                "spec": repr(group.kv_cache_spec),
                "layers": [*group.layer_names],
            }
        )
    return found


def _spec(group: KVCacheGroupSpec) -> KVCacheSpec:
    """The spec of one of vLLM's groups, or of its first layer where these have different ones."""
    spec: KVCacheSpec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def _needs(spec: KVCacheSpec) -> int | None:
    """See :class:`Group`."""
    if isinstance(spec, SlidingWindowSpec):
        return -(-(spec.sliding_window - 1) // spec.block_size)
    return 1 if isinstance(spec, MambaSpec) else None


def _chunk(spec: KVCacheSpec) -> int | None:
    """See :class:`Group`."""
    return spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else None
