"""Elements and sizes.

Of the libraries below vLLM.
"""

import pytest
import torch
from transformers import Gemma4TextConfig

from tests.surprises.rows import surprise


@surprise(
    "include/torch/headeronly/util/Float8_e4m3fn.h",
    package="torch",
    expected="a value too large for float8 becomes NaN on CPUs",
    happens="e4m3fn gives 448, for infinity, too; e5m2 gives infinity",
    remedy="look for 448, not for NaN, to find a scale that is too small",
)
def test_float8_saturates():
    values = torch.tensor([465.0, 1e6, float("inf")])
    assert values.to(torch.float8_e4m3fn).float().tolist() == [448.0] * 3
    assert values[1:].to(torch.float8_e5m2).float().isinf().all()


@surprise(
    "include/ATen/Dispatch_v2.h",
    package="torch",
    expected="a paged cache in float8 can be gathered as in bfloat16",
    happens="`gather`, `index_copy_`, `masked_fill_` and `topk` raise; indexing works",
    remedy="index, or view the cache as `uint8`",
)
def test_float8_does_not_gather():
    cache, pages = torch.randn(64, 32).to(torch.float8_e4m3fn), torch.tensor([1, 2])
    assert cache[pages].dtype == cache.index_select(0, pages).dtype == torch.float8_e4m3fn
    for refused in (
        lambda: cache.gather(0, torch.zeros(1, 32, dtype=torch.long)),
        lambda: cache.clone().index_copy_(0, pages, cache[:2]),
        lambda: cache.clone().masked_fill_(torch.ones(64, 32, dtype=torch.bool), 0),
        lambda: cache.topk(2),
    ):
        with pytest.raises(NotImplementedError):
            refused()


@surprise(
    "integrations/heterogeneity/configuration_utils.py models/gemma4/configuration_gemma4.py",
    package="transformers",
    expected='`getattr(config, "head_dim", None)` is safe',
    happens="Gemma 4's configuration raises a RuntimeError: sizes are per layer, 256 and 512",
    remedy="read `per_layer_config`; `vllm-kvretrieval doctor` does",
)
def test_gemma_4_has_sizes_per_layer():
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(num_hidden_layers=2, layer_types=kinds)
    with pytest.raises(RuntimeError):
        getattr(config, "head_dim", None)
    assert [config.per_layer_config[layer].head_dim for layer in (0, 1)] == [256, 512]
