"""A model of what a worker writes to vLLM's blocks: exact keys and values, or others."""

from typing import Any, NamedTuple

import numpy as np
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec

from benchmarks.stepper import Stepper
from tests.support.steps import Runner, request_table
from vllm_kvretrieval.attention.cpu.step_planner import split_rows
from vllm_kvretrieval.engine.running import notes
from vllm_kvretrieval.methods.kept_prompts import LocalHeads
from vllm_kvretrieval.methods.prompt_chunks import ChunkPlanner
from vllm_kvretrieval.retrieval.exactness_levels import Kind
from vllm_kvretrieval.retrieval.families.scored import MASS


class Read(NamedTuple):
    """How a token was computed that attended to a part of its context.

    Attributes:
        what: "decode" or "prefill".
        method: That of its request.
        numbers: Of its request: those that are larger where more is attended to.
    """

    what: str
    method: str
    numbers: tuple[float, ...]


class Truth:
    """Follows a scheduler's steps with the worker's own table of requests, and its rules.

    A position is exact if its row attends to its whole context, all of which is exact. Of layers
    with a state, a block is exact if the state that it holds is.

    Attributes:
        exact: bool [blocks, tokens of a block].
        approximate: Positions that were written and are not exact.
        promised: Requests whose contexts are exact, by id.
        exact_prefixes: Requests that share exact blocks only.
        counted: Kinds of levels of the blocks looked at.
        borrowed: Tokens that were not exact, and that requests have shared.
        preempted: Requests that were, by id.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.scheduler = stepper.scheduler
        self.config = self.scheduler.retrieval
        seats = self.scheduler.max_num_running_reqs + 1
        heads = LocalHeads([slice(0, 1)])
        self.runner = Runner()
        self.table = request_table(self.config, seats, [1], self.runner, heads=heads)
        sparse = self.config.prefill_budget is not None
        self.prefill = ChunkPlanner(self.config) if sparse else None
        pool = self.scheduler.kv_cache_manager.block_pool
        specs = [g.kv_cache_spec for g in self.scheduler.kv_cache_config.kv_cache_groups]
        self.sizes = [spec.block_size for spec in specs]
        self.states = [isinstance(spec, MambaSpec) for spec in specs]
        self.blocks = pool.blocks
        self.exact = np.zeros((len(self.blocks), max(self.sizes)), dtype=bool)
        self.reads: list[Read | None] = [None]
        self.by = np.zeros_like(self.exact, dtype=np.int64)  # places there
        self.approximate = self.borrowed = 0
        self.promised: set[str] = set()
        self.exact_prefixes: set[str] = set()
        self.preempted: set[str] = set()
        self.counted = np.zeros(len(Kind), dtype=np.int64)
        stepper.look = self.follow

    def follow(self, output: SchedulerOutput) -> None:
        """Compute a step."""
        self.preempted |= set(output.preempted_req_ids or ())
        self.table.release(output.finished_req_ids, output.preempted_req_ids or ())
        for copy in output.kv_cache_block_copies or ():
            for known in (self.exact, self.by):
                known[copy.dst_block_id] = known[copy.src_block_id]
        scheduled = output.num_scheduled_tokens
        brought = notes(output, self.table.notes)
        for name, note in brought.items():
            request = self.scheduler.requests[name]
            assert note.prompt == request.num_prompt_tokens
            assert note.tokens == max(request.num_tokens, request.num_prompt_tokens)
        self.table.begin_step(scheduled, sum(scheduled.values()), brought)
        self.runner.order = tuple(scheduled)
        self.table.set_batch(None)
        self._watched = self.promised | (self.exact_prefixes & brought.keys())
        seats = self.table.seats
        for row, (name, tokens) in enumerate(scheduled.items()):
            if name in brought:
                self._check_shared(self.scheduler.requests[name], tokens)
            self._compute(self.scheduler.requests[name], tokens, seats[row : row + 1])
        self.check()

    def _compute(self, request: Any, tokens: int, seat: np.ndarray) -> None:
        end = request.num_computed_tokens
        start = end - tokens
        groups = self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        written = self._attends_to_all(request, start, tokens, seat)
        decodes = bool(self.table.decodes(seat, np.array([end]))[0])
        self.reads.append(self._asked(request)["decode" if decodes else "prefill"])
        own = np.where(written, 0, len(self.reads) - 1)
        assert written.all() or self.reads[-1] is not None
        context = self._exact_until(groups, start)
        if request.request_id in self._watched:
            assert context >= start, f"{request.request_id} reads what is not exact"
        written &= context >= start
        written = np.logical_and.accumulate(written)
        self.approximate += int((~written).sum())
        for blocks, size, state in zip(groups, self.sizes, self.states, strict=True):
            for position in range(start, end):
                if position // size < len(blocks) and not (b := blocks[position // size]).is_null:
                    columns = slice(None) if state else position % size
                    self.exact[b.block_id, columns] = written[position - start]
                    self.by[b.block_id, columns] = own[position - start]

    def _asked(self, request: Any) -> dict[str, Read | None]:
        """How a request attends to a part of a context; None: it never does."""
        config, given = self.config, request.sampling_params.extra_args["kv_retrieval"]
        name = given.get("method", config.method)
        method = config.methods[name]
        budget = given.get("budget", 0 if config.memory_fraction else config.budget)
        share = 0 if "budget" in given else config.memory_fraction or 0
        decode = budget, share, given.get("mass", MASS.of(method))
        tokens, least = (
            given.get("prefill_budget", config.prefill_budget),
            given.get("prefill_share"),
        )
        prefill = tokens, config.prefill_share if least is None else least
        sparse = tokens and config.prefills_sparsely(method)
        asked = {
            "decode": Read("decode", name, decode),
            "prefill": Read("prefill", name, prefill) if sparse else None,
        }
        return dict.fromkeys(asked) if given.get("exact") else asked

    def _check_shared(self, request: Any, tokens: int) -> None:
        """Check that what a request begins with is as exact as what it would compute."""
        asked, start = self._asked(request), request.num_computed_tokens - tokens
        groups = self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        for blocks, size, state in zip(groups, self.sizes, self.states, strict=True):
            for place, block in enumerate([] if state else blocks[: -(-start // size)]):
                used = 0 if block.is_null else min(size, start - place * size)
                for read in {self.reads[by] for by in self.by[block.block_id, :used]} - {None}:
                    assert read is not None
                    own = asked[read.what]
                    assert own is not None, f"{request.request_id} shares {read}"
                    assert read.method == own.method
                    pairs = zip(read.numbers, own.numbers, strict=True)
                    assert all(a >= b for a, b in pairs), f"{own} shares {read}"
                self.borrowed += int((self.by[block.block_id, :used] > 0).sum())

    def _attends_to_all(
        self, request: Any, start: int, tokens: int, seat: np.ndarray
    ) -> np.ndarray:
        """bool [tokens]; which of them the worker lets attend to their whole contexts."""
        table, written = self.table, np.ones(tokens, dtype=bool)
        end = start + tokens
        lens = np.array([end], dtype=np.int32)
        if tokens == 1 and table.decodes(seat, lens)[0]:
            beyond = lens > table.whole_tokens(seat)
            return ~split_rows(table.records[seat], beyond, np.array([True])).sparse
        if (
            self.prefill is not None
            and table.prefill_budgets(seat).any()
            and end > self.prefill.exact
        ):
            if not (request.resumable or any(self.states)):
                assert start % self.prefill.chunk == 0, "the step before has cut a chunk"
            division = self.prefill.divide(np.array([end]), np.array([tokens]))
            written = np.repeat(~division.sparse, division.new)
        return written

    def _exact_until(self, groups: Any, start: int) -> int:
        """The first position of a context that is not exact, as far as its blocks are there."""
        first = start
        for blocks, size, state in zip(groups, self.sizes, self.states, strict=True):
            for place, block in enumerate(blocks[: -(-start // size)]):
                if block.is_null or (state and place < (start - 1) // size):
                    continue
                used = min(size, start - place * size)
                if not (row := self.exact[block.block_id, :used]).all():
                    first = min(first, place * size + int(np.argmin(row)))
        return first

    def check(self) -> None:
        """Check that no block that counts as exact holds a position that is not exact."""
        hashed = [b for b in self.blocks if b.block_hash is not None]
        kinds = np.array([self.scheduler.levels.of(b).kind for b in hashed], dtype=np.int64)
        for block, kind in zip(hashed, kinds.tolist(), strict=True):
            size = self.sizes[get_group_id(block.block_hash)]
            used = (block.block_hash_num_tokens - 1) % size + 1
            if kind == Kind.EXACT:
                assert self.exact[block.block_id, :used].all(), block
        self.counted += np.bincount(kinds, minlength=len(Kind))
