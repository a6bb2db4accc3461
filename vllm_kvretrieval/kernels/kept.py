"""The tokens that layers keep of requests whose methods drop tokens."""

from dataclasses import dataclass

import torch


@dataclass
class KeptTokens:
    """The tokens that one layer keeps of the request of each seat; ``S`` seats.

    Attributes:
        chosen: int32 [S, kv_heads, most]; positions of kept tokens in the context, rising.
        ratings: float32 [S, kv_heads, most]; ratings of these tokens.
        counts: int32 [S, kv_heads], contiguous in its last dimension; how many tokens are kept.
        budgets: int32 [S, kv_heads]; how many tokens a head may attend to, including a new one.
    """

    chosen: torch.Tensor
    ratings: torch.Tensor
    counts: torch.Tensor
    budgets: torch.Tensor
