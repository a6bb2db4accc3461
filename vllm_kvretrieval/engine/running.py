"""What is known of requests from the time they come until they end; the same on every device."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm.logger import init_logger

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.of_hints import with_hints
from vllm_kvretrieval.options.request import RequestOptions, RequestReader
from vllm_kvretrieval.retrieval.seats import SEAT_FIELDS

logger = init_logger("vllm.kvretrieval.requests")


class Note(NamedTuple):
    """A request as the scheduler has announced it.

    Attributes:
        extra_args: ``extra_args`` of the sampling parameters, as the client has given them.
        prompt: Tokens of its prompt.
        tokens: Tokens that it had when it came: its prompt, and after an interruption also what it
            had generated before. They are read, and not decoded.
    """

    extra_args: Mapping[str, Any] | None
    prompt: int
    tokens: int


def notes(scheduler_output: Any, known: Mapping[str, Note]) -> dict[str, Note]:
    """The requests that a step brings, by id: new ones, those that resume, and sessions that go on.

    vLLM's V2 runner gets requests that resume as new ones, its V1 runner as known ones.

    Args:
        scheduler_output: vLLM's ``SchedulerOutput``.
        known: Notes of requests that have not ended, the interrupted ones among them.
    """
    found = {
        new.req_id: Note(
            getattr(new.sampling_params, "extra_args", None),
            new.prompt_len,
            new.prompt_len if new.prefill_token_ids is None else len(new.prefill_token_ids),
        )
        for new in scheduler_output.scheduled_new_reqs
    }
    cached = scheduler_output.scheduled_cached_reqs
    if cached.resumed_req_ids:
        for req_id, generated in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if req_id in cached.resumed_req_ids:
                note = known[req_id]
                found[req_id] = note._replace(tokens=note.prompt + generated)
    return found


def read_options(
    req_id: str, extra_args: Mapping[str, Any] | None, reader: RequestReader, hints: Any = None
) -> RequestOptions:
    """The options of a request and its hints.

    A front end that skips our validation may send some that cannot be served. Such hints are left
    out, and in place of such options the request has the engine's own.
    """
    try:
        return reader.read(with_hints(extra_args, hints))
    except RetrievalConfigError as e:
        if hints is not None:
            logger.error("Request %s runs without its hints: %s", req_id, e)
            return read_options(req_id, extra_args, reader)
        logger.error("Request %s runs with the server's options: %s", req_id, e)
        return reader.read(None)


def write_options(seat: Any, options: RequestOptions, config: RetrievalConfig) -> None:
    """Write the options of a request into its seat.

    Args:
        seat: A record of an array of :data:`SEAT`.
        options: The options.
        config: Options of the engine.
    """
    seat["sink"], seat["window"], seat["select"] = options.budget
    seat["total"], seat["exact"] = options.budget.total, options.exact
    seat["method"] = [*config.methods].index(options.method)
    for known in SEAT_FIELDS:
        seat[known.column] = options.numbers[known.name]
    seat["prefill"] = options.prefill_budget or 0
    seat["prefill_share"] = options.prefill_share
