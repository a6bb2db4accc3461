"""Small checkpoints with quantised weights, as the tools of each format write them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 320}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of eight outputs, as AWQ has them in a word."""


class Quantised(NamedTuple):
    """A weight: ``scale * (number - zero)``, by groups of inputs.

    Attributes:
        numbers: [outputs, inputs], from 0 on.
        scales: [outputs, groups].
        zeros: [outputs, groups].
        groups: [inputs]; the group of each.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    def values(self) -> torch.Tensor:
        """[outputs, inputs]"""
        of_group = self.numbers - self.zeros[:, self.groups]
        return of_group * self.scales[:, self.groups].float()


def quantise(weight, bits, size, symmetric, order=None):
    """A weight whose inputs are in groups of ``size``, by their places in ``order``."""
    outputs, inputs = weight.shape
    groups = torch.arange(inputs) // size
    if order is not None:
        groups = groups[order.argsort()]
    low = torch.stack([weight[:, groups == g].amin(1) for g in range(inputs // size)], 1)
    high = torch.stack([weight[:, groups == g].amax(1) for g in range(inputs // size)], 1)
    most, middle = (1 << bits) - 1, 1 << (bits - 1)
    if symmetric:
        scales = (torch.maximum(low.abs(), high.abs()) / (middle - 1)).bfloat16()
        zeros = torch.full((outputs, inputs // size), middle)
    else:
        scales = ((high - low) / most).bfloat16()
        zeros = (-low / scales.float()).round().clamp(1, most).long()
    wide = scales.float()[:, groups]
    numbers = (weight / wide).round().long() + zeros[:, groups]
    return Quantised(numbers.clamp(0, most), scales, zeros, groups)


def words(numbers, bits, dim, order=None):
    """Numbers in words of 32 bits, side by side along a dimension."""
    factor = 32 // bits
    parts = numbers.unflatten(dim, (-1, factor)).movedim(dim + 1, -1)
    if order is not None:
        parts = parts[..., list(order)]
    shifts = torch.arange(factor) * bits
    total = (parts.long() << shifts).sum(-1)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).int().contiguous()


def compressed_tensors(weight, bits, symmetric, size, tokens=False):
    """Tensors of a layer, and its values."""
    inputs = weight.shape[1]
    found = quantise(weight, bits, size or inputs, symmetric)
    if tokens:
        numbers = (found.numbers - 128).to(torch.int8)
        return {"weight": numbers, "weight_scale": found.scales.float()}, found.values()
    tensors = {
        "weight_packed": words(found.numbers, bits, 1),
        "weight_scale": found.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(found.zeros, bits, 0)
    return tensors, found.values()


def awq(weight, size):
    """Tensors of a layer, and its values."""
    found = quantise(weight, 4, size, False)
    tensors = {
        "qweight": words(found.numbers.t(), 4, 1, AWQ_ORDER),
        "qzeros": words(found.zeros.t(), 4, 1, AWQ_ORDER),
        "scales": found.scales.t().contiguous(),
    }
    return tensors, found.values()


def gptq(weight, bits, size, symmetric, ordered):
    """Tensors of a layer, and its values; layers with the same inputs have the same order."""
    inputs = weight.shape[1]
    torch.manual_seed(inputs)
    order = torch.randperm(inputs) if ordered else None
    found = quantise(weight, bits, size, symmetric, order)
    tensors = {
        "qweight": words(found.numbers.t(), bits, 0),
        "qzeros": words(found.zeros.t() - 1, bits, 1),
        "scales": found.scales.t().contiguous(),
        "g_idx": found.groups.int(),
    }
    return tensors, found.values()


class Format(NamedTuple):
    """How a tool writes a layer's weight.

    Attributes:
        write: Gives the tensors of a layer, and its values, for its weight.
        settings: The entry of config.json.
    """

    write: Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]
    settings: dict[str, Any]


def by_compressed_tensors(bits, symmetric, size, tokens=False):
    """W4A16, W8A16, and W8A8."""
    strategy = {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    given: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token"}
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": given | {"dynamic": True} if tokens else None,
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if tokens else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }
    write = partial(compressed_tensors, bits=bits, symmetric=symmetric, size=size, tokens=tokens)
    return Format(write, settings)


def by_gptq(bits, size, symmetric, ordered):
    """Zeros are stored less one."""
    settings = {
        "quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric,
        "desc_act": ordered, "checkpoint_format": "gptq",
    }  # fmt: skip
    write = partial(gptq, bits=bits, size=size, symmetric=symmetric, ordered=ordered)
    return Format(write, settings)


def by_awq(size):
    """4 bits with zeros."""
    settings = {
        "quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": None,
    }  # fmt: skip
    return Format(partial(awq, size=size), settings)


FORMATS = {
    "W4A16": by_compressed_tensors(4, True, 32),
    "W4A16 asymmetric": by_compressed_tensors(4, False, 64),
    "W8A16": by_compressed_tensors(8, True, None),
    "W8A16 asymmetric": by_compressed_tensors(8, False, 128),
    "W8A8": by_compressed_tensors(8, True, None, tokens=True),
    "AWQ": by_awq(64),
    "GPTQ 4": by_gptq(4, 32, True, False),
    "GPTQ 8": by_gptq(8, 64, True, False),
    "GPTQ act-order": by_gptq(4, 32, True, True),
    "GPTQ asymmetric": by_gptq(4, 64, False, False),
    "GPTQ 8 asymmetric act-order": by_gptq(8, 32, False, True),
}


def random_quantised(path: Path, name: str) -> dict[str, torch.Tensor]:
    """A Llama in a format, saved at ``path``; returns the values of its layers' weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=32, initializer_range=0.1,
        max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    saved, values = {}, {}
    for key, weight in LlamaForCausalLM(config).state_dict().items():
        layer = key.removesuffix(".weight")
        if not layer.endswith("_proj"):
            saved[key] = weight.bfloat16()
            continue
        tensors, values[layer] = FORMATS[name].write(weight.float())
        saved |= {f"{layer}.{part}": tensor for part, tensor in tensors.items()}
    path.mkdir(exist_ok=True)
    config.save_pretrained(path)
    stored = json.loads((path / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": FORMATS[name].settings,
    }
    (path / "config.json").write_text(json.dumps(stored))
    save_file(saved, path / "model.safetensors")
    return values
