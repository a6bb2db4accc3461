"""How vLLM samples in steps that may verify drafts, on CPUs."""

from functools import wraps
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler


def verify_as_asked() -> None:
    """Let drafts be verified by the temperature, ``top_k`` and ``top_p`` of their own request.

    On CPUs vLLM repeats these numbers by a function in place of a Triton kernel, which writes
    int64 alone. All others go into a copy, and the sampler reads memory that nobody has written.
    And in a step without drafts it draws a random number for each word that might replace one, and
    with ``top_k`` alone looks for the largest one of the step's drafts.
    """
    module: Any = rejection_sampler
    module.expand_batch_to_tokens = repeated
    sampler = module.RejectionSampler
    if not hasattr(sampler.forward, "__wrapped__"):
        sampler.forward = where_drafted(sampler.forward)


def where_drafted(verify: Any) -> Any:
    """VLLM's ``RejectionSampler.forward`` for steps with drafts; others are sampled as ever.

    Args:
        verify: That function: of the sampler, the step's ``SpecDecodeMetadata``, probabilities of
            drafts, logits [drafts + R, V] and ``SamplingMetadata``; returns a ``SamplerOutput``.
    """

    @wraps(verify)
    def sample(
        self: Any, metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any
    ) -> Any:
        if metadata.max_spec_len:
            return verify(self, metadata, draft_probs, logits, sampling_metadata)
        return self.sampler(logits=logits, sampling_metadata=sampling_metadata)

    return sample


def repeated(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """See vLLM's ``rejection_sampler.expand_batch_to_tokens``.

    Args:
        x: [R]; a number of each request.
        cu_num_tokens: int [R]; drafts of the requests up to each, itself included.
        num_tokens: Drafts of all.
        replace_from: A number that is replaced.
        replace_to: By which it is.

    Returns:
        [num_tokens], of the type of ``x``.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    numbers = x.masked_fill(x == replace_from, replace_to)
    return numbers.repeat_interleave(counts, output_size=num_tokens)
