"""Steps that end with a chunk, where chunks of prompts select what they attend to."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_kvretrieval.options.engine import RetrievalConfig


class ChunkScheduler(Scheduler):
    """vLLM's scheduler, which cuts no chunk of a prompt that retrieves, where it need not.

    What the parts of a chunk select and attend to would depend on the other requests of the step.
    vLLM cuts where a state of a Mamba layer has to be kept, and before an image for which the
    encoder has no room. Such a chunk is cut where no border of chunks will do.

    Attributes:
        retrieval: Options of the engine.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = RetrievalConfig.from_vllm(self.vllm_config)
        assert config is not None, "the platform sets this class where a method is named"
        self.retrieval = config
        self._chunk = config.prefill_chunk if config.prefill_budget is not None else None
        self._by_mamba = self.need_mamba_block_aligned_split
        self.need_mamba_block_aligned_split |= self._chunk is not None

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

    def _mamba_block_aligned_split(
        self, request: Request, num_new_tokens: int, *found: int, **named: int
    ) -> int:
        """Tokens of a prompt in a step; vLLM asks for models with Mamba layers, and we let it ask.

        Args:
            request: The request whose prompt is cut.
            num_new_tokens: The most tokens that the step has room for.
            found: Tokens found in the prefix cache, and by a KV connector.
            named: The same arguments by name.
        """
        start = request.num_computed_tokens + sum(found) + sum(named.values())
        if not self._by_mamba:
            return self._whole_chunks(request, start, num_new_tokens)
        by_mamba = super()._mamba_block_aligned_split

        def split(tokens: int) -> tuple[int, int]:
            """Tokens that vLLM makes of so many, and the most of them that are whole chunks."""
            tokens = by_mamba(request, tokens, *found, **named)
            whole = self._whole_chunks(request, start, tokens)
            while 0 < whole < tokens and by_mamba(request, whole, *found, **named) != whole:
                whole = self._whole_chunks(request, start, whole - 1)
            return tokens, whole

        tokens, whole = split(num_new_tokens)
        if whole or not tokens:
            return whole
        # If others leave too little, it waits for a step of which it is the first prompt.
        room = self.max_num_scheduled_tokens - self.max_num_running_reqs
        threshold = self.scheduler_config.long_prefill_token_threshold
        room = min(room, threshold or room, tokens_to_read(request) - start)
        return 0 if split(room)[1] else tokens

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
