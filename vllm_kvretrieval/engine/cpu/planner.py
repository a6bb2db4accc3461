"""What a worker of vLLM's CPU platform serves, and how it divides its memory."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info
from vllm.utils.mem_utils import format_gib
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvretrieval import compat
from vllm_kvretrieval.attention.cpu.refusals import Choice, choose_attention
from vllm_kvretrieval.attention.cpu.staging import blocks_for
from vllm_kvretrieval.engine.block_pools import Split
from vllm_kvretrieval.engine.layers import number_layers
from vllm_kvretrieval.engine.memory import (
    bytes_per_block,
    cache_with_slow_home,
    check_retrieving,
    check_scheduler_knows,
    least_of_workers,
    requests_at_once,
    workers_here,
)
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.methods import WorkSize, scratch_bytes
from vllm_kvretrieval.methods.page_chunks import PromptReads, is_late
from vllm_kvretrieval.methods.prompt_chunks import ChunkPlanner
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.capacity import Capacity
from vllm_kvretrieval.retrieval.layers import full_attention_layers, retrieving_layers
from vllm_kvretrieval.retrieval.needs import SHARED_KV
from vllm_kvretrieval.retrieval.roles import Role, stage_roles
from vllm_kvretrieval.retrieval.shares import own_heads
from vllm_kvretrieval.storage.allocation import home_groups
from vllm_kvretrieval.storage.base import StorageFacts
from vllm_kvretrieval.storage.registry import slow_kind
from vllm_kvretrieval.storage.tier_sizes import Cache, Tiers
from vllm_kvretrieval.store.disk.groups import GROUPS, HASH_SIZE
from vllm_kvretrieval.store.disk.store import WorkerShare
from vllm_kvretrieval.store.serving.groups import described
from vllm_kvretrieval.store.serving.identity import identity_of
from vllm_kvretrieval.store.serving.worker import WorkerStore, geometry_of

logger = init_logger("vllm.kvretrieval.memory")


class Planner:
    """The layers and heads of a worker, and the sizes of what it keeps for them.

    Args:
        config: Options of the engine.
        vllm_config: vLLM's configuration.
        get_specs: Returns vLLM's KV cache specs of the worker's layers.
        rank: The worker's number.

    Attributes:
        drafting: Names of the layers of a draft model, which attend to everything.
        tiers: Sizes with a slow home; None without one, or as long as nothing is planned.
        homes: Numbers of vLLM's groups of layers in it; none without one.
        names_at_home: Names of the layers of these groups.
        stored: The store that holds the slow home; None without one.
    """

    def __init__(
        self,
        config: RetrievalConfig,
        vllm_config: Any,
        get_specs: Callable[[], dict[str, Any]],
        rank: int,
    ) -> None:
        self.retrieval_config, self.vllm_config = config, vllm_config
        self.get_kv_cache_spec, self.rank = get_specs, rank
        self.model_config, self.cache_config = vllm_config.model_config, vllm_config.cache_config
        self.parallel_config = vllm_config.parallel_config
        self.scheduler_config = vllm_config.scheduler_config
        self.drafting: frozenset[str] = frozenset()
        self.tiers: Tiers | None = None
        self.homes: tuple[int, ...] = ()
        self.names_at_home: list[str] = []
        self._home_block = 0
        self.stored: WorkerStore | None = None

    def divide(self, available: int) -> int:
        """Bytes for the KV cache, less what page index, staging and scratch take of them.

        Without a slow home, a KV cache size that the user fixed is left as it is, and the others
        come on top. With one, all of them share that size, and these are the bytes of all blocks
        that home holds, wherever their layers lie and however they are encoded.

        Args:
            available: Bytes that vLLM finds for the KV cache.

        Raises:
            RetrievalConfigError: Nothing would be retrieved, or memory does not suffice.
        """
        specs = self.get_kv_cache_spec()
        check_retrieving(self.vllm_config, specs, self.retrieval_config, self.retrieving)
        staging, scratch = self.staging_bytes(), self.scratch_bytes()
        self.tiers = self.plan_tiers(available - scratch, staging)
        if not specs:
            return available  # a stage of a pipeline without attention
        block, index = bytes_per_block(
            self.vllm_config, specs, self.retrieval_config, self.retrieving
        )
        if self.tiers is not None:
            return self.tiers.all_blocks * block
        if self.cache_config.kv_cache_memory_bytes is None:
            available = (available - staging - scratch) * block // (block + index)
        else:
            self.check_memory(available, available * index // block, staging + scratch)
        if self.stored is None:
            return available
        wanted = self.cache_config.num_gpu_blocks_override
        return self.stored.memory_for(available, block, wanted)

    def check_memory(self, cache: int, index: int, working: int) -> None:
        """Find out at once, not under load, that memory does not suffice."""
        node = get_memory_node_info(get_allowed_cpu_list()[0].numa_node)
        if cache + index + working > node.available_memory:
            raise RetrievalConfigError(
                f"{self.retrieval_config.method} needs a page index of {format_gib(index)} GiB and "
                f"{format_gib(working)} GiB for prefill and scores beside a KV cache of "
                f"{format_gib(cache)} GiB, but {format_gib(node.available_memory)} GiB of memory "
                "are available. Lower --kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE) or "
                "--max-model-len, or use kv_retrieval.home=disk."
            )

    def plan_tiers(self, fast: int, staging: int) -> Tiers | None:
        """Sizes with a slow home, given so many bytes of fast memory; None without one."""
        config = self.retrieval_config
        if not config.slow_home or (cache := self.cache_at_home()) is None:
            return None
        self._home_block = cache.block_size
        if config.home == "auto" and cache.fits_in(fast - staging, config):
            return None
        try:
            return self._plan_home(config, cache, fast, staging)
        except RetrievalConfigError as error:
            if config.home != "auto":
                raise
            logger.warning("home=auto: the KV cache stays in memory. In a file: %s", error)
            return None

    def cache_at_home(self) -> Cache | None:
        """The KV cache that a slow home would hold; None: it cannot, and the home is ``auto``.

        Raises:
            RetrievalConfigError: It cannot, and the home is not ``auto``.
        """
        config = self.retrieval_config
        specs = self.get_kv_cache_spec()
        cache = cache_with_slow_home(self.vllm_config, specs, config, self.retrieving)
        if cache is None:
            return None
        if self.owners:
            methods, named = config.methods.values(), f"home={config.home!r} of layers whose keys "
            served = all(map(SHARED_KV.serves, methods)) and config.encoding is None
            if config.home == "auto" and not served:
                return None
            SHARED_KV.check(methods, named + "others read")
            if config.encoding is not None:
                raise RetrievalConfigError(
                    f"kv_retrieval.codec={config.codec} encodes pages once their own layer has "
                    f"attended to them, and other layers of {self.model_config.model} read them "
                    "later in a step (cross-layer KV sharing). Use codec=raw, or home=device."
                )
        return replace(cache, attended=self._attended(cache.kv_heads))

    def _plan_home(self, config: RetrievalConfig, cache: Cache, fast: int, staging: int) -> Tiers:
        """Sizes of a slow home; raises RetrievalConfigError as ``Tiers.plan``, and where it has too
        little room."""
        blocks, plan = self.cache_config.num_gpu_blocks_override, slow_kind(config).plan
        assert plan is not None, "home=device has no sizes"
        if self.stored is not None and self.stored.blocks is not None:
            blocks = self.stored.blocks_for(cache, config, blocks)
            streams = self.stored.has_dense(cache)
            tiers = Tiers.plan(config, cache, fast, staging, blocks, streams_dense=streams)
        else:
            tiers = plan(config, cache, fast, staging, blocks, workers_here(self.vllm_config))
        check_scheduler_knows(self.vllm_config, tiers.seats)
        return tiers

    def open_store(self, hashes: Sequence[str]) -> WorkerStore:
        """Open the store of the model that has been loaded.

        Args:
            hashes: Those of the weights of the models that were loaded.

        Raises:
            RetrievalConfigError: The store cannot keep what this model computes.
        """
        config, directory = self.retrieval_config, self.retrieval_config.store
        assert directory is not None
        if len(hashes) != 1:
            load_format = self.vllm_config.load_config.load_format
            raise RetrievalConfigError(
                f"kv_retrieval.store cannot tell which weights load_format={load_format} has "
                "loaded; use load_format=auto, or leave the store out."
            )
        weights = [""] * self.parallel_config.tensor_parallel_size
        torch.distributed.all_gather_object(weights, hashes[0], get_tp_group().cpu_group)
        layers = self.retrieving(self.layer_numbers)
        identity = identity_of(self.vllm_config, config, layers, weights)
        identity["attention_own"] = self.attention.own
        if self.mixed:
            groups = compat.kv_cache_groups(self.vllm_config, self.get_kv_cache_spec())
            identity[GROUPS] = described(groups, self.model_config.model)
            identity[HASH_SIZE] = compat.hash_size(self.vllm_config, groups)
        self.stored = WorkerStore(directory, identity, WorkerShare(self.rank, len(weights)))
        return self.stored

    def storage_facts(self) -> StorageFacts:
        """What the worker's storage is made for."""
        tiers, stored = self.tiers, self.stored
        facts = StorageFacts(self.own_layers, tiers, self.block_size, groups=self.homes)
        if tiers is None or stored is None:
            return facts
        return replace(facts, stored=lambda layers: stored.file(geometry_of(tiers, layers)))

    def fit(self, kv_cache_config: Any) -> None:
        """Take what vLLM has decided: the number of blocks, and the groups of layers."""
        if self.tiers is None:
            return
        others = least_of_workers(self.tiers.other_blocks)  # all have to divide the blocks alike
        self.tiers = replace(self.tiers, other_blocks=others).of(kv_cache_config.num_blocks)
        self.homes = home_groups(kv_cache_config, self.retrieval_heads)
        groups = [kv_cache_config.kv_cache_groups[home] for home in self.homes]
        self.names_at_home = [name for group in groups for name in group.layer_names]

    @property
    def split(self) -> Split | None:
        """The division of vLLM's blocks, if not all groups of layers lie in home."""
        if self.tiers is None or not self.tiers.other_blocks:
            return None
        return Split(self.homes, self.tiers.blocks, self.tiers.other_blocks)

    @property
    def block_size(self) -> int:
        """Tokens of a block of the retrieval layers; with a slow home, vLLM's groups may differ."""
        return self.cache_config.block_size if self.tiers is None else self._home_block

    @property
    def blocks(self) -> int:
        """Blocks of the retrieval layers."""
        blocks = self.cache_config.num_gpu_blocks
        return blocks if self.tiers is None else self.tiers.blocks

    @functools.cached_property
    def mixed(self) -> bool:
        """Whether some layers have no plain full attention."""
        specs = self.get_kv_cache_spec().values()
        return any(type(spec) is not FullAttentionSpec for spec in specs)

    @property
    def seats(self) -> int:
        """Most requests that run at once."""
        return requests_at_once(self.vllm_config) if self.tiers is None else self.tiers.seats

    @functools.cached_property
    def owners(self) -> dict[str, str]:
        """Layers that read the cache of another layer (cross-layer KV sharing), and that layer."""
        layers = self.vllm_config.compilation_config.static_forward_context.items()
        read = ((n, getattr(layer, "kv_sharing_target_layer_name", None)) for n, layer in layers)
        return {name: owner for name, owner in read if owner is not None}

    @functools.cached_property
    def layer_specs(self) -> dict[str, Any]:
        """vLLM's KV cache specs of the model's layers, with those that read another one's cache."""
        specs = self.get_kv_cache_spec()
        specs = specs | {name: specs[owner] for name, owner in self.owners.items()}
        return {name: spec for name, spec in specs.items() if name not in self.drafting}

    @functools.cached_property
    def retrieval_heads(self) -> dict[str, slice]:
        """The places of a layer's KV heads among those of all retrieval layers, layer after
        layer."""
        specs = self.layer_specs
        heads, first = dict[str, slice](), 0
        for name in self.retrieving(self.layer_numbers):
            heads[name] = slice(first, first + specs[name].num_kv_heads)
            first = heads[name].stop
        return heads

    @functools.cached_property
    def room(self) -> Capacity:
        """How many units requests get of the KV heads of this worker."""
        heads, part = self._all_heads
        longest, drafts = self.model_config.max_model_len, self.vllm_config.num_speculative_tokens
        return Capacity(self.retrieval_config, heads, longest, part, drafts)

    @functools.cached_property
    def fixed_counts(self) -> dict[str, torch.Tensor]:
        """How many pages KV heads select by methods that fix it; see ``RequestTable.fixed``."""
        own = own_heads(*self._all_heads)
        layers = [self.layer_numbers[name] for name in self.retrieval_heads]
        fixed = {
            name: method.fixed_counts(self.model_config, layers)
            for name, method in self.retrieval_config.methods.items()
        }
        return {
            n: torch.from_numpy(counts[own]) for n, counts in fixed.items() if counts is not None
        }

    @functools.cached_property
    def late_layers(self) -> frozenset[str]:
        """The retrieval layers that lie behind ``prefill_depth``."""
        config, layers = self.retrieval_config, self.model_config.get_total_num_hidden_layers()
        number_of = self.layer_numbers
        return frozenset(n for n in self.retrieval_heads if is_late(config, number_of[n], layers))

    @functools.cached_property
    def prompt_shares(self) -> dict[str, torch.Tensor]:
        """By layer, float64 [ONE_IN, KV heads]: shares in the selected part of ``prefill_budget``.

        Empty: they are equal everywhere.
        """
        config, model, own = self.retrieval_config, self.model_config, self.retrieval_heads
        if config.prompt_shares is None or not own:
            return {}
        numbers = [self.layer_numbers[name] for name in own]
        # Of all stages of a pipeline, where the model's configuration names their layers.
        model_layers = full_attention_layers(model) or numbers
        count = model.get_total_num_hidden_layers()
        early = [
            number
            for number in retrieving_layers(model_layers, self.roles, config.dense_layers)
            if not is_late(config, number, count)
        ]
        shares = config.prompt_shares.of(model, numbers, early)
        if (shares == 1).all():
            return {}
        if shares[0].size != sum(self._all_heads[0]):
            raise RetrievalConfigError(
                f"kv_retrieval.prefill_budget_shares: layers of {model.model} have different "
                "numbers of KV heads, which files and lists of shares do not know; use uniform."
            )
        mine = shares.reshape(len(shares), -1)[:, own_heads(*self._all_heads)]
        return {name: torch.from_numpy(mine[:, place]) for name, place in own.items()}

    @property
    def prompt_reads(self) -> PromptReads:
        """How the KV heads of this worker read prompts that retrieve."""
        own, shares = self.retrieval_heads, self.prompt_shares
        if not own:
            return PromptReads()
        heads = {name: place.stop - place.start for name, place in own.items()}
        total, late = sum(heads.values()), sum(heads[name] for name in self.late_layers)
        if not shares:
            return PromptReads(late / total)
        early = [shares[name] for name in own.keys() - self.late_layers]
        return PromptReads(late / total, torch.cat(early, 1).T.numpy())

    @property
    def _all_heads(self) -> tuple[list[int], tuple[int, int]]:
        """KV heads of each retrieval layer, and which part of how many this worker has of them."""
        size = self.parallel_config.tensor_parallel_size
        copies = max(1, size // self.model_config.get_total_num_kv_heads())  # of each KV head
        part = self.rank % size // copies, size // copies
        own = [heads.stop - heads.start for heads in self.retrieval_heads.values()]
        return [count * part[1] for count in own], part

    def _attended(self, kv_heads: int) -> tuple[int, ...]:
        """The most that a request attends to in each retrieval layer; see ``Cache.attended``.

        Layers that read another one's cache attend to the same slots.
        """
        counts = self.room.attended.reshape(-1, kv_heads).sum(1).tolist()
        attended = dict.fromkeys(self.own_layers, 0)
        for name, count in zip(self.retrieval_heads, counts, strict=True):
            attended[self.owners.get(name, name)] += count
        return tuple(attended.values())

    @property
    def own_layers(self) -> list[str]:
        """The retrieval layers that have a cache of their own."""
        return [name for name in self.retrieval_heads if name not in self.owners]

    @functools.cached_property
    def roles(self) -> dict[int, Role]:
        """The roles of the layers with plain full attention; empty if each selects for itself."""
        config, model = self.retrieval_config, self.model_config
        numbers = self.layer_numbers.values()
        if self.parallel_config.pipeline_parallel_size == 1:
            return config.roles(model, numbers)
        layers = full_attention_layers(model)
        roles = config.roles(model, numbers if layers is None else layers)
        return stage_roles(roles, numbers) if roles else roles

    @functools.cached_property
    def layer_numbers(self) -> dict[str, int]:
        """The numbers in the model of the layers with plain full attention, rising."""
        return number_layers(self.vllm_config, self.layer_specs, self.retrieval_config)

    def retrieving(self, names: Iterable[str]) -> list[str]:
        """Layers that attend to parts of long contexts."""
        numbers, dense_layers = self.layer_numbers, self.retrieval_config.dense_layers
        found = {*retrieving_layers(numbers.values(), self.roles, dense_layers)}
        owner = self.owners.get
        return [n for n in names if {numbers.get(n), numbers.get(owner(n, n))} <= found]

    @property
    def most_chunks(self) -> int:
        """Most chunks of prompts in a step."""
        tokens = self.scheduler_config.max_num_batched_tokens
        return ChunkPlanner(self.retrieval_config).most(tokens, requests_at_once(self.vllm_config))

    @property
    def most_chunk_pages(self) -> int:
        """Most pages before one of them that it attends to."""
        divisor, longest = ChunkPlanner(self.retrieval_config), self.model_config.max_model_len
        return divisor.most_attended(longest, self.prompt_reads.highest)

    @property
    def stages(self) -> bool:
        """Whether something has to be laid out for prompts, see PrefillStaging.

        Our own kernels read every layout, but nothing that is encoded, nor tokens that another
        layer has selected for a chunk.
        """
        config = self.retrieval_config
        chunks = config.prefill_budget is not None and config.prefill_queries is None
        copied = config.encoding is not None or chunks
        return copied or not self.attention.own

    @functools.cached_property
    def attention(self) -> Choice:
        """Whose kernel attends to whole contexts."""
        model = self.model_config
        return choose_attention(self.retrieval_config, model.dtype, model.get_head_size())

    def scratch_bytes(self) -> int:
        """Bytes of the memory in which layers choose; see :meth:`Family.scratch_bytes`."""
        model, config = self.model_config, self.retrieval_config
        pages = config.prefill_queries is not None
        size = WorkSize(
            scratch=cpu.scratch_bytes,
            tokens=model.max_model_len,
            heads=model.get_num_attention_heads(self.parallel_config),
            kv_heads=model.get_num_kv_heads(self.parallel_config),
            head_size=model.get_head_size(),
            dtype=model.dtype,
            rows=requests_at_once(self.vllm_config),
            chunks=self.most_chunks if pages else 0,
            chunk_queries=config.prefill_queries or 0,
            chunk_pages=self.most_chunk_pages if pages else 0,
        )
        return scratch_bytes(config.methods.values(), size)

    def staging_bytes(self) -> int:
        """One layer's keys and values of the longest context, in blocks; see PrefillStaging."""
        if not self.stages:
            return 0
        model = self.model_config
        width = 2 * model.get_head_size() * model.dtype.itemsize
        blocks, size = blocks_for(model.max_model_len, self.retrieval_config.page_size)
        return blocks * size * model.get_num_kv_heads(self.parallel_config) * width
