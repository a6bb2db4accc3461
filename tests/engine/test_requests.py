"""Per-request state: slots that follow their requests, and steps that know what came before."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder
from vllm.v1.worker.cpu_worker import CPUWorker

from tests.support.steps import Runner, metadata_builder, note, request_table, split
from vllm_kvretrieval.engine.cpu.worker import RetrievalCPUWorker
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.storage.memory import Memory

PAGE = 32
# 1 + 1 + 2 pages
CONFIG = RetrievalConfig.from_options("freekv", {"budget": 128, "sink": 32, "window": 32})
CAPACITY = 3


@pytest.fixture
def runner():
    return Runner()


@pytest.fixture
def caplog_vllm(caplog, monkeypatch):
    """The messages that we log, which vLLM's own handlers keep to themselves."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.DEBUG, logger="vllm.kvretrieval")
    return caplog


@pytest.fixture
def table(runner):
    return request_table(CONFIG, CAPACITY, [10], runner)


@pytest.fixture
def builder(table):
    return metadata_builder(table)


def test_budgets_by_a_share_of_memory(runner):
    """OmniKV's figures: at 30 % with a quarter of the layers dense, 6.7 % of the prompt."""
    options = {"memory_fraction": 0.3, "budget": 256, "max_budget": 4096, "sink": 32, "window": 32}
    config = RetrievalConfig.from_options("omnikv", options)
    table = request_table(config, 5, [10], runner, dense_share=0.25)
    asked: dict[str, dict[str, Any]] = {"d": {"budget": 128}, "e": {"method": "streamingllm"}}
    for name, prompt in {"a": 32000, "b": 300, "c": 200000, "d": 32000, "e": 32000}.items():
        runner.notes[name] = note(**asked.get(name, {}))._replace(prompt=prompt)
    runner.batch(*"abcde")
    budgets = table.records[table.seats]["total"]
    assert budgets.tolist() == [round(32000 / 15 / 32), 3, 4096 // 32, 128 // 32, 67]
    with pytest.raises(RetrievalConfigError, match=r"memory_fraction=0\.3 is too little"):
        config.budget_of_share(1000, 0.3, "omnikv")
    with pytest.raises(RetrievalConfigError, match=r"dense layers alone are 1\.00 of the KV cache"):
        config.budget_of_share(1000, 1.0, "omnikv")


def test_more_requests_than_there_is_room_for(runner, table):
    """The scheduler has not listened: said before anything of another request is touched."""
    with pytest.raises(RuntimeError, match="more requests at once than the 3 that there is room"):
        runner.batch("a", "b", "c", "d")


def test_counts_outlive_their_requests(runner, table):
    """The counts of a slot stay when another request takes it."""
    runner.batch("a", "b")
    a, b = table.seats
    table.corrected[a] += 5
    table.recalls[a] += torch.tensor([10, 2, 3])
    table.recalls[b] += torch.tensor([100, 20, 30])
    assert table.take_counts() == (5, 110, 22, 33, 0, 0, 0, 0, 0, 0)
    table.corrected[a] += 1
    assert table.release(["a"]) == [a]
    runner.batch("c", "b")
    assert table.seats[0] == a
    table.recalls[a] += torch.tensor([7, 0, 0])
    assert table.take_counts() == (1, 7, 0, 0, 0, 0, 0, 0, 0, 0)
    assert table.take_counts() == (0,) * 10


def test_a_preempted_request_goes_on_counting(runner, builder, table, caplog_vllm):
    """It has not finished, and is one line in the log when it has."""
    runner.batch("a")
    split(builder, [300])
    table.corrected[table.seats[0]] += 3
    assert table.take_counts() == (3, 0, 0, 0, 1, 1, 10, 40, 0, 0)
    assert len(table.release([], ["a"])) == 1
    assert "request_id" not in caplog_vllm.text
    assert table.take_counts() == (0,) * 10
    runner.batch("b", "a")  # "b" has its slot now
    split(builder, [300, 301])
    assert table.take_counts() == (0, 0, 0, 0, 2, 2, 20, 80, 0, 0)
    table.release(["a"])
    assert (
        "request_id=a context=301 decode_steps=2 sparse_steps=2 pages_attended=4"
        in caplog_vllm.text
    )
    assert "corrected_share=0.1500" in caplog_vllm.text
    table.release([], ["b"])
    table.release(["b"])  # aborted while it waits
    assert "request_id=b context=300 decode_steps=1" in caplog_vllm.text
    assert table.take_counts() == (0,) * 10
    assert len(table) == 0


def test_a_session_may_bring_other_options(runner, builder, table):
    runner.batch("a")
    assert split(builder, [300]).decode[0].rows.fresh.tolist() == [1]
    assert split(builder, [301]).decode[0].rows.fresh.tolist() == [0]
    table.begin_step({"a": 1}, 1, {"a": note(budget=96)})
    rows = split(builder, [302]).decode[0].rows
    assert rows.select.tolist() == [1]
    assert rows.fresh.tolist() == [1], "what another budget selected is of no use"


def test_a_session_may_go_from_tokens_to_pages(runner):
    """Tokens that its heads have spared are booked as such, and no count goes back."""
    options = {"budget": 128, "also": {"freekv": {}}}
    table = request_table(RetrievalConfig.from_options("fier", options), CAPACITY, [10], runner)
    builder = metadata_builder(table, rows=True)
    runner.batch("a")
    split(builder, [900])
    table.spared[table.seats[0]] += 1000
    assert table.take_counts().attended == 40 - 1000 // PAGE
    table.begin_step({"a": 1}, 1, {"a": note(method="freekv")})
    assert table.take_counts() == (0,) * 10
    split(builder, [901])
    assert table.take_counts().attended == 40


def test_sessions_that_wait_make_room(runner, monkeypatch):
    """One whose LoRA adapter does not fit in a step keeps its seat, and vLLM runs another request.

    Its blocks stay, and it goes on later.
    """
    table = request_table(CONFIG, 2, [10], runner)
    left: list[Any] = []
    worker: Any = object.__new__(RetrievalCPUWorker)
    worker.requests, worker.storage, worker.retrieval_layers = table, Memory(), {}
    monkeypatch.setattr(worker.storage, "leave", lambda *asked: left.append(asked))

    def run(worker, step):
        runner.batch(*step.num_scheduled_tokens)
        return table.seats

    monkeypatch.setattr(CPUWorker, "execute_model", run)

    def step(*req_ids, new=()):
        asked = {"sampling_params": None, "prompt_len": 5, "prefill_token_ids": None}
        scheduled = SimpleNamespace(
            finished_req_ids=(),
            preempted_req_ids=None,
            num_scheduled_tokens=dict.fromkeys(req_ids, 1),
            total_num_scheduled_tokens=len(req_ids),
            scheduled_new_reqs=[SimpleNamespace(req_id=name, **asked) for name in new],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=()),
            kv_cache_block_copies=None,
        )
        return worker.execute_model(scheduled).tolist()

    a, b = step("a", "b", new="ab")
    table.corrected[a] += 3
    step("b")
    assert step("b", "c", new="c") == [b, a]
    assert left == [([a], ())]
    assert step("c", "a", new="a") == [a, b]
    assert table.counts().corrected == 3
    step("c")
    assert step("b", new="b") == [b], "the other seat is that of a request of the step before"


