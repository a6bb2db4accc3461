"""The kernels of an encoded home, interpreted, against their specification."""

import pytest
import torch

from tests.support import encoded_checks

SIZES = [
    ("k8v4", 4, 16, 2, 64, torch.bfloat16),
    ("k8v4", 0, 16, 1, 48, torch.float16),
    ("k4v4", 1, 16, 3, 16, torch.bfloat16),
    ("k2v2", 2, 32, 2, 80, torch.float16),
    ("k2v2_sparse", 0, 16, 2, 80, torch.bfloat16),
    ("k4v4_sparse", 1, 32, 1, 64, torch.float16),
    ("k2v2_sparse", 0, 128, 1, 48, torch.float16),
]


@pytest.mark.parametrize(("codec", "kept", "page", "kv_heads", "head_size", "dtype"), SIZES)
def test_life_of_a_layer(interpreted, codec, kept, page, kv_heads, head_size, dtype):
    """Prompts in chunks, steps that decode, and both together, over prefixes of others."""
    interpreted(
        encoded_checks.life,
        codec=codec,
        kept=kept,
        page=page,
        kv_heads=kv_heads,
        head_size=head_size,
        dtype=dtype,
    )
