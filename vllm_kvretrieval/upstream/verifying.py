"""How vLLM samples in steps that may verify drafts, on CPUs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor

MASKS = ("logits_slice", "restore_logits_slice")
"""Rows and tokens of a ``MinTokensLogitsProcessor``; releases of vLLM have one pair or both."""


def verify_as_asked() -> None:
    """Let drafts be verified by the temperature, ``top_k`` and ``top_p`` of their own request.

    On CPUs vLLM repeats these numbers by a function in place of a Triton kernel, which writes
    int64 alone. All others go into a copy, and the sampler reads memory that nobody has written.
    And in a step without drafts it draws a random number for each word that might replace one, and
    with ``top_k`` alone looks for the largest one of the step's drafts. ``min_tokens`` it counts
    without the drafts before a token.
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
            with _ends_allowed(sampling_metadata, metadata.num_draft_tokens):
                return verify(self, metadata, draft_probs, logits, sampling_metadata)
        return self.sampler(logits=logits, sampling_metadata=sampling_metadata)

    return sample


@contextmanager
def _ends_allowed(sampling_metadata: Any, drafts: Sequence[int]) -> Iterator[None]:
    """Let the token behind a request's drafts end its answer, if it is long enough with them.

    The masks are those of these tokens alone: of drafts, vLLM makes them anew.

    Args:
        sampling_metadata: VLLM's ``SamplingMetadata``.
        drafts: How many drafts each request has.
    """
    found = [
        each
        for each in sampling_metadata.logitsprocs.non_argmax_invariant
        if isinstance(each, MinTokensLogitsProcessor)
    ]
    before = [
        {name: getattr(each, name) for name in MASKS if hasattr(each, name)} for each in found
    ]
    for each, masks in zip(found, before, strict=True):
        short = [
            row for row, (least, out, *_) in each.min_toks.items() if len(out) + drafts[row] < least
        ]
        for name, (rows, tokens) in masks.items():
            kept = torch.isin(rows, torch.tensor(short, dtype=rows.dtype))
            setattr(each, name, (rows[kept], tokens[kept]))
    try:
        yield
    finally:
        for each, masks in zip(found, before, strict=True):
            vars(each).update(masks)


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
