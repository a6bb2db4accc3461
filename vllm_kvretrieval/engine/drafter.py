"""The drafter: what vLLM asks after each step for tokens that the next one verifies.

vLLM's V1 model runner makes it (``method: custom_class``), and the worker connects it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from vllm_kvretrieval.drafting.lookup import Match, find
from vllm_kvretrieval.drafting.pace import MODEL, Cost, Pace
from vllm_kvretrieval.engine.running import Note, read_options
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions, RequestReader

PATH = f"{__name__}.Drafter"
"""What vLLM's ``speculative_config`` names as ``model``."""


class Row(NamedTuple):
    """A request for which the model drafts.

    Attributes:
        request: Its id.
        place: Its place in the batch.
        length: Tokens of its context, of which the last one has no keys and values yet.
        last: The last of them.
        drafts: How many tokens to draft.
    """

    request: str
    place: int
    length: int
    last: int
    drafts: int


class Reading(NamedTuple):
    """What a request reads of its context in a step.

    Attributes:
        tokens: How many tokens it attends to.
        whole: Whether these are the whole context; otherwise the budget's pages.
    """

    tokens: int
    whole: bool


class StepCosts(Protocol):
    """How long steps take."""

    def drafting(self, lengths: Sequence[int], budget: int) -> float:
        """The time of a step that drafts, as a share of one over whole contexts.

        Args:
            lengths: Tokens of the contexts of a step.
            budget: Tokens that a draft attends to.
        """
        ...

    def verifying(self, readings: Sequence[Reading]) -> Sequence[Cost]:
        """The time that drafts of each of the requests of a step take.

        Args:
            readings: Theirs.
        """
        ...


class ModelDrafts(Protocol):
    """Drafts by the served model itself, over the budget's pages."""

    def room(self, place: int) -> int:
        """Tokens that the blocks hold of the request with this place in the batch."""
        ...

    def draft(self, rows: Sequence[Row]) -> list[list[int]]:
        """The drafts of each row."""
        ...


class _Draft(NamedTuple):
    kind: int
    tokens: int


class _Way(NamedTuple):
    """A way to draft for a request.

    Attributes:
        kind: The kind of draft, as :class:`Pace` counts it; -1: there is nothing to draft.
        most: Its most tokens.
        step: The time of the step of the model that drafts each of them.
    """

    kind: int
    most: int
    step: float


class _Request(NamedTuple):
    """A request for which tokens may be drafted.

    Attributes:
        request: Its id.
        place: Its place in the batch.
        context: int32 [length]; its tokens.
        match: Where its last tokens stood before.
        pace: What its drafts have come to.
        cost: The time to verify a draft.
        ways: How they may be drafted.
    """

    request: str
    place: int
    context: np.ndarray
    match: Match
    pace: Pace
    cost: Cost
    ways: Sequence[_Way]

    def choose(self, drafts: int) -> _Draft:
        """What yields most, in a step with so many drafts."""
        best, rate = _Draft(-1, 0), 0.0
        for kind, most, cost in self._costs(drafts):
            plan = self.pace.plan(kind, most, cost)
            if plan.rate > rate:
                best, rate = _Draft(kind, plan.tokens), plan.rate
        return best

    def probe(self, drafts: int) -> _Draft | None:
        """A token of a kind that does not pay, if it is time to try one."""
        for kind, most, cost in reversed(self._costs(drafts)):
            if self.pace.probe(kind, most, cost):
                return _Draft(kind, 1)
        return None

    def _costs(self, drafts: int) -> list[tuple[int, int, Cost]]:
        """The kind, the most tokens and the time of a draft in each way."""
        once, token, _ = self.cost.among(drafts)
        return [(way.kind, way.most, Cost(once, token + way.step)) for way in self.ways]


def _choose(requests: Sequence[_Request]) -> list[_Draft]:
    """What to draft for the requests of a step.

    Those with a draft bear what drafts of a step share: the fewer there are, the less they pay.
    """
    drafts, chosen = len(requests), list[_Draft]()
    while True:
        chosen = [each.choose(drafts) for each in requests]
        if (drafting := sum(each.tokens > 0 for each in chosen)) == drafts:
            break
        drafts = drafting
    return [each.probe(drafts) or draft for each, draft in zip(requests, chosen, strict=True)]


