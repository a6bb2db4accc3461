"""Teacher forcing inside the engine: a logits processor that leaves one token to choose from."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

FORCED_TOKENS = "forced_tokens"
"""Key of ``SamplingParams.extra_args`` that holds the token ids to generate first."""


class ForceTokens(AdapterLogitsProcessor):
    """Makes a request generate the tokens named in its `FORCED_TOKENS`, then lets it run free.

    vLLM computes the log-probs it reports from the raw logits, before this runs, so they are the
    model's own.
    """

    def is_argmax_invariant(self) -> bool:
        """Forcing decides the most likely token, so it must run for greedy requests too."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], torch.Tensor], torch.Tensor] | None:
        """Return the function that forces this request's tokens; None where there are none."""
        forced: list[int] | None = (params.extra_args or {}).get(FORCED_TOKENS)
        if not forced:
            return None

        def force(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(generated) < len(forced):
                token = forced[len(generated)]
                kept = logits[token].item()
                logits.fill_(-float("inf"))
                logits[token] = kept
            return logits

        return force
