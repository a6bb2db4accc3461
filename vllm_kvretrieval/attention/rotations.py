"""Rotary embeddings that vLLM would take wrongly, or beyond their end, without a word.

A context is lengthened by a scaling of its rotations: a field ``rope_parameters`` of the model's
config.json, or of ``--hf-overrides``. vLLM replaces the whole field by an override, the base of the
rotations included, and serves lengths for which it has made no rotations.
"""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvretrieval.errors import RetrievalConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.kvretrieval.rotations")

OWN = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Parameters that belong to a model's weights, whatever scales its rotations."""

Parameters = dict[str, Any]


def keep_rotations(model: "ModelConfig") -> None:
    """Give overridden rotations what belongs to the model's weights, if the override leaves it out.

    Raises:
        RetrievalConfigError: The override has no effect, or leaves layers without rotations.
    """
    if not model.hf_overrides:
        return
    config = model.hf_text_config
    given: Any = getattr(config, "rope_parameters", None)
    checkpoint: Any = getattr(_without_overrides(model), "rope_parameters", None)
    if not isinstance(given, dict) or not isinstance(checkpoint, dict):
        return
    _check_base(model, given)
    kinds = {kind: part for kind, part in checkpoint.items() if isinstance(part, dict)}
    missing = [kind for kind in kinds if not isinstance(given.get(kind), dict)]
    if missing:
        whole = {kind: part | _parameters(given.get(kind)) for kind, part in kinds.items()}
        raise RetrievalConfigError(
            f"--hf-overrides leaves the layers of {model.model} of kind {', '.join(missing)} "
            "without rotations: give rope_parameters for each kind, such as "
            f"{json.dumps({'rope_parameters': whole})}."
        )
    # A new dictionary: vLLM has taken over that of the caller.
    if kinds:
        config.rope_parameters = given | {kind: _own(kinds[kind]) | given[kind] for kind in kinds}
    else:
        config.rope_parameters = _own(checkpoint) | given
    before, now = _parts(given), _parts(config.rope_parameters)
    kept = {
        name: new[name]
        for old, new in zip(before, now, strict=True)
        for name in new
        if name not in old
    }
    if kept:
        logger.info(
            "Rotations keep %s of %s, which --hf-overrides leaves out.",
            ", ".join(f"{name}={value}" for name, value in kept.items()),
            model.model,
        )


def _own(part: Parameters) -> Parameters:
    """The parameters that belong to the weights."""
    return {name: part[name] for name in OWN if name in part}


def _parameters(part: Any) -> Parameters:
    return part if isinstance(part, dict) else {}


def _without_overrides(model: "ModelConfig") -> Any:
    """The model's configuration as its config.json has it."""
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    return get_hf_text_config(
        get_config(
            model.hf_config_path or model.model,
            model.trust_remote_code,
            model.revision,
            model.code_revision,
            model.config_format,
        )
    )


def _check_base(model: "ModelConfig", given: Parameters) -> None:
    """Refuse a base beside the parameters, which vLLM does not look at."""
    overrides = model.hf_overrides
    if not isinstance(overrides, Mapping):
        return
    wanted = overrides.get("rope_theta")
    if wanted is not None and all(part.get("rope_theta") != wanted for part in _parts(given)):
        right = {"rope_parameters": given | {"rope_theta": wanted}}
        raise RetrievalConfigError(
            f"--hf-overrides with rope_theta={wanted} has no effect here; give it inside of "
            f"rope_parameters: {json.dumps(right)}."
        )


def _parts(given: Parameters) -> Iterator[Parameters]:
    """The parameters of each kind of layers; of all, where there is one kind."""
    nested = [part for part in given.values() if isinstance(part, dict)]
    yield from nested or [given]


def check_rotations(vllm_config: "VllmConfig") -> None:
    """Refuse a length for which vLLM makes no rotations; say which ones a longrope model gets.

    Raises:
        RetrievalConfigError: Says for how many tokens there are rotations, and how to have more.
    """
    model = vllm_config.model_config
    given, length = getattr(model.hf_text_config, "rope_parameters", None), model.max_model_len
    most = getattr(model.hf_text_config, "max_position_embeddings", None)
    if not isinstance(given, dict) or most is None:
        return
    for part in _parts(given):
        kind = part.get("rope_type", "default")
        original = part.get("original_max_position_embeddings")
        if kind == "longrope":
            if original and length > original:
                logger.info(
                    "%s rotates prompts of all lengths by its long factors, as --max-model-len %d "
                    "is beyond %d; up to this length answers are better with --max-model-len %d.",
                    *(model.model, length, original, original),
                )
            continue
        plain = kind == "default" and length <= most
        made = None if plain else _rotations(vllm_config, part, most)
        if made is not None and made < length:
            raise RetrievalConfigError(
                f"vLLM makes rotations for {made} tokens of {model.model} (rope_type {kind}), and "
                f"--max-model-len is {length}: what comes later would be rotated by memory behind "
                f"them. Set --max-model-len {made}, or scale by YaRN: {_longer(part, most, length)}"
            )


def _rotations(vllm_config: "VllmConfig", part: Parameters, most: int) -> int | None:
    """For how many tokens vLLM makes rotations; None where this cannot be told.

    It is asked on a device without memory, by a layer that is thrown away.

    Args:
        vllm_config: The engine's.
        part: A part of ``rope_parameters``.
        most: The model's ``max_position_embeddings``.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    made = dict(rotary_embedding._ROPE_DICT)
    size = vllm_config.model_config.get_head_size()
    try:
        with set_current_vllm_config(vllm_config), torch.device("meta"):
            layer = rotary_embedding.get_rope(size, most, rope_parameters=dict(part))
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        # What is wrong vLLM says when it makes the model; and some kinds look at numbers.
        return None
    finally:
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(made)
    table = getattr(layer, "cos_sin_cache", None)
    return None if table is None else len(table)


def _longer(part: Parameters, most: int, length: int) -> str:
    """The option that lengthens a context by YaRN, to a power of two of the model's length."""
    trained = part.get("original_max_position_embeddings") or most
    factor = 2.0
    while trained * factor < length:
        factor *= 2
    scaled = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
    whole = {
        "rope_parameters": scaled | _own(part),
        "max_position_embeddings": int(trained * factor),
    }
    return f"--hf-overrides '{json.dumps(whole)}'"
