"""LoRA adapters for tests."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest


def random_lora(model: str, path: Path, number: int) -> LoRARequest:
    """A LoRA adapter for the attention of a model of :func:`random_llama`, saved at ``path``."""
    rank, projections = 8, ("q_proj", "k_proj", "v_proj", "o_proj")
    generator = torch.Generator().manual_seed(number)
    weights = {}
    for name, weight in load_file(Path(model) / "model.safetensors").items():
        if any(projection in name for projection in projections):
            outputs, inputs = weight.shape
            for part, shape in ("lora_A", (rank, inputs)), ("lora_B", (outputs, rank)):
                adapted = f"base_model.model.{name.removesuffix('weight')}{part}.weight"
                weights[adapted] = 0.1 * torch.randn(shape, generator=generator)
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": projections}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(path.name, number, str(path))
