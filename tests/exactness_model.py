"""A model of what a worker writes to vLLM's blocks: exact keys and values, or others."""

from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec

from benchmarks.stepper import Stepper
from tests.steps import Runner, request_table
from vllm_kvretrieval.attention.cpu.division import Divisor
from vllm_kvretrieval.attention.parts import split_rows
from vllm_kvretrieval.engine.levels import Level
from vllm_kvretrieval.engine.running import notes
from vllm_kvretrieval.methods.prompts import Heads


class Truth:
    """Follows a scheduler's steps with the worker's own table of requests, and its rules.

    A position is exact if its row attends to its whole context, all of which is exact. Of layers
    with a state, a block is exact if the state that it holds is.

    Attributes:
        exact: bool [blocks, tokens of a block].
        approximate: Positions that were written and are not exact.
        promised: Requests whose contexts are exact, by id.
        exact_prefixes: Requests that share exact blocks only.
        counted: Levels of the blocks looked at.
        preempted: Requests that were, by id.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.scheduler = stepper.scheduler
        self.config = self.scheduler.retrieval
        seats = self.scheduler.max_num_running_reqs + 1
        heads = Heads([slice(0, 1)])
        self.table = request_table(self.config, seats, [1], Runner(), heads=heads)
        sparse = self.config.prefill_budget is not None
        self.prefill = Divisor(self.config) if sparse else None
        pool = self.scheduler.kv_cache_manager.block_pool
        specs = [g.kv_cache_spec for g in self.scheduler.kv_cache_config.kv_cache_groups]
        self.sizes = [spec.block_size for spec in specs]
        self.states = [isinstance(spec, MambaSpec) for spec in specs]
        self.blocks = pool.blocks
        self.exact = np.zeros((len(self.blocks), max(self.sizes)), dtype=bool)
        self.approximate = 0
        self.promised: set[str] = set()
        self.exact_prefixes: set[str] = set()
        self.preempted: set[str] = set()
        self.counted = np.zeros(len(Level), dtype=np.int64)
        stepper.look = self.follow

    def follow(self, output: SchedulerOutput) -> None:
        """Compute a step."""
        self.preempted |= set(output.preempted_req_ids or ())
        self.table.release(output.finished_req_ids, output.preempted_req_ids or ())
        for copy in output.kv_cache_block_copies or ():
            self.exact[copy.dst_block_id] = self.exact[copy.src_block_id]
        scheduled = output.num_scheduled_tokens
        brought = notes(output, self.table.notes)
        for name, note in brought.items():
            request = self.scheduler.requests[name]
            assert note.prompt == request.num_prompt_tokens
            assert note.tokens == max(request.num_tokens, request.num_prompt_tokens)
        self.table.batch = list(scheduled)
        self.table.begin_step(scheduled, sum(scheduled.values()), brought)
        self._watched = self.promised | (self.exact_prefixes & brought.keys())
        seats = self.table.seats(len(scheduled))
        for row, (name, tokens) in enumerate(scheduled.items()):
            self._compute(self.scheduler.requests[name], tokens, seats[row : row + 1])
        self.check()

    def _compute(self, request: Any, tokens: int, seat: np.ndarray) -> None:
        end = request.num_computed_tokens
        start = end - tokens
        groups = self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        written = self._attends_to_all(request, start, tokens, seat)
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

    def _attends_to_all(
        self, request: Any, start: int, tokens: int, seat: np.ndarray
    ) -> np.ndarray:
        """bool [tokens]; which of them the worker lets attend to their whole contexts."""
        table, written = self.table, np.ones(tokens, dtype=bool)
        if tokens == 1:
            lens = np.array([start + 1], dtype=np.int32)
            pages = -(-lens // self.config.page_size)
            return ~split_rows(table.select(seat), pages, table.decodes(seat, lens)).sparse
        end = start + tokens
        if (
            self.prefill is not None
            and table.prefill_budgets(seat).any()
            and end > self.prefill.exact
        ):
            if self.config.prefill_queries is not None and not request.resumable:
                assert start % self.config.prefill_chunk == 0, "the step before has cut a block"
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
        levels = np.array([self.scheduler.levels.of(b) for b in hashed], dtype=np.int64)
        for block, level in zip(hashed, levels.tolist(), strict=True):
            size = self.sizes[get_group_id(block.block_hash)]
            used = (block.block_hash_num_tokens - 1) % size + 1
            if level == Level.EXACT:
                assert self.exact[block.block_id, :used].all(), block
        self.counted += np.bincount(levels, minlength=len(Level))
