"""vLLM's scheduler, whose prefix cache knows which of its blocks are exact."""

from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from vllm_kvretrieval.config import RetrievalConfig
from vllm_kvretrieval.engine.levels import EXACT, BlockLevels, Exactness, Level, Taint
from vllm_kvretrieval.engine.requests import read_options

logger = init_logger("vllm.kvretrieval.scheduler")


@dataclass
class Context:
    """What is known of a request's context, since it was last looked up in the prefix cache.

    Attributes:
        params: Sampling parameters that ``exactness`` was read from; a session may bring others.
        exactness: What its options say.
        taint: From where on it is not exact.
        noted: Of each group of layers, its first blocks that need no more notes.
    """

    params: Any
    exactness: Exactness
    taint: Taint = EXACT
    noted: list[int] = field(default_factory=list)


class RetrievalScheduler(Scheduler):
    """vLLM's scheduler with a :class:`Level` for every block of the prefix cache.

    Requests share prefixes up to the first block that is worse than they tolerate. vLLM gives
    blocks their hashes, and so to others, before the step that writes to them. So their levels are
    noted when a step has been scheduled, and for requests looked up before that, when they are.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = RetrievalConfig.from_vllm(self.vllm_config)
        assert config is not None, "the platform sets this class where a method is named"
        self.retrieval = config
        self.levels = BlockLevels()
        self._managers = self.kv_cache_manager.coordinator.single_type_managers
        self._contexts: dict[str, Context] = {}
        # Of the step being scheduled, how many of the running requests have provisional notes.
        self._looked_at = (0, 0)

    def _get_local_prefix_cache_hit(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Blocks of the prefix cache for a request: at most those that it may share."""
        self._note_running()
        exactness = self._read(request)
        if not exactness.reads_cache:
            request.skip_reading_prefix_cache = True  # vLLM asks no KV connector then, either
        blocks, tokens, *rest, diverged = super()._get_local_prefix_cache_hit(
            request, *args, **kwargs
        )
        manager, found = self.kv_cache_manager, 0
        if diverged:  # vLLM would look up a hit that all groups share later, without asking here
            blocks, tokens, *rest = manager.get_computed_blocks(request)
        found = tokens
        while tokens > (kept := self._first_beyond(blocks.blocks, exactness.tolerance)[0]):
            by_group, tokens, _ = manager.coordinator.find_longest_cache_hit(
                request.block_hashes, kept
            )
            blocks = manager.create_kv_cache_blocks(by_group)
        if tokens < found:
            logger.debug(
                "kv_retrieval request_id=%s shares %d of %d tokens found in the prefix cache: the "
                "others are approximate",
                request.request_id,
                tokens,
                found,
            )
        self._contexts[request.request_id] = Context(
            request.sampling_params,
            exactness,
            Taint(*self._first_beyond(blocks.blocks, Level.EXACT)),
            [tokens // manager.block_size for manager in self._managers],
        )
        return blocks, tokens, *rest, False

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Note what the step does to contexts, before vLLM counts its tokens."""
        for copy in scheduler_output.kv_cache_block_copies or ():
            self.levels.copy(copy.src_block_id, copy.dst_block_id)
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            context = self._context(request)
            context.taint = self._taint(request, context, tokens)
            self._note(request, context)
        for request_id in scheduler_output.finished_req_ids:
            finished = self.requests.get(request_id)  # or one that came after it, of the same name
            if finished is None or finished.is_finished():
                self._contexts.pop(request_id, None)
        super()._update_after_schedule(scheduler_output)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Empty the prefix cache; see vLLM's."""
        done = super().reset_prefix_cache(*args, **kwargs)
        if done:
            self.levels.clear()
        return done

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """Go on with a session; from its start, where the context is not what its options promise.

        What a session has computed is never looked up again, so it is given up here.
        """
        waits = session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        super()._update_request_as_session(session, update)
        context = self._context(session)
        if context.taint.position >= session.num_computed_tokens:
            context.taint = EXACT
        exactness = context.exactness
        if exactness.reads_cache and context.taint.level <= exactness.tolerance:
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

    def _context(self, request: Request) -> Context:
        """What is known of a request's context, by the options that it has now."""
        context = self._contexts[request.request_id]
        if context.params is not request.sampling_params:
            context.params, context.exactness = request.sampling_params, self._read(request)
        return context

    def _read(self, request: Request) -> Exactness:
        extra_args = getattr(request.sampling_params, "extra_args", None)
        options = read_options(request.request_id, extra_args, self.retrieval)
        return Exactness.of(options, self.retrieval)

    def _first_beyond(self, blocks: Any, tolerance: Level) -> tuple[int, Level]:
        sizes = (manager.block_size for manager in self._managers)
        return self.levels.first_beyond(zip(blocks, sizes, strict=True), tolerance)

    def _taint(self, request: Request, context: Context, tokens: int) -> Taint:
        """Of the context with so many more tokens, computed in one step."""
        start = request.num_computed_tokens
        decodes = tokens == 1 and (start >= request.num_prompt_tokens or request.resumable)
        return context.taint.plus(context.exactness.taint(start, tokens, decodes))

    def _note(self, request: Request, context: Context) -> None:
        """Note the levels of the request's blocks that have got hashes; these are final."""
        self._enter(request, context, context.taint)
        for group, manager in enumerate(self._managers):
            cached = manager.num_cached_block.get(request.request_id, 0)
            context.noted[group] = max(context.noted[group], cached)

    def _note_running(self) -> None:
        """Note blocks that have got hashes in this very step, whose tokens nobody has counted yet.

        How many tokens a request computes is not known here: as many as have hashes, at least. So
        levels are the worst that can be, and are noted again when the step has been scheduled.
        """
        step, seen = self._looked_at
        for request in self.running[seen if step == self.current_step else 0 :]:
            context = self._context(request)
            hashed = max(
                manager.num_cached_block.get(request.request_id, 0) * manager.block_size
                for manager in self._managers
            )
            tokens = hashed - request.num_computed_tokens
            taint = self._taint(request, context, tokens) if tokens > 0 else context.taint
            self._enter(request, context, taint)
        self._looked_at = self.current_step, len(self.running)

    def _enter(self, request: Request, context: Context, taint: Taint) -> None:
        """Note levels of the request's blocks, and let the better of two equal ones be found.

        A prompt's last block may have a hash before it is full.
        """
        for noted, manager in zip(context.noted, self._managers, strict=True):
            cached = manager.num_cached_block.get(request.request_id, 0)
            partial = manager.block_size > self.hash_block_size
            if cached <= noted and not partial:
                continue
            pool, blocks = manager.block_pool, manager.req_to_blocks.get(request.request_id, [])
            for block in blocks[noted : cached + partial]:
                if (key := block.block_hash) is None:
                    continue
                assert block.block_hash_num_tokens is not None
                level = taint.level_of(block.block_hash_num_tokens)
                self.levels.note(block, level)
                found = pool.cached_block_hash_to_block.get_one_block(key)
                while found is not None and self.levels.of(found) > level:
                    pool.evict_blocks({found.block_id})
                    found = pool.cached_block_hash_to_block.get_one_block(key)


class RetrievalAsyncScheduler(RetrievalScheduler, AsyncScheduler):
    """The same with async scheduling: blocks also get hashes when their tokens are known."""

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        result = super()._update_request_with_output(request, new_token_ids, is_stale)
        self._note(request, self._context(request))
        return result
