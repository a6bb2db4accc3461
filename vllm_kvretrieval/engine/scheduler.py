"""vLLM's scheduler with additions.

It knows how exact the blocks of the prefix cache are, runs no more requests at once than the
workers have room for, tells the workers which blocks a KV connector loads, keeps what requests have
asked to keep when they end, and passes on what workers count.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from vllm_kvretrieval.engine.block_pools import Split, divide
from vllm_kvretrieval.engine.chunk_scheduler import ChunkScheduler, tokens_to_read
from vllm_kvretrieval.engine.connector import RetrievalConnector
from vllm_kvretrieval.engine.exactness import Exactness, ExactnessRules
from vllm_kvretrieval.engine.loads import LoadReports
from vllm_kvretrieval.engine.reports import put
from vllm_kvretrieval.engine.retained import RetainedBlocks
from vllm_kvretrieval.engine.running import read_options
from vllm_kvretrieval.options.of_sessions import stored_name
from vllm_kvretrieval.options.request import RequestOptions, RequestReader
from vllm_kvretrieval.retrieval.exactness_levels import NEVER, BlockLevels, Level, Taint
from vllm_kvretrieval.store.disk.contexts import PINNED_SHARE
from vllm_kvretrieval.store.serving.blocks import Blocks
from vllm_kvretrieval.store.serving.groups import numbers_of
from vllm_kvretrieval.store.serving.scheduler import Arrivals, SchedulerStore

logger = init_logger("vllm.kvretrieval.scheduler")


@dataclass(slots=True)
class Context:
    """The context of a request, from its last look-up in the prefix cache on.

    Attributes:
        request: The request.
        params: The sampling parameters that ``exactness`` was read from. The next input of a
            session may bring others.
        exactness: What follows from the options of the request.
        taint: The end of the exact part of the context.
        arrived: The request's number in the order of arrivals.
        ends: Tokens that are read, and not decoded; see :attr:`Note.tokens`.
        noted: For each group of layers, how many of the first blocks need no more notes.
        calm: A position. A step of one token before it changes neither ``taint`` nor ``noted``.
    """

    request: Request
    params: Any
    exactness: Exactness
    taint: Taint
    arrived: int
    ends: int
    noted: list[int]
    calm: int = 0


class RetrievalScheduler(ChunkScheduler):
    """vLLM's scheduler with a :class:`Level` for every block of the prefix cache.

    A request shares a prefix up to the first block that is less exact than it would be, were it the
    request's own. vLLM gives a block its hash, and so lets other requests find it, before the step
    that writes the block. So levels are noted when a step has been scheduled, and also whenever a
    request is looked up in the prefix cache while a step is being scheduled.

    Workers find out how many requests they have room for after the scheduler's configuration has
    been made. They tell the connector, which calls :meth:`_limit` before the first request comes.
    """

    max_num_running_reqs: int
    max_num_active_reqs: int
    num_lookahead_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The model's own drafts are written behind the tokens of a step.
        self.num_lookahead_tokens = max(self.num_lookahead_tokens, self.retrieval.drafts)
        self.levels = BlockLevels()
        self._rules, self._reader = ExactnessRules(self.retrieval), RequestReader(self.retrieval)
        self._managers = self.kv_cache_manager.coordinator.single_type_managers
        self._specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        self._order = numbers_of(self._specs)
        self._contexts: dict[str, Context] = {}
        self._arrivals = Arrivals()
        # If so, the last block of a prompt has a hash before it is full.
        self._has_partial = any(m.block_size > self.hash_block_size for m in self._managers)
        # The step being scheduled, and how many of the running requests have provisional notes.
        self._looked_at = (0, 0)
        self._store: SchedulerStore | None = None
        self._homes = tuple(range(len(self._managers)))  # groups of layers in a slow home
        self._output: Any = None  # of the workers, while it is taken up
        if isinstance(self.connector, RetrievalConnector):
            self.connector.limit_by(self._limit)
            self.connector.divide_by(self._divide)
            self.connector.restore_by(self._restore)
        # Another connector may load into the cache.
        self._loads: LoadReports | None = None
        if self.connector is not None and not isinstance(self.connector, RetrievalConnector):
            self._loads = LoadReports(self._managers)

    def _limit(self, seats: int) -> None:
        """Run at most ``seats`` requests at once, and log it, as a warning if the user has asked
        for more."""
        wanted = self.max_num_active_reqs
        self.max_num_running_reqs = min(self.max_num_running_reqs, seats)
        self.max_num_active_reqs = min(wanted, seats)
        pool = self.kv_cache_manager.block_pool
        tokens = (
            (pool.num_gpu_blocks - 1)
            // len(self._homes)
            * self._managers[self._homes[0]].block_size
        )
        if seats >= wanted:
            logger.info("KV retrieval: %d requests at once, %d tokens of home.", wanted, tokens)
            return
        logger.warning(
            "KV retrieval: %d requests at once in place of the %d that --max-num-seqs allows, and "
            "%d tokens of home, since fast memory has no room for more; other requests wait. For "
            "more of them give the KV cache more memory (--kv-cache-memory-bytes), or lower "
            "kv_retrieval.budget (or max_budget), kv_retrieval.home_bytes or --max-model-len.",
            seats,
            wanted,
            tokens,
        )

    def _divide(self, split: Split) -> None:
        """Give groups of layers that do not lie in the slow home blocks of their own."""
        self._homes = split.homes
        divide(self.kv_cache_manager.coordinator, split)

    def update_from_output(self, scheduler_output: SchedulerOutput, output: Any) -> Any:
        """See ``Scheduler.update_from_output``."""
        self._output = output
        return super().update_from_output(scheduler_output, output)

    def _handle_invalid_blocks(self, invalid_block_ids: set[int], *args: Any) -> set[str]:
        """The requests that hold lost blocks, which fail; see vLLM's scheduler.

        That one serves models with a single group of layers. No two groups have the same block.
        """
        if len(self._managers) == 1:
            failed: set[str] = super()._handle_invalid_blocks(invalid_block_ids, *args)
            return failed
        failed = set()
        for request in self.running:
            by_group = self.kv_cache_manager.get_block_ids(request.request_id)
            if not invalid_block_ids.isdisjoint(itertools.chain(*by_group)):
                failed.add(request.request_id)
                for manager, blocks in zip(self._managers, by_group, strict=True):
                    manager.block_pool.evict_blocks({*blocks})
        return failed

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics of a step, with what the workers have counted."""
        stats = super().make_stats(*args, **kwargs)
        put(self._output, stats)
        self._output = None
        return stats

    @functools.cached_property
    def _blocks(self) -> Blocks:
        """vLLM's blocks; they are divided when the first request comes."""
        longest = [
            -(-spec.max_memory_usage_bytes(self.vllm_config) // spec.page_size_bytes)
            for spec in self._specs
        ]
        return Blocks([manager.block_pool for manager in self._managers], longest)

    @functools.cached_property
    def _retained(self) -> RetainedBlocks:
        """What requests have asked to keep for a time."""
        return RetainedBlocks(self._blocks, 0 if self.retrieval.store is None else PINNED_SHARE)

    def _restore(self, name: str) -> SchedulerStore:
        """Put the blocks of the store with this name into the prefix cache."""
        assert self.retrieval.store is not None
        self._store = SchedulerStore(
            self.retrieval.store,
            name,
            self._blocks,
            self.levels,
            self._arrivals,
            self.retrieval.store_days,
            self._specs if len(self._specs) > 1 else (),
            self._retained,
        )
        return self._store

    def add_request(self, request: Request) -> None:
        """See ``Scheduler.add_request``; what others asked the store for before is done first."""
        if self._store is not None:
            self._store.tend()
        if request.request_id not in self.requests:  # no further input of a session
            self._arrivals.note(request.request_id)
        super().add_request(request)
        if self.retrieval.sessions and (ahead := self._options(request).hints.prefetch) is not None:
            assert self._store is not None, "the front end and the reader of options ask for one"
            self._store.read_ahead(stored_name(ahead, request.cache_salt))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """See vLLM's scheduler; what a request has asked to keep is kept before its blocks go."""
        if self.retrieval.sessions:
            self._keep(request)
        return super()._free_request(request, *args, **kwargs)

    def _keep(self, request: Request) -> None:
        """Pin and retain the context of a request that has ended, if it has asked for that."""
        session, pin, seconds, _ = self._options(request).hints
        name = None if session is None else stored_name(session, request.cache_salt)
        held = [manager.req_to_blocks.get(request.request_id, ()) for manager in self._managers]
        if seconds is not None:
            cached = [block.block_id for blocks in held for block in blocks if block.block_hash]
            self._retained.hold(name or request.request_id, cached, seconds)
        if pin is not None:
            assert self._store is not None, "see above"
            assert name is not None, "the reader of options asks for one"
            if pin:
                self._store.pin_session(name, request, held[self._order[0]])
            else:
                self._store.unpin_session(name)

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """The blocks of the prefix cache that a request shares; see vLLM's scheduler."""
        self._note_running()
        exactness = self._read(request)
        if not exactness.reads_cache:
            request.skip_reading_prefix_cache = True
        if self._store is not None:
            self._store.tend()  # what is forgotten or damaged is not found
        blocks, tokens, *rest, diverged = super()._get_local_prefix_cache_hit(
            request, *args, **kwargs
        )
        manager = self.kv_cache_manager
        if diverged:  # vLLM would look up a hit that all groups share later, without asking here
            blocks, tokens, *rest = manager.get_computed_blocks(request, *args, **kwargs)
        found = tokens
        shared, taint = self._look(blocks, exactness.tolerance)
        while (shared := min(shared, self._begin_of_chunk(request, tokens))) < tokens:
            by_group, tokens, _ = manager.coordinator.find_longest_cache_hit(
                request.block_hashes, shared
            )
            blocks = manager.create_kv_cache_blocks(by_group)
            shared, taint = self._look(blocks, exactness.tolerance)
        if tokens < found:
            logger.debug(
                "kv_retrieval request_id=%s shares %d of %d tokens found in the prefix cache: the "
                "others are approximate",
                request.request_id,
                tokens,
                found,
            )
        if self._store is not None:
            self._store.note_hit(request, blocks.blocks)
        if self._loads is not None:
            self._loads.note_hit(request, tokens)
        noted = [tokens // group.block_size for group in self._managers]
        arrived = self._arrivals.of(request.request_id)
        self._contexts[request.request_id] = Context(
            request,
            request.sampling_params,
            exactness,
            taint,
            arrived,
            tokens_to_read(request),
            noted,
        )
        return blocks, tokens, *rest, False

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Note how exact contexts are after the step, before vLLM counts its tokens."""
        for copy in scheduler_output.kv_cache_block_copies or ():
            self.levels.copy(copy.src_block_id, copy.dst_block_id)
        if self.retrieval.sessions:
            self._retained.tend()
        if self._loads is not None:
            self._loads.attach(scheduler_output)
        if self._store is not None:
            self._store.begin_step(scheduler_output)
        contexts = self._contexts
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            context = contexts[request_id]
            request = context.request
            if (
                tokens > 1
                or request.num_computed_tokens >= context.calm
                or request.sampling_params is not context.params
            ):
                self._note_step(context, tokens)
        for request_id in scheduler_output.finished_req_ids:
            finished = self.requests.get(request_id)  # or one that came after it, of the same name
            if finished is None or finished.is_finished():
                self._contexts.pop(request_id, None)
                self._arrivals.forget(request_id)
        if self._store is not None:
            self._store.end_step(scheduler_output)
        super()._update_after_schedule(scheduler_output)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Empty the prefix cache, and with it the store; see vLLM's scheduler."""
        done = False
        if self.retrieval.sessions:
            self._retained.clear()
        if self._store is not None:
            self._store.unpin()
        try:
            done = super().reset_prefix_cache(*args, **kwargs)
        finally:  # vLLM raises an error if requests that it has interrupted still hold blocks
            if done:
                self.levels.clear()
            if self._store is not None:
                (self._store.clear if done else self._store.pin)()
        return done

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """Continue a session with its next input.

        If the context is less exact than the options of the next input ask for, the session is
        computed again from its start: vLLM never looks up the blocks of a session again.
        """
        waits = session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        super()._update_request_as_session(session, update)
        context = self._contexts[session.request_id]
        self._renew(context)
        context.ends, context.calm = tokens_to_read(session), 0
        if context.taint.position >= session.num_computed_tokens:
            context.taint = Taint()
        exactness = context.exactness
        if exactness.reads_cache and context.taint.level.serves(exactness.tolerance):
            return
        if waits:
            self.kv_holding_waiting.remove_requests([session])
            self.waiting.remove_requests([session])
        self._free_request_blocks(session)
        self.encoder_cache_manager.free(session)
        session.num_computed_tokens = 0
        self.reset_preempted_req_ids.add(session.request_id)  # so workers forget it, too
        if waits:
            self._enqueue_waiting_request(session)

    def _read(self, request: Request) -> Exactness:
        """The exactness of a request. vLLM asks at every step while the request waits for room."""
        known = self._contexts.get(request.request_id)
        if known is not None and known.params is request.sampling_params:
            return known.exactness
        return self._rules.of(self._options(request))

    def _options(self, request: Request) -> RequestOptions:
        extra_args = getattr(request.sampling_params, "extra_args", None)
        hints = getattr(request, "kv_hints", None)  # vLLM 0.32 has none
        return read_options(request.request_id, extra_args, self._reader, hints)

    def _retrieves(self, request: Request) -> bool:
        """See :class:`ChunkScheduler`."""
        return self._read(request).prefills_exactly != NEVER

    def _look(self, blocks: KVCacheBlocks, tolerance: Level) -> tuple[int, Taint]:
        sizes = (manager.block_size for manager in self._managers)
        return self.levels.look(zip(blocks.blocks, sizes, strict=True), tolerance)

    def _renew(self, context: Context) -> None:
        """Read the options again, since the next input of a session may bring others."""
        request = context.request
        context.exactness = self._read(request)
        context.params = request.sampling_params

    def _taint(self, context: Context, tokens: int) -> Taint:
        """The taint of the context after a step of ``tokens`` tokens."""
        start, taint = context.request.num_computed_tokens, context.taint
        decodes, resumable = start >= context.ends, context.request.resumable
        if decodes or (tokens == 1 and resumable):
            taint = taint.plus(context.exactness.decoding(start))
        if not decodes or resumable:
            taint = taint.plus(context.exactness.reading(start, tokens))
        return taint

    def _note_step(self, context: Context, tokens: int) -> None:
        """Note the taint of a context, and the levels of its blocks, after a step of ``tokens``
        tokens."""
        self._renew(context)
        context.taint = self._taint(context, tokens)
        self._note_final(context)
        start = context.request.num_computed_tokens
        end = start + (tokens if start < context.ends else 1)  # drafts may be rejected
        if end < context.ends or context.request.resumable:
            return
        # The next block may get its hash when its last token is computed.
        context.calm = (end // self.hash_block_size + 1) * self.hash_block_size - 1
        level, decoded = context.taint.level, context.exactness.own.decoded
        if level.plus(Level(decoded=decoded)) != level:
            context.calm = min(context.calm, context.exactness.decodes_exactly)

    def _note_final(self, context: Context) -> None:
        """Note the final levels of all blocks that have hashes."""
        self._note(context, context.taint)
        counts = self._cached(context)
        for group in self._order:
            first, cached = context.noted[group], counts[group]
            if self._store is not None:
                blocks = self._managers[group].req_to_blocks[context.request.request_id]
                new = blocks[first:cached]
                self._store.offer(context.request, group, first, new, context.arrived)
            context.noted[group] = max(first, cached)

    def _note_running(self) -> None:
        """Note the blocks that got hashes in the step that is being scheduled.

        It is not known yet how many tokens of a request the step computes, but it computes those
        that have hashes. So the worst possible levels are noted here, and the final ones when the
        step has been scheduled.
        """
        step, seen = self._looked_at
        for request in self.running[seen if step == self.current_step else 0 :]:
            context = self._contexts[request.request_id]
            cached = self._cached(context)
            if cached == context.noted and not self._has_partial:
                continue
            self._renew(context)
            sizes = (manager.block_size for manager in self._managers)
            hashed = max(count * size for count, size in zip(cached, sizes, strict=True))
            tokens = hashed - request.num_computed_tokens
            self._note(context, self._taint(context, tokens) if tokens > 0 else context.taint)
        self._looked_at = self.current_step, len(self.running)

    def _cached(self, context: Context) -> list[int]:
        """For each group of layers, how many blocks of the request have hashes."""
        name = context.request.request_id
        return [manager.num_cached_block.get(name, 0) for manager in self._managers]

    def _note(self, context: Context, taint: Taint) -> None:
        """Note levels of the request's blocks, and take blocks of the same tokens out of the prefix
        cache that are less exact, or that cannot be compared with these: the latest is found."""
        name = context.request.request_id
        for first, manager in zip(context.noted, self._managers, strict=True):
            last = manager.num_cached_block.get(name, 0) + self._has_partial
            pool = manager.block_pool
            for block in manager.req_to_blocks.get(name, ())[first:last]:
                if (key := block.block_hash) is None:
                    continue
                assert block.block_hash_num_tokens is not None
                level = taint.level_of(block.block_hash_num_tokens)
                self.levels.note(block, level)
                found = pool.cached_block_hash_to_block.get_one_block(key)
                while found is not None and not self.levels.of(found).serves(level):
                    pool.evict_blocks({found.block_id})
                    found = pool.cached_block_hash_to_block.get_one_block(key)


class RetrievalAsyncScheduler(RetrievalScheduler, AsyncScheduler):
    """The same with asynchronous scheduling, where a block may get its hash only when the tokens of
    its last step are known."""

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        runs = request.status == RequestStatus.RUNNING and not is_stale
        result = super()._update_request_with_output(request, new_token_ids, is_stale)
        known = request.num_computed_tokens - request.num_output_placeholders
        if known % self.hash_block_size < len(new_token_ids):
            if runs:  # vLLM 0.32 has given blocks their hashes by now, 0.33 is about to do so
                self.kv_cache_manager.cache_blocks(request, known)
            self._note_final(self._contexts[request.request_id])
        return result
