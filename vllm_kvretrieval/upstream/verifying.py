"""Numbers by which vLLM verifies drafts of requests that sample, on CPUs."""

from functools import wraps
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler


def verify_as_asked() -> None:
    """Let drafts be verified by the temperature, ``top_k`` and ``top_p`` of their own request.

    On CPUs vLLM repeats these numbers by a function in place of a Triton kernel, which writes
    int64 alone. All others go into a copy, and the sampler reads memory that nobody has written.
    And with ``top_k`` alone it looks for the largest one of a step's drafts, though there be none.
    """
    module: Any = rejection_sampler
    module.expand_batch_to_tokens = repeated
    constrain = module.apply_sampling_constraints
    if not hasattr(constrain, "__wrapped__"):
        module.apply_sampling_constraints = unless_empty(constrain)


def unless_empty(constrain: Any) -> Any:
    """See vLLM's ``rejection_sampler.apply_sampling_constraints``; without drafts nothing is done.

    Args:
        constrain: VLLM's function of logits float32 [drafts, V], and of what else it takes.
    """

    @wraps(constrain)
    def constrained(logits: torch.Tensor, *others: Any) -> torch.Tensor:
        return constrain(logits, *others) if len(logits) else logits

    return constrained


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
