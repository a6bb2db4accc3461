"""Which blocks of the prefix cache requests share; vLLM's own scheduler, without a model."""

import random
from itertools import permutations
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from benchmarks.stepper import BLOCK, Stepper, full_attention
from tests.support.exactness_model import Truth
from vllm_kvretrieval.retrieval.exactness_levels import EXACT as NOTHING_LOST

pytestmark = pytest.mark.model

BUDGET = 128
Options = dict[str, Any]
EXACT: Options = {"exact": True}
WHOLE: Options = {"exact_prefix": True}
OBSERVING = ("snapkv", "entropykv", "h2o", "tova", "raas")


def text(tokens: int, seed: int = 0) -> list[int]:
    return [(37 * seed + 3 * i) % 499 for i in range(tokens)]


def full(tokens: int, block: int = BLOCK) -> int:
    """Tokens of the full blocks of a context, of which vLLM computes the last token anew."""
    return (tokens - 1) // block * block


def window(tokens: int = 64, block: int = BLOCK) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=tokens
    )


def state(block: int) -> MambaSpec:
    return MambaSpec(
        block_size=block, shapes=((16,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


@pytest.fixture
def stepper():
    return Stepper(
        {"budget": BUDGET, "max_budget": 1024, "also": [*OBSERVING, "freekv"]}, max_num_seqs=16
    )


def test_exact_requests_share_no_decoded_blocks(stepper):
    """A chat; at first what was decoded is recomputed, then it is there for all."""
    answer, _ = stepper.ask(text(900), 300)
    chat = text(900) + answer + text(20, 5)
    assert stepper.ask(chat, 1)[1] == full(1200), "an ordinary request shares as before"
    for options in (EXACT, WHOLE, {"method": "snapkv"}):
        fresh = Stepper({"budget": BUDGET, "also": [*OBSERVING]})
        fresh.ask(text(900), 300)
        assert fresh.ask(chat, 1, options)[1] == full(900)
        assert fresh.ask(chat, 1, options)[1] == full(1220)
    assert stepper.ask(chat, 1)[1] == full(1220)


def test_methods_that_rate_by_all_queries_share_nothing(stepper):
    stepper.ask(text(500), 1, EXACT)
    assert stepper.ask(text(500), 1, EXACT)[1] == full(500)
    shared = {name: stepper.ask(text(500), 1, {"method": name})[1] for name in OBSERVING}
    by_all = dict.fromkeys(("entropykv", "h2o"), 0)
    assert shared == dict.fromkeys(OBSERVING, full(500)) | by_all


def test_contexts_within_their_budgets_leave_exact_blocks(stepper):
    for budget, until in ((1024, 700), (512, 512), (BUDGET, 400)):
        stepper.scheduler.reset_prefix_cache()
        answer, _ = stepper.ask(text(400), 300, {"budget": budget})
        assert stepper.ask(text(400) + answer + text(9, 5), 1, EXACT)[1] == full(until + 1)


def test_an_exact_turn_makes_what_follows_exact(stepper):
    """As one with a larger budget does with what came before; its own answer is approximate."""
    larger: Options = {"budget": 256}
    for order in permutations(({}, EXACT, larger)):
        stepper.scheduler.reset_prefix_cache()
        chat, exact_until, ordinary = text(300, 7), 300, False
        for options in order:
            if options == larger and ordinary:
                exact_until = len(chat)
            if options != EXACT:
                exact_until = min(exact_until, len(chat))
            ordinary = (ordinary and options == {}) or options == {}
            chat = chat + stepper.ask(chat, 64, options)[0]
            if options == EXACT:
                exact_until = 1000
            shared = full(len(chat))
            chat = chat + text(40, len(chat))
            assert stepper.ask(chat, 1)[1] == shared, "an ordinary turn shares all"
        assert stepper.ask(chat, 1, EXACT)[1] == full(min(exact_until + 1, len(chat)))


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        ({}, {}, True),
        ({"budget": 256}, {}, True),
        ({}, {"budget": 256}, False),
        ({"mass": 0.9}, {}, False),
        ({}, {"mass": 0.9}, True),
        ({"method": "freekv"}, {}, False),
        ({}, {"method": "freekv"}, False),
        ({"method": "freekv", "correction_threshold": 0.5}, {"method": "freekv"}, False),
        ({"method": "freekv"}, {"method": "freekv", "correction_threshold": 0.5}, True),
        ({"budget": 256, "mass": 0.9}, {}, False),
    ],
)
def test_answers_are_shared_if_they_are_as_exact(first, second, shares):
    """As those of the request that shares them would be; else they are read, and exact then."""
    options = {"budget": BUDGET, "max_budget": 1024, "also": ["freekv"], "remainder": 0}
    stepper = Stepper(options)
    answer, _ = stepper.ask(text(400), 200, first)
    chat = text(400) + answer + text(9, 5)
    assert stepper.ask(chat, 1, second)[1] == full(601 if shares else 400)
    assert stepper.ask(chat, 1, second)[1] == full(609)
    assert stepper.ask(chat, 1, first)[1] == full(609)


@pytest.mark.parametrize(
    ("first", "second", "shares"),
    [
        ({"prefill_budget": 256}, {}, False),
        ({}, {"prefill_budget": 256}, True),
        ({"prefill_budget": 256, "prefill_share": 0}, {}, False),
        ({"prefill_share": 0}, {"prefill_budget": 256}, False),
        ({"prefill_share": 0}, {"prefill_budget": 256, "prefill_share": 0}, True),
        ({"method": "freekv"}, {}, False),
        ({"method": "freekv", "prefill_budget": 256}, {"method": "freekv"}, False),
        ({}, {"prefill_budget": 0}, False),
        ({"prefill_budget": 0}, {"prefill_budget": 256}, True),
    ],
)
def test_prompts_are_shared_if_they_are_as_exact(first, second, shares):
    """The latest of several that cannot be compared is found, and else the most exact one."""
    options = {"budget": 2048, "prefill_budget": 512, "prefill_share": 0.25, "also": ["freekv"]}
    exact = 640
    stepper = Stepper(options)
    stepper.ask(text(1500), 1, first)
    chunked = {True: 1408, False: full(1500)}
    whole = chunked[second != {"prefill_budget": 0}]
    assert stepper.ask(text(1500), 1, second)[1] == (whole if shares else exact)
    assert stepper.ask(text(1500), 1, second)[1] == whole
    worse = "method" not in first or "method" in second
    worse = worse and second.get("prefill_budget", 512) != 256
    kept = worse or shares
    assert stepper.ask(text(1500), 1, first)[1] == (
        chunked[first != {"prefill_budget": 0}] if kept else exact
    )


@pytest.mark.parametrize("backend", ["kvretrieval", "omnikv"])
def test_the_last_token_of_a_prompt_is_a_chunk(backend):
    """Alone, in company, and behind a prefix in the cache: as much of a prompt is approximate."""
    options = {"budget": 2048, "prefill_budget": 256, "prefill_chunk": 128}
    for company in (False, True):
        stepper = Stepper(options, backend=backend)
        truth, steps = Truth(stepper), list[int]()
        if company:
            stepper.add(text(40, 3), 60)
            stepper.step()
        for shared in (0, 1024):
            before = truth.approximate
            name = stepper.add(text(1025), 1)
            while name in stepper.scheduler.requests:
                output = stepper.step()
                steps.append(output.num_scheduled_tokens.get(name, 0))
            assert stepper.shared[name] == [shared]
            assert truth.approximate - before == 1025 - max(384, shared)
        assert steps[0] == (384 if company else 512)
        chat = text(1025) + text(200, 4)
        assert stepper.ask(chat, 1)[1] == 1024
        assert stepper.ask(chat, 1, EXACT)[1] == 384


def test_images_cut_no_chunk_where_that_can_be():
    """The encoder has no room for all images of a step; a chunk with too many of them is cut."""

    def starts(first, *others):
        stepper = Stepper({"budget": 2048, "prefill_budget": 256, "prefill_chunk": 128})
        scheduler, found = stepper.scheduler, list[int]()
        scheduler.max_num_encoder_input_tokens = 250
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1000)
        for number, places in enumerate((first, *others)):
            features = [
                MultiModalFeatureSpec(None, "image", f"{number} {at}", PlaceholderRange(at, length))
                for at, length in places
            ]
            stepper.add(text(1400 - number, number), 1, name=str(number), mm_features=features)
        while "0" in scheduler.requests:
            found.append(scheduler.requests["0"].num_computed_tokens)
            stepper.step()
        return found

    assert starts([(700, 200), (950, 100)]) == [0, 512, 896]
    assert starts([(600, 100)], [(10, 200)])[:2] == [0, 512]
    crowded = starts([(520, 100), (700, 180)], [(650, 200)], [(10, 240)])
    assert not any(start % 128 for start in crowded)
    assert 810 in starts([(780, 200), (810, 100)])


