"""What layers keep of requests whose methods drop tokens."""

from dataclasses import dataclass

import torch


@dataclass
class KeptTokens:
    """What one layer keeps of each request, by seat.

    Attributes:
        chosen: int32 [S, kv_heads, most]; positions of kept tokens in the context, rising.
        ratings: float32, the same shape; theirs.
        counts: int32 [S, kv_heads], contiguous in its last dimension; how many these are.
        budgets: int32, the same shape; how many tokens a head may attend to, a new one included.
    """

    chosen: torch.Tensor
    ratings: torch.Tensor
    counts: torch.Tensor
    budgets: torch.Tensor
