"""The CPU worker with retrieval."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.logger import init_logger
from vllm.utils.mem_utils import format_gib
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvretrieval import compat
from vllm_kvretrieval.attention.cpu.impl import Durations, RetrievalAttentionImpl
from vllm_kvretrieval.attention.cpu.metadata import RetrievalMetadataBuilder
from vllm_kvretrieval.attention.cpu.staging import PrefillStaging, staging_for
from vllm_kvretrieval.attention.refusals import has_foreign_connector
from vllm_kvretrieval.engine.connector import RetrievalConnector
from vllm_kvretrieval.engine.cpu.choosers import Choosers
from vllm_kvretrieval.engine.cpu.drafting import connect_drafter
from vllm_kvretrieval.engine.cpu.heap import Heap
from vllm_kvretrieval.engine.cpu.planner import Planner
from vllm_kvretrieval.engine.cpu.refusals import check_layers, check_logits, check_reading
from vllm_kvretrieval.engine.cpu.start_log import log_start
from vllm_kvretrieval.engine.drafter import Drafter
from vllm_kvretrieval.engine.loads import FIELD, LoadedPages
from vllm_kvretrieval.engine.memory import least_of_workers
from vllm_kvretrieval.engine.reports import attach, has_requests
from vllm_kvretrieval.engine.requests import RequestTable
from vllm_kvretrieval.engine.running import notes
from vllm_kvretrieval.engine.sources import LayerSources, Sources
from vllm_kvretrieval.engine.usage import Counts
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.kernels import cpu
from vllm_kvretrieval.methods import EngineFacts, Layer, LayerFacts, connect_layers, layer_methods
from vllm_kvretrieval.methods.kept_prompts import LocalHeads
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.quantization.kernels import offer_kernels
from vllm_kvretrieval.retrieval.needs import CAPPED_LOGITS, UNKNOWN_KEYS
from vllm_kvretrieval.retrieval.seats import SEAT_FIELDS
from vllm_kvretrieval.storage.allocation import layers_at_home, move_kv_cache, shared_memory
from vllm_kvretrieval.storage.base import LayerCache, Storage
from vllm_kvretrieval.storage.huge_pages import new_memory_in_huge_pages, use_huge_pages
from vllm_kvretrieval.storage.layouts import chosen
from vllm_kvretrieval.storage.memory import Memory
from vllm_kvretrieval.storage.registry import make_storage
from vllm_kvretrieval.store.serving.halves import FIELD as STORE_FIELD
from vllm_kvretrieval.store.serving.halves import StoreStep
from vllm_kvretrieval.store.serving.identity import hashing_weights
from vllm_kvretrieval.store.serving.worker import WorkerStore
from vllm_kvretrieval.system_limits import SCARCE, explained
from vllm_kvretrieval.upstream.compiled import load_compiled, warm_up_briefly
from vllm_kvretrieval.upstream.mending import mend_model
from vllm_kvretrieval.upstream.primitives import keep_few_primitives
from vllm_kvretrieval.upstream.seeds import prompts_without_seeds
from vllm_kvretrieval.upstream.verifying import verify_as_asked

logger = init_logger("vllm.kvretrieval.worker")


class Group(NamedTuple):
    """Layers with plain full attention that share metadata.

    Attributes:
        builder: The metadata builder of the layers.
        staging: Where they lay out contexts of prompts; None: they read them where they are.
        names: Names of the layers that attend to parts of long contexts.
        all_names: Names of all.
    """

    builder: RetrievalMetadataBuilder
    staging: PrefillStaging | None
    names: list[str]
    all_names: list[str]


class RetrievalCPUWorker(CPUWorker):
    """vLLM's CPU worker; owns what retrieval keeps beside the KV cache.

    After vLLM has allocated the KV cache, every retrieval layer gets its page indexes and
    per-request state, and every metadata builder the table of running requests. With a slow
    home, the KV cache of these layers lies there, and each has a recall cache in fast memory.

    Attributes:
        planner: The worker's layers and heads, and the division of its memory.
        stored: The worker's half of the store; None without one.
        drafter: Our drafter; None without one.
        heap: What is freed of it goes back to the system.
    """

    stored: WorkerStore | None = None
    _hashes: Sequence[str] = ()
    drafter: Drafter | None = None
    _computed: StoreStep | None = None  # a step whose tokens have yet to be sampled

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = RetrievalConfig.from_vllm(self.vllm_config)
        assert config is not None, "this worker is chosen for retrieval backends only"
        self.retrieval_config = config
        self.planner = Planner(config, self.vllm_config, self.get_kv_cache_spec, self.rank)
        self.requests: RequestTable | None = None
        self.retrieval_layers: dict[str, RetrievalAttentionImpl] = {}
        self.storage: Storage = Memory()
        self.durations = Durations()
        self._told = Counts()
        self.heap = Heap()

    def load_model(self, **options: Any) -> None:
        """See ``CPUWorker.load_model``; with ``attention=vllm`` all is computed as vLLM does.

        With a store, the weights are hashed meanwhile.
        """
        keep_few_primitives()
        offer_kernels(first=self.planner.attention.own)
        with new_memory_in_huge_pages() as weights:
            if self.retrieval_config.store is None:
                super().load_model(**options)
            else:
                with hashing_weights() as self._hashes:
                    super().load_model(**options)
        logger.info("%s GiB of weights are in huge pages.", format_gib(weights.in_huge_pages))
        mend_model(model := self.model_runner.get_model(), self.planner.attention.own)
        if self.vllm_config.speculative_config is not None:
            verify_as_asked()
        self.planner.drafting = compat.layers_of_drafter(self.model_runner)
        load_compiled(model)

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache; see :meth:`Planner.divide`.

        The store is opened before: vLLM chooses the sizes of blocks when it has loaded the model.
        """
        if self.retrieval_config.store is not None:
            self.stored = self.planner.open_store(self._hashes)
        sized = self.cache_config.kv_cache_memory_bytes is not None
        alone = self.parallel_config.world_size_across_dp == 1
        if sized and alone and not self.model_runner.supports_mm_inputs:
            warm_up_briefly(self.model_runner)
        return self.planner.divide(super().determine_available_memory())

    def _allocate_kv_cache(self, kv_cache_config: Any, **options: Any) -> None:
        """Let the storage allocate the KV cache; replaces the model runner's method."""
        runner = self.model_runner
        allocated = compat.one_block(self.vllm_config, kv_cache_config)
        type(runner).initialize_kv_cache(runner, allocated, **options)
        blocks, homes = self.planner.blocks, self.planner.homes
        names, block_bytes = layers_at_home(kv_cache_config, homes)
        memories = self.storage.allocate(names, blocks * block_bytes)
        move_kv_cache(runner, kv_cache_config, homes, blocks, memories)
        compat.note_moved(runner)

    def _zero_blocks(self, block_ids: list[int]) -> None:
        """Fill blocks with zeros, in place of vLLM's V1 runner, which takes pages for blocks.

        Those in home need none: they never hold anything but keys and values of its layers.
        """
        layers = self.vllm_config.compilation_config.static_forward_context
        groups = self.model_runner.kv_cache_config.kv_cache_groups
        for number, group in enumerate(groups):
            if (
                isinstance(group.kv_cache_spec, FullAttentionSpec)
                and number not in self.planner.homes
            ):
                for name in group.layer_names:
                    pages = layers[name].kv_cache
                    pages.unflatten(0, (self.cache_config.num_gpu_blocks, -1))[block_ids] = 0

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        what = "kv_retrieval: the system refuses what the KV cache and what is beside it need"
        with explained(what, SCARCE):
            self._initialize(kv_cache_config)

    def _initialize(self, kv_cache_config: Any) -> None:
        config, planner = self.retrieval_config, self.planner
        planner.fit(kv_cache_config)
        self.storage = make_storage(config, planner.storage_facts())
        if self.storage.allocates:
            self.model_runner.initialize_kv_cache = self._allocate_kv_cache
        compat.zero_by(self.model_runner, self._zero_blocks, planner.tiers is not None)
        super().initialize_from_config(kv_cache_config)
        self._use_huge_pages()
        layers = self.vllm_config.compilation_config.static_forward_context
        groups = self._groups()
        isas = {group.builder.isa for group in groups}
        impls = [layers[name].impl for group in groups for name in group.names]
        capped, sinks = check_logits(planner, impls, isas)
        foreign = has_foreign_connector(self.vllm_config)
        check_reading(planner, isas, foreign)
        heads = sum(impl.num_kv_heads for impl in impls)
        full = sum(type(s) is FullAttentionSpec for s in planner.layer_specs.values())
        dense_share = 1 - len(impls) / full if full else 0.0
        if config.memory_fraction is not None:
            config.budget_of_share(0, dense_share, config.method)  # refuses what cannot be
        check_layers(planner, {name for group in groups for name in group.names})
        own_heads = LocalHeads(
            [*planner.retrieval_heads.values()], self._over_workers(ReduceOp.SUM)
        )
        self.requests = RequestTable(
            config,
            planner.seats,
            heads,
            planner.room,
            compat.rows(self.model_runner),
            dense_share,
            own_heads,
            planner.fixed_counts,
        )
        self.requests.prompt_reads = planner.prompt_reads
        lacks = {} if isas <= cpu.LAYOUTS.keys() else UNKNOWN_KEYS.lacks
        lacks = {**lacks, **(CAPPED_LOGITS.lacks if capped else {})}
        self.requests.plain = [known for known in SEAT_FIELDS if known.need in lacks]
        if config.sources:
            size = config.page_size
            numbers = [planner.layer_numbers[name] for name in planner.retrieval_heads]
            pages = -(-self.model_config.max_model_len // size)
            self.requests.sources = Sources(size, numbers, pages)
        self.requests.loaded = LoadedPages(self.cache_config.num_gpu_blocks) if foreign else None
        self.choosers = Choosers(planner, self.requests)
        for group in groups:
            for name in group.all_names:
                if name in group.names:
                    layout = cpu.TOKEN_MAJOR if config.token_major else group.builder.isa
                    self._attach(name, layers[name], layout, group.staging)
                else:
                    layers[name].impl.storage = self.storage.dense_layer(name)
            group.builder.attach(
                self.requests,
                config.page_size,
                group.staging,
                self.storage if group.names else Memory(),
                config.token_major or sinks or group.builder.isa in cpu.LAYOUTS,
                planner.attention.own,
            )
        self._connect(layers, groups)
        own = planner.attention.own
        self.drafter = connect_drafter(self.model_runner, self.requests, self.storage, own)
        if self.stored is not None:
            beside, storage = [*self._blocks_beside_home(layers)], self.storage
            others: list[torch.Tensor] = []
            if planner.split is not None:
                cache, at_home = self.model_runner.kv_cache_config, planner.names_at_home
                others = [*shared_memory(cache, layers, at_home)]
            caches, pages = storage.encoded_pages, storage.block_pages
            self.stored.attach(beside, storage.lost, caches, pages, others)
        if self._connected:
            store, lost = self.stored and self.stored.name, self.storage.lost.take
            split = self.planner.split
            get_kv_transfer_group().report(planner.seats, lost, self._take_stats, store, split)
        log_start(planner, [*self.retrieval_layers.values()], len(layers))

    def _groups(self) -> list[Group]:
        """The layers with plain full attention, by metadata builder."""
        stagings: dict[Any, PrefillStaging | None] = {}
        groups = []
        for group in itertools.chain.from_iterable(self.model_runner.attn_groups):
            builder = group.get_metadata_builder()
            # What is built around our backend (chunked attention, added sinks) is left as it is.
            plain = type(group.kv_cache_spec) is FullAttentionSpec
            if type(builder) is not RetrievalMetadataBuilder or not plain:
                continue
            if (layout := chosen(self.retrieval_config, builder.isa)) != builder.isa:
                builder.lay_out(layout)
            shape = (builder.num_kv_heads, builder.head_dim, builder.dtype)
            if shape not in stagings:
                stagings[shape] = self._staging(builder)
            names = self.planner.retrieving(group.layer_names)
            groups.append(Group(builder, stagings[shape], names, group.layer_names))
        return groups

    def _staging(self, builder: RetrievalMetadataBuilder) -> PrefillStaging | None:
        """The group's staging buffer; None where prompts are read in place."""
        tiers = self.planner.tiers
        if not self.planner.stages or (tiers is not None and not tiers.staging):
            return None
        return staging_for(
            (builder.num_kv_heads, builder.head_dim, builder.dtype),
            builder.isa,
            self.retrieval_config,
            not self.storage.in_place,
            self.model_config.model,
            self.model_config.max_model_len,
        )

    def _blocks_beside_home(self, layers: dict[str, Any]) -> Iterator[torch.Tensor]:
        """What fast memory has of each block: layers and page indexes, uint8 [blocks, n]."""
        planner = self.planner
        blocks = planner.blocks
        if planner.mixed and planner.tiers is None:
            yield from shared_memory(self.model_runner.kv_cache_config, layers)
        else:
            for name in planner.layer_numbers:
                if name not in (*self.storage.slow_layers, *planner.owners):
                    yield layers[name].kv_cache.view(torch.uint8).view(blocks, -1)
        for name in planner.own_layers:
            for index in self.retrieval_layers[name].indexes:
                yield index.records.view(blocks, -1)

    def _use_huge_pages(self) -> None:
        """For the KV cache in memory, of which a step reads scattered pages or tokens."""
        layers = self.vllm_config.compilation_config.static_forward_context
        specs = self.get_kv_cache_spec().items()
        full = [name for name, spec in specs if isinstance(spec, FullAttentionSpec)]
        slow = self.storage.slow_layers
        done = use_huge_pages(layers[n].kv_cache for n in full if n not in slow)
        logger.info("%s GiB of the KV cache are in huge pages.", format_gib(done))

    @property
    def _connected(self) -> bool:
        """Whether our connector reports to the scheduler and the front end."""
        return has_kv_transfer_group() and isinstance(get_kv_transfer_group(), RetrievalConnector)

    def _attach(self, name: str, layer: Any, layout: str, staging: PrefillStaging | None) -> None:
        """Make the layer a retrieval layer."""
        impl, kv_cache, planner = layer.impl, layer.kv_cache, self.planner
        tokens = kv_cache.numel() // kv_cache.shape[-1]
        if layout == cpu.TOKEN_MAJOR and tokens > torch.iinfo(torch.int32).max:
            raise RetrievalConfigError(
                f"{self.retrieval_config.method} selects single tokens, of which a layer's KV "
                f"cache has {tokens} (times KV heads), more than 31 bits number. Lower "
                "--kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE)."
            )
        assert self.requests is not None
        owner = self.retrieval_layers.get(planner.owners.get(name, ""))
        choosers = self.choosers.of(name, impl, kv_cache, layout, owner)
        cache = LayerCache(name, kv_cache, layout, cpu, self.requests.recalls)
        storage = self.storage.layer(cache) if owner is None else owner.storage
        number = [*planner.retrieval_heads].index(name)
        chunks = self.choosers.for_chunks(name, impl, kv_cache.dtype)
        facts = LayerFacts(
            number,
            cpu,
            storage,
            self.requests,
            impl.num_kv_heads,
            impl.scale,
            chunks,
            impl.logits_soft_cap,
            impl.learned_sinks,
        )
        impl.attach(layer_methods(facts, choosers), kv_cache, staging, storage, self.durations)
        self.retrieval_layers[name] = impl
        if self.requests.sources is not None:
            impl.sources = LayerSources(self.requests.sources, number)

    def _connect(self, layers: dict[str, Any], groups: Sequence[Group]) -> None:
        """Let layers know of each other."""
        config, planner = self.retrieval_config, self.planner
        isa = {name: group.builder.isa for group in groups for name in group.all_names}
        facts = EngineFacts(
            config=config,
            kernels=cpu,
            storage=self.storage,
            room=planner.room,
            roles=planner.roles,
            seats=planner.seats,
            most_chunks=planner.most_chunks if config.prefill_budget is not None else 0,
            over_workers=self._over_workers,
        )
        connect_layers(
            facts,
            {
                planner.layer_numbers[name]: Layer(
                    layers[name].impl, layers[name].kv_cache, isa[name]
                )
                for name in isa
                if name in planner.layer_numbers
            },
        )

    @staticmethod
    def _over_workers(by: ReduceOp.RedOpType) -> Callable[[torch.Tensor], object] | None:
        """How the heads of other workers are taken into account; None where there are none.

        Args:
            by: What becomes of each number of theirs.
        """
        workers = get_tp_group()
        if workers.world_size == 1:
            return None
        return lambda numbers: torch.distributed.all_reduce(numbers, by, workers.cpu_group)

    def compile_or_warm_up_model(self) -> Any:
        """See ``CPUWorker.compile_or_warm_up_model``, whose requests are not counted.

        It writes to nothing that a store keeps.
        """
        seats = least_of_workers(self.planner.seats)
        compat.bound_warm_up(self.model_runner, seats, writes=self.stored is None)
        times = super().compile_or_warm_up_model()
        if self.requests is not None:
            self.requests.take_counts()
            self._take_stats()
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        assert self.requests is not None
        finished, preempted = scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids
        if finished or preempted:
            seats = self.requests.release(finished, preempted or ())
            self.storage.leave(seats, [*finished, *(preempted or ())])
        scheduled = scheduler_output.num_scheduled_tokens
        if seats := self.requests.make_room(scheduled):
            self.storage.leave(seats, ())  # their blocks stay
        arrived = notes(scheduler_output, self.requests.notes)
        self.requests.begin_step(scheduled, scheduler_output.total_num_scheduled_tokens, arrived)
        if self.drafter is not None:
            self.drafter.begin_step(scheduler_output.scheduled_spec_decode_tokens, finished)
        self.storage.begin_step(scheduler_output)
        self._begin_stored(scheduler_output)
        self._copy_blocks(scheduler_output)
        if self.requests.loaded is not None:
            self.requests.loaded.begin_step(getattr(scheduler_output, FIELD, ()))
        output = self._compute(scheduler_output)
        self.requests.end_step()
        self.storage.end_step(scheduler_output.total_num_scheduled_tokens)
        if finished:
            self.heap.give_back()
        return output

    def _begin_stored(self, scheduler_output: Any) -> None:
        """Let the store follow a step; afterwards memory has all that the step relies on."""
        if self.stored is not None:
            self._computed = getattr(scheduler_output, STORE_FIELD, None)
            if self._computed is not None:
                self.stored.begin_step(self._computed)

    def _compute(self, scheduler_output: Any) -> Any:
        """A step of vLLM's worker; after it, the store takes what it has completed."""
        output = super().execute_model(scheduler_output)
        if output is not None:
            self._end_stored()
        return output

    def _end_stored(self) -> None:
        """Store what the last step has completed."""
        step, self._computed = self._computed, None
        if step is not None:
            assert self.stored is not None
            self.stored.end_step(step)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """See ``Worker.sample_tokens``; adds what was counted, if no connector of ours takes it.

        By then vLLM has asked what the step has lost, so the store may take what it completed.
        """
        with prompts_without_seeds(self.model_runner):
            output = super().sample_tokens(grammar_output)
        self._end_stored()
        if not self._connected and has_requests(output):
            return attach(output, self._over_tensor_parallel(self._take_stats()))
        return output

    def _over_tensor_parallel(self, counts: dict[str, int]) -> dict[str, int]:
        """The sums over all workers with parts of the same layers; only one is asked for them."""
        if (add := self._over_workers(ReduceOp.SUM)) is None:
            return counts
        sums = torch.tensor([*counts.values()])
        add(sums)
        return dict(zip(counts, sums.tolist(), strict=True))

    def _take_stats(self) -> dict[str, int]:
        """What was counted since the last call; see ``engine/metrics.py``."""
        assert self.requests is not None
        now, usage = self.requests.counts(), self.storage.usage
        new = Counts(*(after - before for after, before in zip(now, self._told, strict=True)))
        self._told = now
        return {
            "units_attended": new.attended,
            "units_in_context": new.pages * self.requests.retrieval_heads,
            "tokens_read": new.attended * self.retrieval_config.page_size,
            "heads_decoded": new.sparse_steps * self.requests.retrieval_heads,
            "heads_corrected": new.corrected,
            "units_looked_up": new.looked_up,
            "units_missed": new.missed,
            "bytes_recalled": new.recalled * usage.bytes_per_read,
            "prompt_pairs": new.prompt,
            "prompt_pairs_skipped": new.prompt - new.prompt_attended,
            **self.durations.take(),
            **({} if self.stored is None else self.stored.take_counts()),
            f"slots_used/{self.rank}": usage.used,
            f"slots/{self.rank}": usage.slots,
        }

    def retrieval_sources(self, request_id: str) -> dict[str, Any] | None:
        """What the answer of a request has attended to; see :meth:`Sources.told`.

        vLLM's front end calls it by name.
        """
        assert self.requests is not None
        sources = self.requests.sources
        return None if sources is None else sources.told(request_id)

    def _copy_blocks(self, scheduler_output: Any) -> None:
        """Copy what vLLM does not, of the blocks that it copies on write: index entries, and home's
        layers where the other groups have blocks of their own."""
        copies = scheduler_output.kv_cache_block_copies or ()
        known = [pair for pair in copies if pair[1] < self.planner.blocks]
        if not known:
            return
        parts = [index.records for i in self.retrieval_layers.values() for index in i.indexes]
        if self.planner.split is not None:
            layers = self.vllm_config.compilation_config.static_forward_context
            parts += [layers[name].kv_cache for name in self.planner.names_at_home]
            others = [pair for pair in copies if pair[1] >= self.planner.blocks]
            scheduler_output.kv_cache_block_copies = others or None
        source, target = torch.tensor(known).unbind(1)
        for part in parts:
            blocks = part.view(self.planner.blocks, -1)
            blocks[target] = blocks[source]

    def store_name(self) -> str | None:
        """The name of the worker's store; None without one."""
        return None if self.stored is None else self.stored.name

    def shutdown(self) -> None:
        """See ``Worker.shutdown``; before, the store gets what it has yet to get."""
        if self.stored is not None:
            self.stored.close()
        super().shutdown()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """See ``Worker.reload_weights``; refused with a store."""
        self._check_weights_stay()
        super().reload_weights(*args, **kwargs)

    def reset_weights(self) -> None:
        """See ``Worker.reset_weights``; refused with a store."""
        self._check_weights_stay()
        super().reset_weights()

    def update_weights(self, update_info: Any) -> None:
        """See ``Worker.update_weights``; refused with a store."""
        self._check_weights_stay()
        super().update_weights(update_info)

    def _check_weights_stay(self) -> None:
        if self.stored is not None:
            raise RetrievalConfigError(
                "kv_retrieval.store holds keys and values of the weights that the server has "
                "started with, which therefore cannot change. Start it anew with the others, or "
                "without a store."
            )
