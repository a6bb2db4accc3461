"""GPTQ checkpoints that vLLM refuses: of 8 bits, with act-order and groups, or without symmetry.

vLLM reads the others, and our kernels multiply them (``kernels``).
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_linear_quant_method
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    unpack_quantized_values_into_int32,
)
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    GroupQuantScaleParameter,
    PackedvLLMParameter,
)
from vllm.scalar_type import scalar_types

from vllm_kvretrieval.quantization.experts import refuse_experts
from vllm_kvretrieval.quantization.kernels import pack_unsigned
from vllm_kvretrieval.quantization.layers import keep, kept
from vllm_kvretrieval.quantization.packing import BLOCK
from vllm_kvretrieval.quantization.product import multiply

TYPES = {4: scalar_types.uint4, 8: scalar_types.uint8}
SECOND = "gptq_v2"
"""The format of checkpoints whose zeros are stored as they are; others have them less one."""


class GPTQConfig(AutoGPTQConfig):
    """Checkpoints of GPTQ with any order of inputs, and any zeros.

    Attributes:
        ordered: Whether inputs are in groups by their activations, and not by their places.
        less: What zeros are stored less.
    """

    TYPE_MAP: ClassVar = {
        (bits, symmetric): kind for bits, kind in TYPES.items() for symmetric in (True, False)
    }
    ordered = False
    less = 1

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "GPTQConfig":
        made = super().from_config({**config, "desc_act": False})
        made.ordered = bool(config["desc_act"]) and made.group_size != -1
        made.less = int(config.get("checkpoint_format") != SECOND)
        return made

    @classmethod
    def get_name(cls) -> str:
        return "kvr_gptq"

    @staticmethod
    def get_checkpoint_weight_mapper() -> WeightsMapper:
        return WeightsMapper()  # which keeps the groups of inputs

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        refuse_experts(
            layer, prefix, "this GPTQ checkpoint (of 8 bits, with act-order, or sym: false)"
        )
        return get_linear_quant_method(self, layer, prefix, GPTQLinear)


def load_groups(param: torch.Tensor, loaded: torch.Tensor, shard: Any = None) -> None:
    """Load the group of each input, which parts of a merged layer (q, k and v) must share."""
    if param.shape != loaded.shape:
        raise ValueError(f"{len(loaded)} inputs have groups (g_idx), the layer has {len(param)}")
    if (param >= 0).all() and not torch.equal(param.data, loaded.to(param.dtype)):
        raise ValueError(
            "this GPTQ checkpoint orders the inputs of q, k and v, or of gate and up, unlike each "
            "other, which is not served; take one without act-order (desc_act: false)"
        )
    param.data.copy_(loaded)


@register_weight_loader_v2_supported_method
class GPTQLinear(LinearMethodBase):
    """A linear layer of such a checkpoint."""

    def __init__(self, config: GPTQConfig) -> None:
        self.config = config

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., None],
        **extra_weight_attrs: Any,
    ) -> None:
        config, inputs, outputs = self.config, input_size_per_partition, sum(output_partition_sizes)
        group = config.group_size if config.group_size != -1 else input_size
        divided = inputs != input_size
        if config.group_size != -1 and (group % BLOCK or inputs % group):
            raise ValueError(
                f"groups of {group} of {inputs} inputs are not served: they must be multiples of "
                f"{BLOCK}, and divide the inputs of a rank"
            )
        if divided and (config.ordered or config.group_size == -1):
            raise ValueError(
                "tensor parallelism divides the inputs of a layer, and this GPTQ checkpoint has "
                "its groups across them (act-order, or one group); serve it with "
                "--tensor-parallel-size 1, or take a checkpoint with desc_act: false and groups"
            )
        factor, groups = config.pack_factor, inputs // group
        of = {"weight_loader": weight_loader}
        packed = {"input_dim": 0, "output_dim": 1, "packed_factor": factor, **of}
        layer.register_parameter(
            "qweight",
            PackedvLLMParameter(
                data=torch.empty(inputs // factor, outputs, dtype=torch.int32),
                packed_dim=0,
                **packed,
            ),
        )
        layer.register_parameter(
            "qzeros",
            PackedvLLMParameter(
                data=torch.empty(groups, outputs // factor, dtype=torch.int32),
                packed_dim=1,
                **packed,
            ),
        )
        layer.register_parameter(
            "scales",
            GroupQuantScaleParameter(
                data=torch.empty(groups, outputs, dtype=params_dtype),
                input_dim=0,
                output_dim=1,
                **of,
            ),
        )
        layer.register_parameter(
            "g_idx",
            BasevLLMParameter(
                data=torch.full((inputs,), -1, dtype=torch.int32), weight_loader=load_groups
            ),
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        config = self.config
        kind = TYPES[config.weight_bits]
        numbers = unpack_quantized_values_into_int32(layer.qweight.data, kind, 0)
        zeros = unpack_quantized_values_into_int32(layer.qzeros.data, kind, 1) + config.less
        order = None
        if config.ordered:
            order, inputs = layer.g_idx.argsort(stable=True), len(layer.g_idx)
            even = torch.arange(inputs) // config.group_size
            if not torch.equal(layer.g_idx[order].long(), even):
                raise ValueError(
                    f"the groups of inputs of this GPTQ checkpoint have not {config.group_size} "
                    "inputs each (g_idx); it is broken, or was made by other means"
                )
            numbers = numbers[order]
        scales, group = layer.scales.data.t(), config.group_size
        keep(
            layer,
            pack_unsigned(numbers.t(), scales, zeros.t(), config.weight_bits, group),
            "qweight",
        )
        for name in ("qzeros", "scales", "g_idx"):
            delattr(layer, name)
        layer.register_buffer("input_order", order, persistent=False)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if layer.input_order is not None:
            x = x.index_select(-1, layer.input_order)
        return multiply(x, kept(layer), bias)
