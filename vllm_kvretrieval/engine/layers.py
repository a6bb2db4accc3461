"""The numbers of a worker's layers, as used in options and files of measurements."""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.retrieval.layers import full_attention_layers
from vllm_kvretrieval.retrieval.needs import OTHER_LAYERS


def number_layers(
    vllm_config: Any, specs: Mapping[str, Any], config: RetrievalConfig
) -> dict[str, int]:
    """Numbers in the model of a worker's layers with plain full attention, by name; rising.

    vLLM's names of layers contain the numbers. If the names count only attention layers (Zamba2),
    the model's configuration has the numbers.

    Args:
        vllm_config: vLLM's configuration.
        specs: vLLM's KV cache specs of this worker's layers.
        config: Options of the engine.

    Raises:
        RetrievalConfigError: The front end has checked options by other layers.
    """
    plain = [name for name, spec in specs.items() if type(spec) is FullAttentionSpec]
    names = {name: extract_layer_index(name) for name in plain}
    names = dict(sorted(names.items(), key=lambda item: item[1]))
    model, found = vllm_config.model_config, list(names.values())
    said = full_attention_layers(model)
    if said is None or vllm_config.parallel_config.pipeline_parallel_size > 1 or found == said:
        return names
    if model.is_hybrid and found == list(range(len(said))):
        return dict(zip(names, said, strict=True))
    shares = config.prompt_shares
    what = f"layers {found} of {model.model}, and not {said}, as its configuration says,"
    OTHER_LAYERS.check(config.methods.values(), what)
    if shares is not None and shares.by_number:
        raise RetrievalConfigError(
            f"{what} have full attention, and kv_retrieval.prefill_budget_shares goes by the "
            "numbers of layers; leave it out."
        )
    return names
