"""Rotary embeddings of models in transformers, as vLLM has them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

BY_LENGTH = "longrope"
"""A kind whose factors transformers chooses by the end of what it reads, and vLLM once."""


@contextmanager
def alike(model: nn.Module, tokens: int) -> Iterator[None]:
    """Rotate all chunks of a text by the factors of its length, as vLLM rotates a context.

    transformers would rotate the first chunks of a long text by the short factors, and what follows
    by the long ones, so that keys of one context are not comparable.

    Args:
        model: In transformers.
        tokens: Of the text.
    """
    chosen = [m for m in model.modules() if getattr(m, "rope_type", None) == BY_LENGTH]
    for embedding in chosen:
        embedding(torch.zeros(1), torch.tensor([[tokens - 1]]))
        embedding.rope_type = "default"
    try:
        yield
    finally:
        for embedding in chosen:
            embedding.rope_type = BY_LENGTH