class Drafter:
    """Drafts tokens for the requests of a worker.

    A request's tokens come from its own context (:mod:`vllm_kvretrieval.drafting.lookup`), as many
    as are likely enough (:mod:`vllm_kvretrieval.drafting.pace`). What is kept of a request does not
    grow with it, and goes when it ends. The same steps lead to the same drafts, on all workers.

    Args:
        vllm_config: vLLM's configuration.
    """

    def __init__(self, vllm_config: Any) -> None:
        config = RetrievalConfig.from_vllm(vllm_config)
        assert config is not None, "the platform names the drafter for retrieval backends only"
        self._config, self._reader = config, RequestReader(config)
        self._longest = vllm_config.model_config.max_model_len
        self._notes: Mapping[str, Note] = {}
        self._batch: Callable[[], Sequence[str]] = list
        self._costs: StepCosts
        self._model: ModelDrafts | None = None
        self._paces: dict[str, Pace] = {}
        self._drafted: dict[str, _Draft] = {}
        self._verified: Mapping[str, Sequence[int]] = {}

    def load_model(self, model: Any) -> None:
        """See vLLM's proposers; there is no further model."""

    def attach(
        self,
        notes: Mapping[str, Note],
        batch: Callable[[], Sequence[str]],
        costs: StepCosts,
        model: ModelDrafts | None,
    ) -> None:
        """Connect the drafter to the running requests.

        Args:
            notes: What is known of the requests that have not ended, by id.
            batch: Returns the requests of the step in batch order, by id.
            costs: Say how long steps take.
            model: Drafts for requests with ``lossless``; None: they have lookups only.
        """
        self._notes, self._batch, self._costs, self._model = notes, batch, costs, model

    def begin_step(self, verified: Mapping[str, Sequence[int]], ended: Iterable[str]) -> None:
        """Begin a step.

        Args:
            verified: Draft tokens that the step verifies, by request; -1 stands for none.
            ended: Requests that have ended.
        """
        self._verified = verified
        for request in ended:
            self._paces.pop(request, None)
            self._drafted.pop(request, None)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
        **others: Any,
    ) -> list[list[int]]:
        """The draft tokens of each request in the batch; see vLLM's ``NgramProposer.propose``.

        Args:
            sampled_token_ids: Tokens that each request has got in the step; none: it reads its
                prompt.
            num_tokens_no_spec: int [R]; tokens of each context with these.
            token_ids_cpu: int32 [R, max_model_len]; the contexts.
            slot_mappings: Not needed.
            others: What later releases of vLLM may pass.
        """
        batch, asked = self._batch(), dict[int, RequestOptions]()
        for place, sampled in enumerate(sampled_token_ids):
            if sampled:
                request = batch[place]
                extra_args = self._notes[request].extra_args
                asked[place] = read_options(request, extra_args, self._reader)
                self._note_verified(request, len(sampled) - 1)
        lengths = {place: int(num_tokens_no_spec[place]) for place in asked}
        readings = [self._reading(lengths[place], options) for place, options in asked.items()]
        requests = list[_Request]()
        costs = self._costs.verifying(readings)
        for (place, options), cost in zip(asked.items(), costs, strict=True):
            length, pace = lengths[place], self._paces[batch[place]]
            if (most := min(options.drafts, self._longest - length - 1)) <= 0:
                continue
            context = token_ids_cpu[place, :length]
            match = find(context)
            ways = [_Way(pace.kind(match.length), min(most, length - match.end), 0.0)]
            if options.lossless and self._model is not None:
                room = min(most, self._model.room(place) - length + 1)
                step = self._costs.drafting([*lengths.values()], self._budget(options))
                ways.append(_Way(MODEL, room, step))
            requests.append(_Request(batch[place], place, context, match, pace, cost, ways))
        return self._draft(requests, len(sampled_token_ids))

    def _draft(self, requests: Sequence[_Request], places: int) -> list[list[int]]:
        """The draft tokens by place in the batch."""
        drafts: list[list[int]] = [[] for _ in range(places)]
        rows = list[Row]()
        for each, (kind, count) in zip(requests, _choose(requests), strict=True):
            if kind == MODEL:
                last = int(each.context[-1])
                rows.append(Row(each.request, each.place, len(each.context), last, count))
            elif count:
                drafts[each.place] = each.context[each.match.end :][:count].tolist()
                self._drafted[each.request] = _Draft(kind, count)
        if rows:
            assert self._model is not None
            for row, drafted in zip(rows, self._model.draft(rows), strict=True):
                drafts[row.place] = drafted
                self._drafted[row.request] = _Draft(MODEL, len(drafted))
        return drafts

    def _budget(self, options: RequestOptions) -> int:
        """Tokens that a request attends to at most, if not to everything."""
        return options.budget.total * self._config.page_size

    def _reading(self, length: int, options: RequestOptions) -> Reading:
        """What a request reads of a context of so many tokens."""
        budget = self._budget(options)
        short = length <= max(budget, options.certain_budget(self._config))
        whole = options.exact or short
        return Reading(length if whole else budget, whole)

    def _note_verified(self, request: str, accepted: int) -> None:
        """Note what became of the request's last draft, if the step has verified some of it."""
        pace = self._paces.setdefault(request, Pace())
        drafted = self._drafted.pop(request, None)
        verified = sum(token >= 0 for token in self._verified.get(request, ()))
        if drafted is not None and verified:
            pace.note(drafted.kind, min(verified, drafted.tokens), accepted)
