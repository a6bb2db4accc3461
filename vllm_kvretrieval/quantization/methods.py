"""Quantisation methods of ours, as vLLM registers them.

``kvr_int8`` and ``kvr_int4`` round 16-bit weights as they are loaded; weights of the vocabulary
(the output layer, and embeddings that it shares) have 8 bits in both. Nothing is imported here that
only a worker needs.
"""

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from vllm_kvretrieval.quantization.experts import EXPERTS, NO_EXPERTS, refuse_experts


class RoundedConfig(QuantizationConfig):
    """Rounds the weights of linear layers, and of the output layer.

    Attributes:
        name: The method's, as ``--quantization`` has it.
        bits: Of weights of linear layers.
        tied: Whether the output layer shares the weights of embeddings.
    """

    name: ClassVar[str]
    bits: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.tied = False

    def get_name(self) -> str:
        return self.name

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # of GPUs, which it does not serve

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        return cls()

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        text = None if hf_config is None else hf_config.get_text_config()
        self.tied = bool(getattr(text, "tie_word_embeddings", False))
        if any(getattr(text, name, None) for name in EXPERTS):
            raise ValueError(f"--quantization {self.name} {NO_EXPERTS}")

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        from vllm_kvretrieval.quantization.layers import RoundedLinear, RoundedVocabulary

        refuse_experts(layer, prefix, f"--quantization {self.name}")
        if isinstance(layer, LinearBase):
            return RoundedLinear(self.bits)
        if isinstance(layer, ParallelLMHead) or (
            isinstance(layer, VocabParallelEmbedding) and self.tied
        ):
            return RoundedVocabulary()
        return None


class Int8Config(RoundedConfig):
    """Weights in 8 bits, with a scale for each output."""

    name = "kvr_int8"
    bits = 8


class Int4Config(RoundedConfig):
    """Weights in 4 bits, with a scale and an offset for 32 inputs of each output."""

    name = "kvr_int4"
    bits = 4


class GPTQCheckpoints(QuantizationConfig):
    """Chooses our reader of GPTQ (``gptq``) for checkpoints that vLLM's refuses."""

    name = "kvr_gptq"
    names = (None, "gptq", "gptq_marlin", "auto_gptq", name)
    """What the user may have named."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        method = str(hf_quant_cfg.get("quant_method")).lower()
        if method != "gptq" or user_quant not in cls.names:
            return None
        ordered = hf_quant_cfg.get("desc_act") and hf_quant_cfg.get("group_size") != -1
        bits = hf_quant_cfg.get("bits")
        refused = ordered or hf_quant_cfg.get("sym") is False or bits == 8
        return cls.name if refused and bits in (4, 8) else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        from vllm_kvretrieval.quantization.gptq import GPTQConfig

        return GPTQConfig.from_config(config)


METHODS = (Int8Config, Int4Config, GPTQCheckpoints)