def test_where_a_state_is_kept_a_chunk_ends_if_it_can():
    """Else it is cut, as vLLM wants it; no prompt waits forever."""
    for size, others, cut in ((96, 0, False), (96, 3, False), (320, 0, True), (320, 3, True)):
        options = {"budget": 2048, "prefill_budget": 256, "prefill_chunk": 192}
        stepper = Stepper(options, groups=[full_attention(32), state(size)])
        for number in range(others):
            stepper.add(text(350, 3 + number), 30, EXACT)
        truth, starts = Truth(stepper), list[int]()
        name = stepper.add(text(1500), 1)
        while name in stepper.scheduler.requests:
            starts.append(stepper.scheduler.requests[name].num_computed_tokens)
            stepper.step()
        assert truth.approximate == 1500 - 384
        assert any(start % 192 for start in starts if start < 1344) is cut, starts


def test_nobody_overtakes_a_prompt_that_waits_for_room():
    """Neither a prompt that would fit, nor one of its kind; vLLM 0.33 would let them."""
    stepper = Stepper({"budget": 2048, "prefill_budget": 256, "prefill_chunk": 128})
    lengths = {"first": 400, "waits": 1000, "behind": 100, "alike": 100}
    for seed, (name, length) in enumerate(lengths.items()):
        stepper.add(
            text(length, seed), 2, {} if name == "alike" else {"exact": name != "waits"}, name
        )
    assert stepper.step().num_scheduled_tokens == {"first": 400}
    assert stepper.step().num_scheduled_tokens == {"first": 1, "waits": 384, "behind": 100}


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_better_of_two_blocks_is_found(ahead):
    stepper = Stepper({"budget": BUDGET}, ahead=ahead)
    answer, _ = stepper.ask(text(400), 200)
    chat = text(400) + answer
    stepper.ask(chat, 1, EXACT)
    pool = stepper.scheduler.kv_cache_manager.block_pool
    assert len(pool.cached_block_hash_to_block) == 600 // BLOCK
    cached = [b for b in pool.blocks if b.block_hash is not None]
    assert len(cached) == 600 // BLOCK, "no approximate block is left"
    assert {stepper.scheduler.levels.of(b) for b in cached} == {NOTHING_LOST}


