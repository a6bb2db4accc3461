"""Retrieval's state beside the KV cache on a GPU, and how it gets into vLLM's layers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.platform_utils import num_compute_units
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvretrieval.attention.cuda.far import FarLayer, FarTier
from vllm_kvretrieval.attention.cuda.impl import RetrievalAttentionImpl
from vllm_kvretrieval.attention.cuda.metadata import RetrievalMetadataBuilder
from vllm_kvretrieval.attention.cuda.side import SideWork
from vllm_kvretrieval.attention.cuda.workspace import Workspace
from vllm_kvretrieval.engine.cuda.heads import RetrievalHeads
from vllm_kvretrieval.engine.cuda.host import make_tier
from vllm_kvretrieval.engine.cuda.requests import RunningRequests
from vllm_kvretrieval.engine.cuda.tiers import HostTiers
from vllm_kvretrieval.engine.layers import number_layers
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels.device import RECORD_ALIGNMENT
from vllm_kvretrieval.kernels.types import Chooser, IndexRecords, Selection
from vllm_kvretrieval.methods import DeviceFacts, device_filter, device_methods
from vllm_kvretrieval.methods.choosers import layer_choosers
from vllm_kvretrieval.methods.watching import watching_bytes
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.capacity import Capacity
from vllm_kvretrieval.retrieval.layers import full_attention_layers
from vllm_kvretrieval.retrieval.needs import CAPPED_LOGITS, Need
from vllm_kvretrieval.retrieval.roles import Filters, Follows, Role, stage_roles

TOKEN_MAJOR = "token_major"
"""vLLM's name of the cache's layout: each token's key before its value."""


Retrieves = list[tuple[RetrievalMetadataBuilder, list[str]]]
"""Groups of layers that retrieve: the builder of their metadata, and their names."""


def roles_of_layers(
    vllm_config: Any, config: RetrievalConfig, specs: Mapping[str, Any]
) -> dict[str, Role]:
    """The roles of a worker's layers by name; empty if each selects for itself.

    Args:
        vllm_config: vLLM's configuration.
        config: Options of the engine.
        specs: vLLM's KV cache specs of the worker's layers.
    """
    numbers = number_layers(vllm_config, specs, config)
    of_model = full_attention_layers(vllm_config.model_config) or [*numbers.values()]
    roles = config.roles(vllm_config.model_config, of_model)
    roles = stage_roles(roles, numbers.values()) if roles else roles
    return {name: roles[number] for name, number in numbers.items()} if roles else {}


def retrieving(
    config: RetrievalConfig, roles: Mapping[str, Role], names: Iterable[str]
) -> list[str]:
    """The layers that attend to parts of long contexts."""
    if roles:
        return [name for name in names if isinstance(roles.get(name), Follows)]
    return [name for name in names if extract_layer_index(name) >= config.dense_layers]


def groups_that_retrieve(
    config: RetrievalConfig, roles: Mapping[str, Role], attn_groups: Iterable[Any]
) -> Retrieves:
    """The groups of layers that retrieve, among vLLM's.

    Backends built around ours, as for chunked attention or added sinks, are left as they are.

    Raises:
        RetrievalConfigError: Layers follow a filter whose pages have other numbers.
    """
    found, filters = [], {name for name, role in roles.items() if isinstance(role, Filters)}
    for group in attn_groups:
        builder = group.get_metadata_builder()
        ours = type(builder).__base__ is RetrievalMetadataBuilder
        plain = ours and type(group.kv_cache_spec) is FullAttentionSpec
        if plain and (names := retrieving(config, roles, group.layer_names)):
            found.append((builder, names))
            if not filters <= {*group.layer_names}:
                raise RetrievalConfigError(
                    f"{config.method} on a GPU needs all layers with full attention in one of "
                    "vLLM's groups, and in this model they are in several. Serve it on a CPU, or "
                    "use a method that selects pages by an index, such as freekv."
                )
    return found


