"""The drafter: what vLLM asks after each step for tokens that the next one verifies.

vLLM's V1 model runner makes it (``method: custom_class``), and the worker connects it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from vllm_kvretrieval.drafting.lookup import find
from vllm_kvretrieval.drafting.pace import MODEL, Pace, Plan, row_cost
from vllm_kvretrieval.engine.running import Note, read_options
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestReader

PATH = f"{__name__}.Drafter"
"""What vLLM's ``speculative_config`` names as ``model``."""


DEAR = 0.8
"""The time of a step that drafts, as a share of one over whole contexts, from which on the model is
not even tried."""


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


class ModelDrafts(Protocol):
    """Drafts by the served model itself, over the budget's pages."""

    def room(self, place: int) -> int:
        """Tokens that the blocks hold of the request with this place in the batch."""
        ...

    def cost(self, lengths: Sequence[int], budget: int) -> float:
        """The time of a step that drafts, as a share of one over whole contexts.

        Args:
            lengths: Tokens of the contexts of a step.
            budget: Tokens that a draft attends to.
        """
        ...

    def draft(self, rows: Sequence[Row]) -> list[list[int]]:
        """The drafts of each row."""
        ...


class _Draft(NamedTuple):
    kind: int
    tokens: int


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
        model: ModelDrafts | None,
    ) -> None:
        """Connect the drafter to the running requests.

        Args:
            notes: What is known of the requests that have not ended, by id.
            batch: Returns the requests of the step in batch order, by id.
            model: Drafts for requests with ``lossless``; None: they have lookups only.
        """
        self._notes, self._batch, self._model = notes, batch, model

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
        batch = self._batch()
        lengths = [int(num_tokens_no_spec[n]) for n, new in enumerate(sampled_token_ids) if new]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = list[Row]()
        for place, sampled in enumerate(sampled_token_ids):
            if not sampled:
                continue
            request, length = batch[place], int(num_tokens_no_spec[place])
            options = read_options(request, self._notes[request].extra_args, self._reader)
            pace = self._paces.setdefault(request, Pace())
            self._note_verified(request, pace, len(sampled) - 1)
            most = min(options.drafts, self._longest - length - 1)
            if most <= 0:
                continue
            model = self._model if options.lossless else None
            budget = options.budget.total * self._config.page_size
            step = 1.0 if model is None else model.cost(lengths, budget)
            cost = row_cost(len(lengths)) * step
            context = token_ids_cpu[place, :length]
            match = find(context)
            kind = pace.kind(match.length)
            plan = pace.plan(kind, min(most, length - match.end), cost)
            if model is not None:
                room = min(most, model.room(place) - length + 1)
                own = pace.plan(MODEL, room, step + cost)
                if own.tokens == 0 < room and step < DEAR and pace.probe(MODEL):
                    own = Plan(1, plan.rate + 1)
                if own.rate > plan.rate:
                    rows.append(Row(request, place, length, int(context[-1]), own.tokens))
                    continue
            count = plan.tokens
            if count == 0 and kind >= 0 and pace.probe(kind):
                count = 1
            if count:
                drafts[place] = context[match.end : match.end + count].tolist()
                self._drafted[request] = _Draft(kind, count)
        if rows:
            assert self._model is not None
            for row, drafted in zip(rows, self._model.draft(rows), strict=True):
                drafts[row.place] = drafted
                self._drafted[row.request] = _Draft(MODEL, len(drafted))
        return drafts

    def _note_verified(self, request: str, pace: Pace, accepted: int) -> None:
        """Note what became of the request's last draft, if the step has verified some of it."""
        drafted = self._drafted.pop(request, None)
        verified = sum(token >= 0 for token in self._verified.get(request, ()))
        if drafted is not None and verified:
            pace.note(drafted.kind, min(verified, drafted.tokens), accepted)