def test_how_a_session_prefills_is_up_to_its_next_input(runner):
    config = RetrievalConfig.from_options("omnikv", {"prefill_budget": 1024})
    table = request_table(config, CAPACITY, [10], runner)

    def ask(**options):
        table.begin_step({"a": 5}, 5, {"a": note(**options)})
        return table.prefill_budgets(table.seats).any(0).tolist()

    runner.batch("a", a={"exact": True})
    assert not table.prefill_budgets(table.seats).any()
    assert ask() == [True]
    assert ask(exact=True) == [False]


# ------------------------------------------------------------------------------------ the table


def test_slots_follow_requests(runner, table):
    runner.batch("a", "b", "c")
    a, b, c = table.seats.tolist()
    assert len({a, b, c}) == 3
    runner.batch("c", "a")
    assert table.seats.tolist() == [c, a]
    assert len(table) == 3, "a request that is not scheduled keeps its slot"
    table.release(["b", "never seen"])
    runner.batch("d", "c", "a")
    assert table.seats.tolist() == [b, c, a]
    table.release(["a", "c", "d"])
    assert len(table) == 0


def test_options_go_with_the_slot(runner, table):
    runner.batch("a", "b", "c", b={"budget": 96, "correction_threshold": 0.5}, c={"exact": True})
    rows = table.records[table.seats]
    assert rows["total"].tolist() == [4, 3, 4]
    assert rows["select"].tolist() == [2, 1, 2]
    assert rows["threshold"].tolist() == pytest.approx([0.9, 0.5, 0.9])
    assert rows["exact"].tolist() == [False, False, True]
    table.release(["b", "c"])
    runner.batch("a", "d", "e")
    rows = table.records[table.seats]
    assert rows["total"].tolist() == [4, 4, 4]
    assert not rows["exact"].any()