def test_requests_of_one_step_share(stepper):
    names = [stepper.add(text(400), 2, EXACT) for _ in range(8)]
    stepper.run()
    assert [stepper.shared[name][0] for name in names] == [0] + 7 * [full(400)]


def test_blocks_of_a_step_that_nobody_has_counted_are_not_exact(stepper):
    """A block that a decode step fills is looked up before the step has been scheduled."""
    stepper.add(text(500), 200, name="long")
    while (request := stepper.scheduler.requests["long"]).num_tokens < 608:
        stepper.step()
    assert request.num_computed_tokens == 607
    chat = [*request.all_token_ids, *text(64, 5)]
    stepper.add(chat, 1, name="ordinary")
    stepper.add(chat, 1, EXACT, name="exact")
    stepper.step()
    assert stepper.shared["exact"] == [full(500)]
    assert stepper.shared["ordinary"] == [608]


def test_a_step_that_nobody_has_counted_is_the_worst(stepper):
    """The first step that drops a token fills a block, which is looked up in the same step."""
    stepper.add(text(511), 9, {"method": "tova"}, name="dropping")
    stepper.step()
    chat = [*stepper.scheduler.requests["dropping"].all_token_ids, *text(64, 5)]
    stepper.add(chat, 1, EXACT, name="exact")
    stepper.step()
    assert stepper.scheduler.requests["dropping"].num_computed_tokens == 512
    assert stepper.shared["exact"] == [480]


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_last_block_of_an_answer_is_known(ahead):
    """Blocks of tokens that come late get their hashes late."""
    stepper = Stepper({"budget": BUDGET}, ahead=ahead)
    for seed, tokens in enumerate(range(112, 117)):  # 512 to 515 are computed with the last four
        answer, _ = stepper.ask(text(400, seed), tokens)
        assert (
            stepper.ask(text(400, seed) + answer, 1)[1] == (511 + (tokens > 112)) // BLOCK * BLOCK
        )


def test_reuse_exact():
    stepper = Stepper({"budget": BUDGET, "reuse": "exact"})
    answer, _ = stepper.ask(text(400), 200)
    chat = text(400) + answer + text(9, 5)
    assert stepper.ask(chat, 1)[1] == full(400)
    assert stepper.ask(chat, 1)[1] == full(609)


