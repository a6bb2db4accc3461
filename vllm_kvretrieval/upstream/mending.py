"""Changes to a model that vLLM has loaded on a CPU."""

from torch import nn
from vllm.logger import init_logger

from vllm_kvretrieval.upstream.linear import widen_linear_layers
from vllm_kvretrieval.upstream.rotary import flatten_heads
from vllm_kvretrieval.upstream.states import end_chunks_at_blocks

logger = init_logger("vllm.kvretrieval.model")


def mend_model(model: nn.Module, own: bool) -> None:
    """Mend layers that vLLM computes wrongly, or slowly.

    Args:
        model: The model as vLLM has loaded it.
        own: Whether results may differ from vLLM's by rounding (``attention: own``).
    """
    flatten_heads(model)
    end_chunks_at_blocks(model)
    if own and (count := widen_linear_layers(model)):
        logger.info("%d linear layers multiply in float32.", count)