def test_options_that_nobody_validated_do_not_stop_the_engine(runner, table):
    runner.batch("a", a={"budget": 31})
    assert table.records[table.seats]["total"].tolist() == [4]


# ------------------------------------------------------------------------------------ the split


def test_nothing_to_split_within_the_budget(runner, builder):
    runner.batch("a", "b")
    assert split(builder, [4 * PAGE, 17]) is None
    step = split(builder, [4 * PAGE + 1, 18])
    assert step.decode[0].index.tolist() == [0]
    assert step.decode[0].rows.select.tolist() == [2]
    schedule = step.decode[0].schedule
    assert schedule.seq_lens.tolist() == [3 * PAGE + 1], "vLLM's kernel, unless ours attends"
    assert step.whole.index.tolist() == [1], "the other row keeps its whole context"
    builder.planner.attends = True
    step = split(builder, [4 * PAGE + 2, 19])
    assert step.decode[0].schedule is None


def test_prefill_is_exact(runner, builder):
    runner.batch("a", "b", "c")
    step = split(builder, [900, 601, 500], [1, 1, 200], [False, True, True])
    assert step.decode[0].rows.select.tolist() == [2]
    assert step.whole.index.tolist() == [1], "the second reads its prompt's last token"
    assert step.whole.by.seq_lens.tolist() == [601]
    (prefill,) = step.prefill
    assert (prefill.start, prefill.by.num_actual_tokens) == (2, 200)
    assert prefill.by.query_start_loc.tolist() == [0, 200]
    assert prefill.by.seq_lens.tolist() == [500]
    assert len(prefill.staged) == 16, "four blocks of 128"
    step = split(builder, [900, 601, 500], [1, 1, 100], [False, True, True])
    assert step.prefill[0].by.num_actual_tokens == 100
    assert step.prefill[0].staged is None, "too few tokens for the copy to pay"


def test_steps_known_to_be_within_the_budget_are_not_looked_at(runner, builder, table):
    def foreseen(**scheduled):
        table.begin_step(scheduled, sum(scheduled.values()))
        return table.foreseen.now

    runner.batch("a", "b", b={"exact": True})
    assert not foreseen(a=1, b=1)
    assert split(builder, [4 * PAGE - 2, 999]) is None
    assert [foreseen(b=1, a=1) for _ in range(3)] == [True, True, False], "the budget is reached"
    step = split(builder, [4 * PAGE + 1, 1002])
    assert step.decode[0].rows.select.tolist() == [2]
    assert step.whole.index.tolist() == [1]
    assert table._steps[table.seats, :2].tolist() == [[4, 1], [4, 0]], "all were counted"

    table._below[:] = 4 * PAGE + 3
    runner.batch("a", "c")
    assert split(builder, [4 * PAGE + 2, 9]) is None
    assert [foreseen(a=1, c=1) for _ in range(2)] == [True, False], "beyond the budget, too"

    table.release(["a"])
    runner.batch("b")
    assert split(builder, [1003]) is None
    assert foreseen(b=1)
    runner.notes["c"] = note()
    assert not foreseen(b=1, c=5), "another batch"
    assert not foreseen(b=1), "and from then on nothing is known"
    assert split(builder, [1005]) is None
    assert not foreseen(b=2), "not a decode step"


def test_long_prompts_are_staged_within_the_budget_too(runner, builder):
    runner.batch("a", "b")
    step = split(builder, [100, 300], [1, 300], [False, True])
    whole = step.whole.by
    (prefill,) = (part.by for part in step.prefill)
    counts = whole.num_actual_tokens, prefill.num_actual_tokens
    assert (step.prompts.tolist(), *counts) == ([1], 1, 300)
    assert step.decode == []
    assert whole.seq_lens.tolist() == [100]
    assert prefill.block_table.tolist() == [[0, 1, 2]]
    runner.batch("b")
    alone = split(builder, [300], [300], [True])
    assert (alone.decode, alone.whole) == ([], None)


