"""Steps that end with a chunk, where chunks of prompts select what they attend to."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_kvretrieval.options.engine import RetrievalConfig


class ChunkScheduler(Scheduler):
    """vLLM's scheduler, which cuts no chunk of a prompt that retrieves, where it need not.

    What the parts of a chunk select and attend to would depend on the other requests of the step.
    vLLM cuts where a state of a Mamba layer has to be kept, and before an image for which the
    encoder has no room. Such a chunk is cut where no border of chunks will do.

    vLLM lets two methods shorten the part of a prompt that a step reads: the one that looks for
    room in the encoder, and after it the one that keeps steps from ending near a prompt's end.

    Attributes:
        retrieval: Options of the engine.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = RetrievalConfig.from_vllm(self.vllm_config)
        assert config is not None, "the platform sets this class where a method is named"
        self.retrieval = config
        self._chunk = config.prefill_chunk if config.prefill_budget is not None else None
        self._full_step = -1  # the last one that had no room for a whole chunk

    def _retrieves(self, request: Request) -> bool:
        """Whether chunks of a request's prompt attend to a part of what lies before them."""
        raise NotImplementedError

    def _begin_of_chunk(self, request: Request, position: int) -> int:
        """Where the chunk begins that has this position; the position itself if none selects."""
        if self._chunk is None or not self._retrieves(request):
            return position
        return position // self._chunk * self._chunk

    def _whole_chunks(self, request: Request, start: int, tokens: int) -> int:
        """How many of so many tokens from ``start`` on are whole chunks, or all of a prompt."""
        end = start + tokens
        if end >= tokens_to_read(request):
            return tokens
        return max(self._begin_of_chunk(request, end) - start, 0)

    def _cut(self, request: Request, start: int, tokens: int) -> int:
        """How many of so many tokens from ``start`` on a step reads.

        Nobody overtakes a request that has to wait for a step with more room.
        """
        if self._chunk is None:
            return tokens
        waits = request.status != RequestStatus.RUNNING
        if waits and self._full_step == self.current_step:
            return 0
        cut = self._by_mamba if self.need_mamba_block_aligned_split else self._whole_chunks
        whole = cut(request, start, tokens)
        if waits and whole == 0:
            self._full_step = self.current_step
        return whole

    def _by_mamba(self, request: Request, start: int, tokens: int) -> int:
        """The same in models with Mamba layers, where vLLM has cut as many as ``tokens``."""
        found = start - request.num_computed_tokens

        def by_vllm(tokens: int) -> int:
            return self._mamba_block_aligned_split(request, tokens, found)

        def most(tokens: int) -> int:
            """The most of so many tokens that are whole chunks and that vLLM does not cut."""
            whole = self._whole_chunks(request, start, tokens)
            while 0 < whole < tokens and by_vllm(whole) != whole:
                whole = self._whole_chunks(request, start, whole - 1)
            return whole

        if (whole := most(tokens)) or not tokens:
            return whole
        # If others leave too little, it waits for a step of which it is the first prompt.
        room = self.max_num_scheduled_tokens - self.max_num_running_reqs
        threshold = self.scheduler_config.long_prefill_token_threshold
        room = min(room, threshold or room, tokens_to_read(request) - start)
        return 0 if most(by_vllm(room)) else tokens

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """See vLLM's scheduler, which asks for all requests."""
        if not request.has_encoder_inputs:  # else it is cut already
            num_new_tokens = self._cut(request, num_computed_tokens, num_new_tokens)
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        *more: Any,
        **named: Any,
    ) -> Any:
        """See vLLM's scheduler; the second of what it returns are the tokens of the step.

        If other requests have taken the encoder's room in this step, the request waits for the
        next one.
        """
        schedule = super()._try_schedule_encoder_inputs
        num_new_tokens = self._cut(request, num_computed_tokens, num_new_tokens)
        found = schedule(
            request, num_computed_tokens, num_new_tokens, encoder_compute_budget, *more, **named
        )
        if found[1] == num_new_tokens:
            return found
        whole = self._whole_chunks(request, num_computed_tokens, found[1])
        alone = encoder_compute_budget == self.max_num_encoder_input_tokens
        if whole == found[1] or (whole == 0 and alone):
            return found
        return schedule(request, num_computed_tokens, whole, encoder_compute_budget, *more, **named)


def tokens_to_read(request: Request) -> int:
    """Tokens that a request has, which are read when it comes, or comes back."""
    return max(request.num_tokens, request.num_prompt_tokens)