class RetrievalLayers:
    """Everything that retrieval adds to the layers of a worker, from one KV cache to the next.

    Args:
        ops: Implementation of the ops: the module ``kernels.triton``.
        config: Options of the engine.
        requests: The running requests.
        max_model_len: Tokens of the longest context.
        device: Where the layers are.

    Attributes:
        impls: The retrieval layers, by name.
        tier: The shared state of layers in host memory; None if the home is the device.
    """

    def __init__(
        self,
        ops: Any,
        config: RetrievalConfig,
        requests: RunningRequests,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.ops, self.config, self.requests, self.device = ops, config, requests, device
        self.max_model_len = max_model_len
        self.impls: dict[str, RetrievalAttentionImpl] = {}
        self.tier: FarTier | None = None
        self._filters: list[RetrievalAttentionImpl] = []
        self._workspaces: dict[tuple[int, int, int], Workspace] = {}

    def attach(
        self,
        groups: Retrieves,
        layers: Mapping[str, Any],
        side: SideWork,
        tiers: HostTiers | None = None,
        encoded: Mapping[str, torch.Tensor] | None = None,
        *,
        filters: Sequence[str] = (),
        is_profiling: bool = False,
    ) -> None:
        """Let layers retrieve, once their KV cache is allocated.

        Args:
            groups: The groups of the worker; a single one if there are ``tiers``.
            layers: vLLM's layers, by name.
            side: Runs work beside the model.
            tiers: Sizes, if the cache of these layers is in host memory.
            encoded: The memory of layers there by name, uint8, if their pages are encoded.
            filters: Names of the layers of the only group that list tokens for those after them.
            is_profiling: Whether nothing but graphs are captured, to measure their memory.
        """
        numbers = [extract_layer_index(name) for _, names in groups for name in names]
        for builder, names in groups:
            if tiers is not None:
                caches = [layers[name].kv_cache for name in names]
                memory = [encoded[name] for name in names] if encoded else []
                lengths = self.max_model_len, self.requests.drafts
                width = list_width(self.config, self.requests.room, *lengths)
                self.tier = make_tier(
                    self.ops, side, self.config, tiers, builder, caches, memory,
                    self.requests.capacity, width, one_layers_slots=is_profiling,
                )  # fmt: skip
            builder.attach(self.ops, self.requests, self.config.page_size, self.tier)
            for number, name in enumerate(names):
                far = None if self.tier is None else self.tier.far[number]
                is_last = extract_layer_index(name) == max(numbers)
                self._attach(name, layers[name], builder, side, far, is_last=is_last)
            for name in filters:
                self._attach_filter(layers[name], builder)

    def detach(self) -> None:
        """Release the KV cache and all state beside it."""
        for impl in (*self.impls.values(), *self._filters):
            impl.detach()
        self.impls.clear()
        self._filters.clear()
        self.tier = None
        self._workspaces.clear()

    @property
    def indexes(self) -> list[IndexRecords]:
        """The page indexes of all layers."""
        return [store for impl in self.impls.values() for store in impl.indexes]

    def index_everything(self) -> None:
        """Index all pages of the cache from their keys."""
        for store in self.indexes:
            pages = torch.arange(store.pages, dtype=torch.int32, device=self.device)
            self.ops.index_pages(pages, store)

    def _attach(
        self,
        name: str,
        layer: Any,
        builder: RetrievalMetadataBuilder,
        side: SideWork,
        far: FarLayer | None,
        *,
        is_last: bool,
    ) -> None:
        impl, cache = layer.impl, layer.kv_cache
        if impl.half.logits_soft_cap:
            CAPPED_LOGITS.check(self.config.methods.values())
        tokens = cache.numel() // cache.shape[-1]
        if self.config.token_major and tokens > torch.iinfo(torch.int32).max:
            raise RetrievalConfigError(
                f"{self.config.method} selects single tokens, of which a layer's KV cache has "
                f"{tokens} (times KV heads), more than 31 bits number. Lower "
                "--kv-cache-memory-bytes or --gpu-memory-utilization."
            )
        choosers = self._choosers(name, impl, cache)
        shape = impl.num_kv_heads, impl.group, impl.head_size
        if shape not in self._workspaces:
            self._workspaces[shape] = make_workspace(
                self.config,
                self.requests.room,
                shape,
                self.requests.capacity,
                self.max_model_len,
                self.device,
                drafts=self.requests.drafts,
                positions=far is not None,
            )
        sinks, softcap = impl.half.sinks, impl.half.logits_soft_cap or 0.0
        facts = DeviceFacts(
            self.requests.number_of(name),
            is_last,
            self.requests.kept,
            impl.scale,
            softcap,
            None if sinks is None else sinks.float(),
        )
        methods = device_methods(list(self.config.methods.values()), choosers, facts)
        shared = builder.table, self._workspaces[shape], side
        impl.attach(self.ops, methods, choosers, cache, *shared, far, is_last=is_last)
        self.impls[name] = impl

    def _attach_filter(self, layer: Any, builder: RetrievalMetadataBuilder) -> None:
        impl, methods = layer.impl, [*self.config.methods.values()]
        workspace = self._workspaces.get((impl.num_kv_heads, impl.group, impl.head_size))
        if workspace is None or len(self._workspaces) > 1:
            raise RetrievalConfigError(
                f"{self.config.method} on a GPU needs layers of equal heads, and those of this "
                "model differ. Serve it on a CPU, or use a method that selects pages by an index, "
                "such as freekv."
            )
        if impl.half.sinks is not None or impl.half.logits_soft_cap:
            raise RetrievalConfigError(
                f"{self.config.method} on a GPU does not know a model's own rules of attention "
                "(sinks, caps of scores) yet. Serve it on a CPU, or use a method that selects "
                "pages by an index, such as freekv."
            )
        with self.device:
            by = device_filter(methods, layer.kv_cache, TOKEN_MAJOR, impl.scale)
        impl.attach_filter(self.ops, by, builder.table, workspace)
        self._filters.append(impl)

    def _choosers(
        self, name: str, impl: RetrievalAttentionImpl, cache: torch.Tensor
    ) -> list[Chooser]:
        """The choosers of a layer, by the number of the method."""
        shape = {"kv_heads": impl.num_kv_heads, "head_size": impl.head_size, "dtype": cache.dtype}
        with self.device:  # tensors are made there
            seats, room = self.requests.capacity, self.requests.room
            heads = self.requests.heads_of(name)
            selection = make_selection(self.config, room, seats, heads, impl.group, shape)
            selection.counts = self.requests.counts_of(name)
            selection.ends = self.requests.ends
            return layer_choosers(
                self.config, selection, cache, TOKEN_MAJOR, impl.scale,
                readable=self.config.encoding is None, alignment=RECORD_ALIGNMENT,
            )  # fmt: skip


def make_selection(
    config: RetrievalConfig,
    room: Capacity,
    seats: int,
    heads: slice,
    group: int,
    shape: dict[str, Any],
) -> Selection:
    """An empty selection of a layer, on torch's device; see ``Selection.empty`` for ``shape``.

    Tokens that are selected at a step are not remembered, those that are kept of a prompt are.
    ``heads`` are the places of the layer's KV heads among all of the worker.
    """
    remembers = config.keeps_tokens or not config.token_major
    most = room.most_chosen(heads) if remembers else 1
    return Selection.empty(seats=seats, group=group, most_selected=most, **shape)


def usual_width(config: RetrievalConfig, room: Capacity, max_model_len: int) -> int:
    """Pages, or tokens, of the longest list of a step, but for drafts, and for tokens that follow
    a prompt of which some are kept."""
    limited = all(Need.HEADS not in method.needs for method in config.methods.values())
    everything = 0 if limited else -(-max_model_len // config.page_size)
    return max(config.budget_limit // config.slot_tokens, room.listed, everything)


def list_width(config: RetrievalConfig, room: Capacity, max_model_len: int, drafts: int) -> int:
    """Pages, or tokens, that lists have room for.

    They have it for drafts beyond the budget; where tokens are kept of prompts, and none is dropped
    after them, for all tokens of the longest context.
    """
    if any(m.observes and Need.DROPS_ALWAYS not in m.needs for m in config.methods.values()):
        return max_model_len
    usual = usual_width(config, room, max_model_len)
    return usual + -(-drafts // config.slot_tokens)


def make_workspace(
    config: RetrievalConfig,
    room: Capacity,
    shape: tuple[int, int, int],
    rows: int,
    max_model_len: int,
    device: torch.device,
    *,
    drafts: int,
    positions: bool = False,
) -> Workspace:
    """The workspace for layers with these KV heads, query heads per KV head, and channels."""
    kv_heads, group, head_size = shape
    finest = min([kind.entry_tokens for kind in config.index_kinds], default=config.page_size)
    pages = -(-max_model_len // config.page_size)
    finest = 1 if config.token_major else finest
    entries = pages * (config.page_size // finest)
    if config.keeps_tokens:  # nothing is scored before attention, which gives the scores of lists
        entries = room.most_chosen() if config.drops_tokens else 1
    return Workspace(
        rows=rows,
        kv_heads=kv_heads,
        group=group,
        queries=1 + drafts,
        head_size=head_size,
        entries=entries,
        width=list_width(config, room, max_model_len, drafts),
        usual=usual_width(config, room, max_model_len),
        page_size=config.slot_tokens,
        units=num_compute_units(device.index or 0),
        positions=positions,
        ahead=config.looks_ahead,
        outliers=any(method.outliers for method in config.methods.values()),
        device=device,
    )


def fixed_bytes(
    config: RetrievalConfig,
    roles: Mapping[str, Role],
    heads: RetrievalHeads,
    layers: Mapping[str, Any],
    rows: int,
    max_model_len: int,
    step_tokens: int,
    drafts: int,
) -> int:
    """Bytes of the state whose size does not depend on that of the KV cache.

    Args:
        config: Options of the engine.
        roles: Roles of the layers, by name.
        heads: The KV heads of the layers that retrieve.
        layers: vLLM's layers, by name.
        rows: Most rows of a step.
        max_model_len: Tokens of the longest context.
        step_tokens: Most tokens of a step.
        drafts: The most draft tokens of a row.
    """
    nowhere, total, shapes = torch.device("meta"), 0, set()
    impls = {name: getattr(layer, "impl", None) for name, layer in layers.items()}
    ours = {n: impl for n, impl in impls.items() if isinstance(impl, RetrievalAttentionImpl)}
    for name in retrieving(config, roles, ours):
        impl = ours[name]
        shapes.add((impl.num_kv_heads, impl.group, impl.head_size))
        shape = {"kv_heads": impl.num_kv_heads, "head_size": impl.head_size}
        with nowhere:
            dtype = layers[name].kv_cache_torch_dtype
            shape |= {"dtype": dtype}
            own = heads.places[name]
            selection = make_selection(config, heads.room, rows, own, impl.group, shape)
        assert selection.corrected is not None
        kept = selection.query, selection.chosen, selection.corrected
        total += sum(tensor.nbytes for tensor in kept)
        if config.drops_tokens:
            total += selection.chosen.numel() * torch.float32.itemsize  # ratings
    sizes = rows, max_model_len, nowhere
    made = (make_workspace(config, heads.room, shape, *sizes, drafts=drafts) for shape in shapes)
    total += sum(workspace.nbytes for workspace in made)
    if config.slow_home and shapes:
        entries = rows * max(shapes)[0] * list_width(config, heads.room, max_model_len, drafts)
        encoded, looks_ahead = config.encoding is not None, config.looks_ahead
        total += FarTier.list_bytes(entries, encoded=encoded, looks_ahead=looks_ahead)
    if config.keeps_tokens and shapes:
        of_layers = [places.stop - places.start for places in heads.places.values()]
        _, group, head_size = max(shapes)
        tokens = max_model_len + step_tokens
        total += watching_bytes(tokens, of_layers, group, head_size, dtype)
    return total