@pytest.mark.parametrize("backend", ["omnikv", "kvretrieval"])
def test_sparse_prefill_shares_exact_chunks(backend):
    """And exact requests share those with it; ordinary ones stop where they do.

    Where chunks select, a hit ends with a chunk.
    """
    aligned = 96
    options = {"budget": 1024, "prefill_budget": 256, "prefill_chunk": 96}  # exact up to 288
    for first, second, shared in (
        ({}, EXACT, 288),
        ({}, {"method": "streamingllm"}, 288),
        ({}, {}, full(800) // aligned * aligned),
        (EXACT, {}, full(800) // aligned * aligned),
        (EXACT, EXACT, full(800)),
    ):
        stepper = Stepper(options, backend=backend)
        stepper.ask(text(800), 1, first)
        assert stepper.ask(text(800), 1, second)[1] == shared


def test_a_share_of_the_prompt_is_no_budget_to_rely_on():
    stepper = Stepper({"memory_fraction": 0.5, "max_budget": 2048})
    retrieval = stepper.scheduler.retrieval
    least = retrieval.budgets.least(retrieval.own)
    answer, _ = stepper.ask(text(least - 10), 100)
    chat = text(least - 10) + answer + text(9, 5)
    assert stepper.ask(chat, 1, EXACT)[1] == full(least + 1)


@pytest.mark.parametrize("ahead", [0, 1])
def test_sessions_keep_what_their_options_promise(ahead):
    stepper = Stepper({"budget": BUDGET, "also": ["h2o"]}, ahead=ahead)
    truth = Truth(stepper)
    turns: list[Options] = [{}, EXACT, {}, {}, EXACT, {}, WHOLE, {"method": "h2o"}, EXACT]
    chat = 0
    for turn, options in enumerate(turns):
        length = 150 if turn else 120  # at first only the last tokens are beyond the budget
        truth.promised = {"s"} if options == EXACT else set()
        truth.exact_prefixes = {"s"} if options == WHOLE else set()
        stepper.add(text(length, turn), 20, options, name="s", resumable=True)
        while stepper.scheduler.requests["s"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            stepper.step()
        chat += length + 19  # the last token is not kept
        assert stepper.scheduler.requests["s"].num_computed_tokens == chat
    stepper.scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    stepper.run()
    shared = stepper.shared["s"]
    assert shared[:5] == [0, 128, 308, 477, 458 // BLOCK * BLOCK]
    assert shared[7] == 0, "all queries of the prompt are looked at"
    assert truth.approximate > 0
    again = stepper.scheduler.kv_cache_manager.block_pool
    assert again.get_num_free_blocks() == again.num_gpu_blocks - 1


KINDS: dict[str, tuple[Options, list[Any]]] = {
    "full": ({}, [full_attention()]),
    "dropping": ({"also": [*OBSERVING]}, [full_attention(64)]),
    "share": ({"memory_fraction": 0.4, "max_budget": 512}, [full_attention()]),
    "window": ({}, [full_attention(64), window(block=32), window(block=32)]),
    "state": ({}, [full_attention(64), state(64)]),
    "fine state": ({}, [full_attention(32), state(128)]),
}
ORDINARY: list[Options] = [{}, {"budget": 256}, {"method": "streamingllm"}]


def mixed(stepper, seed, asked, first=250):
    """Conversations that share prefixes: some are gone on with, aborted, or start anew.

    Returns:
        What every request shared when it was first scheduled.
    """
    draw, past, truth = random.Random(seed), [text(first, i) for i in range(4)], None
    if hasattr(stepper.scheduler, "levels"):
        truth = Truth(stepper)
    prompts = {}
    for step in range(250):
        for _ in range(draw.choice([0, 0, 1, 2]) if step % 60 < 30 else 0):
            base = draw.choice(past)
            prompt = base[: draw.randrange(150, len(base) + 1)][:900]
            prompt = prompt + text(draw.choice([0, 40]), draw.randrange(9))
            options = draw.choice(asked)
            name = stepper.add(prompt, draw.choice([1, 20, 90]), options)
            prompts[name] = prompt
            if truth and options == EXACT:
                truth.promised.add(name)
            if truth and (options == WHOLE or options.get("method") in OBSERVING):
                truth.exact_prefixes.add(name)
        stepper.step()
        for name in [n for n in prompts if n not in stepper.scheduler.requests]:
            past.append(prompts.pop(name) + stepper.outputs[name])
        if prompts and draw.random() < 0.02:
            gone = draw.choice(list(prompts))
            stepper.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
        if draw.random() < 0.01:
            stepper.scheduler.reset_prefix_cache(reset_running_requests=True)
    if stepper.scheduler.has_unfinished_requests():
        stepper.run()
    return stepper.shared, truth


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_no_approximate_token_is_in_an_exact_block(kind, ahead):
    """Against the worker's own table and rules; with preemption, aborts and resets."""
    options, groups = KINDS[kind]
    asked = [*ORDINARY, EXACT, WHOLE]
    asked += [{"method": name} for name in OBSERVING] if kind == "dropping" else []
    stepper = Stepper({"budget": BUDGET, "max_budget": 512} | options, 130, groups, ahead=ahead)
    shared, truth = mixed(stepper, 1, asked)
    assert truth.preempted
    assert truth.approximate > 1000
    assert (truth.counted[:2] > 1000).all()
    assert sum(first[0] > 0 for first in shared.values()) > 20
    assert not stepper.scheduler._contexts, "finished requests are forgotten"


@pytest.mark.parametrize(("seed", "backend"), [(1, "omnikv"), (2, "omnikv"), (3, "kvretrieval")])
def test_sparse_prefill_is_marked(seed, backend):
    """And chunks are never cut."""
    options = {"budget": 256, "max_budget": 512, "prefill_budget": 256, "prefill_chunk": 96}
    stepper = Stepper(options, 130, backend=backend)
    asked: list[Options] = [{}, {"budget": 512}, {"method": "streamingllm"}, EXACT, WHOLE]
    if backend == "kvretrieval":
        asked += [{"prefill_budget": 192}, {"prefill_budget": 192, "budget": 512}]
    _, truth = mixed(stepper, seed, asked, 500)
    assert (truth.counted > 500).all()


@pytest.mark.parametrize(("sparse", "ahead"), [(False, 1), (True, 0)])
def test_nothing_is_shared_that_is_less_exact_than_asked_for(sparse, ahead):
    """Chats that others go on with, and that ask for more, less, or other than before."""
    options: Options = {"budget": 160, "max_budget": 512, "also": ["freekv"], "remainder": 0}
    asked: list[Options] = [{}, {"budget": 128}, {"budget": 256}, {"mass": 0.9}, EXACT]
    asked += [{"method": "freekv"}, {"method": "freekv", "correction_threshold": 0.5}]
    if sparse:
        options |= {"prefill_budget": 256, "prefill_share": 0.25, "prefill_chunk": 96}
        asked += [{"prefill_budget": 192}, {"prefill_share": 0}, {"prefill_budget": 0}]
    draw, stepper = random.Random(5), Stepper(options, 150, ahead=ahead)
    truth, running = Truth(stepper), dict[str, tuple[list[int], Options]]()
    past: list[tuple[list[int], Options]] = [(text(500, i), {}) for i in range(3)]
    for turn in range(40):
        chat, before = draw.choice(past)
        chat = chat[: draw.choice([len(chat), len(chat), 400])] + text(30, turn)
        own = draw.choice([before, draw.choice(asked)])
        running[stepper.add(chat, draw.choice([1, 70, 130]), own)] = chat, own
        for _ in range(draw.choice([1, 60])):
            stepper.step()
        for name in sorted(running.keys() - stepper.scheduler.requests.keys()):
            chat, own = running.pop(name)
            past.append(((chat + stepper.outputs[name])[:1200], own))
        past = past[-4:]
    stepper.run()
    assert truth.borrowed > (1000 if sparse else 200)
    assert truth.approximate > 1000


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_equal_options_share_as_much_as_without_levels(kind, ahead):
    options, groups = KINDS[kind]
    stock = AsyncScheduler if ahead else Scheduler
    counts = []
    for scheduler in (None, stock):
        stepper = Stepper(
            {"budget": BUDGET, "max_budget": 512} | options,
            4000,
            groups,
            ahead=ahead,
            scheduler=scheduler,
        )
        counts.append(mixed(stepper, 3, [{}])[0])
    ours, before = (sum(first[0] for first in shared.values()) for shared in counts)
    assert before > 5000
    # A state that vLLM copies is nobody's in that step.
    assert counts[0] == counts[1] or (kind == "fine state" and ours > 0.97 * before)