def test_single_tokens_in_a_cache_of_rows(runner):
    """A step of everything: tokens, pages, whole contexts, and prompts that take turns."""
    options = {"budget": 128, "also": {"freekv": {}}}
    table = request_table(RetrievalConfig.from_options("fier", options), 6, [10], runner)
    builder = metadata_builder(table, heads=2, rows=True)
    runner.batch(*"abcdef", b={"method": "freekv"}, c={"exact": True})
    step = split(
        builder, [900, 801, 70, 1900, 200, 300], [1, 1, 1, 5, 4, 3], 3 * [False] + 3 * [True]
    )
    tokens, pages = step.decode
    assert (tokens.index.tolist(), tokens.lists.run, tokens.rows.per_token) == ([0], 1, True)
    assert [t.tolist() for t in (tokens.rows.sink, tokens.rows.window, tokens.rows.select)] == [
        [32], [32], [64],
    ]  # fmt: skip
    assert (pages.index.tolist(), pages.lists.run, pages.rows.per_token) == ([1], PAGE, False)
    assert step.whole.index.tolist() == [2]
    first = 2 * 128  # page of the third request
    assert step.whole.by.entries[:, :3].tolist() == [[first, first + 1, first + 2]]
    assert not step.whole.by.per_head
    assert step.whole.by.lengths.tolist() == [70, 70]
    assert step.whole.by.run == PAGE
    assert [(part.start, part.by.num_actual_tokens) for part in step.prefill] == [
        (3, 5),
        (8, 7),
    ]
    assert [part.by.seq_lens.tolist() for part in step.prefill] == [[1900], [200, 300]]
    assert step.prefill[1].by.query_start_loc.tolist() == [0, 4, 7]
    assert all(part.staged is not None for part in step.prefill)
    within = split(builder, [100, 120])
    assert (within.decode, within.whole.index, within.prefill) == ([], None, [])
    assert within.whole.by.lengths.tolist() == [100, 100, 120, 120]


@pytest.mark.parametrize("causal", [True, False])
def test_attention_that_is_not_causal_is_vllms_affair(runner, builder, table, monkeypatch, causal):
    """Prefix-LM layers have such attention."""
    runner.batch("a")
    lens, starts = torch.tensor([900], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    dense = CPUAttentionMetadata(
        num_actual_tokens=1,
        max_query_len=1,
        query_start_loc=starts,
        max_seq_len=900,
        seq_lens=lens,
        block_table=torch.zeros(1, 128, dtype=torch.int32),
        slot_mapping=torch.zeros(1, dtype=torch.int64),
        scheduler_metadata=None,
        causal=causal,
    )
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "build", lambda *_: dense)
    common = SimpleNamespace(query_start_loc_cpu=starts, num_reqs=1)
    assert builder.build(0, common) is None, "a dummy run"
    table.begin_step({"a": 1}, 1)
    metadata = builder.build(0, common)
    assert (metadata.split is not None) == causal
    assert metadata.causal == causal
    builder.storage = Memory(token_major=True)
    if causal:
        table.foreseen.now = True
        assert builder.build(0, common).split.whole.by.lengths.tolist() == [900]
    else:
        with pytest.raises(RetrievalConfigError, match="attends to some of its input in both dir"):
            builder.build(0, common)


def test_rows_that_attend_to_everything_are_a_part_of_their_own(runner, builder):
    """So the other rows still attend to their pages only."""
    runner.batch("a", "b", "c", b={"exact": True})
    step = split(builder, [900, 800, 70])
    assert step.decode[0].index.tolist() == [0]
    assert step.decode[0].rows.seq_lens.tolist() == [900]
    assert step.decode[0].rows.select.tolist() == [2]
    assert step.whole.index.tolist() == [1, 2], "exact, and within the budget"
    assert step.whole.by.query_start_loc.tolist() == [0, 1, 2]
    assert step.whole.by.seq_lens.tolist() == [800, 70]
    assert split(builder, [100, 801, 71]) is None, "nobody attends to a part of the context"


def test_only_consecutive_steps_speculate(runner, builder, table):
    runner.batch("a")
    assert split(builder, [300]).decode[0].rows.fresh.tolist() == [1], (
        "a request's first decode step"
    )
    assert split(builder, [301]).decode[0].rows.fresh.tolist() == [0]
    table.release([], ["a"])  # its tokens are computed anew, then it goes on
    runner.batch("a")
    assert split(builder, [303]).decode[0].rows.fresh.tolist() == [1]
    runner.batch("b", "a")
    assert split(builder, [700, 304]).decode[0].rows.fresh.tolist() == [1, 0], (
        "state moves with the rows"
    )


def test_a_slots_next_owner_starts_afresh(runner, builder, table):
    """This holds even if its context is one token longer than the last one of the seat's owner
    before."""
    runner.batch("a")
    split(builder, [300])
    table.release(["a"])
    runner.batch("b")
    assert split(builder, [301]).decode[0].rows.fresh.tolist() == [1]
