"""Rotary embeddings that vLLM would take wrongly, or beyond their end, without a word.

A context is lengthened by a scaling of its rotations: a field ``rope_parameters`` of the model's
config.json, or of ``--hf-overrides``. vLLM replaces the whole field by an override, the base of the
rotations included, and serves lengths for which it has made no rotations.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.layers import PARTLY

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger("vllm.kvretrieval.rotations")

OWN = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Parameters that belong to a model's weights, whatever scales its rotations."""

ORIGINAL = "original_max_position_embeddings"
"""The parameter that names the length that a scaling begins with."""

MSCALES = {"short_mscale", "long_mscale"}
"""Parameters by which vLLM scales the rotations of longrope, one for each list of factors."""

FIELDS = ("rope_parameters", "rope_scaling")
"""Names of the field in ``--hf-overrides``, which vLLM takes for one."""

SCALABLE = ("default", "yarn", "dynamic")
"""Kinds of rotations in whose place YaRN can be; others belong to the weights."""

TRAINED = {"qwen3": {40960: 32768}, "qwen3_moe": {40960: 32768}}
"""Lengths that models were trained for, by their kind and ``max_position_embeddings``, where the
two differ: Qwen3's field has room for a prompt and an answer."""

Parameters = dict[str, Any]


def check_override(overrides: Any) -> None:
    """Refuse parameters without their kind, by which vLLM ends in a KeyError.

    Model cards write ``"type": "yarn"``, and ``--hf-overrides.rope_parameters.factor 4`` replaces
    all other parameters.

    Args:
        overrides: The value of ``--hf-overrides``.

    Raises:
        RetrievalConfigError: Says how to write it.
    """
    given = overrides if isinstance(overrides, dict) else {}
    for name in FIELDS:
        field = given.get(name)
        for part in parts(field) if isinstance(field, dict) else ():
            if "rope_type" not in part:
                kind = part.get("type", "yarn")
                right = {"rope_type": kind} | {k: v for k, v in part.items() if k != "type"}
                raise RetrievalConfigError(
                    f"--hf-overrides: {name} needs a rope_type, since it replaces all that the "
                    f"model has there: write {json.dumps(right)}, or another kind."
                )


def keep_rotations(model: "ModelConfig") -> None:
    """Give rotations the values that belong to the model's weights, and that vLLM leaves out.

    Raises:
        RetrievalConfigError: An override has no effect, or leaves layers without rotations.
    """
    if model.hf_overrides:
        _keep_overridden(model)
    scale_longrope(model)


def scale_longrope(model: "ModelConfig") -> None:
    """Scale a longrope model's rotations by its own factor.

    vLLM makes one of two lengths, and does not look at what config.json says.
    """
    config = model.hf_text_config
    part = _parameters(getattr(config, "rope_parameters", None))
    if part.get("rope_type") != "longrope" or MSCALES & part.keys():
        return
    scale, factor, original = (part.get(n) for n in ("attention_factor", "factor", ORIGINAL))
    if scale is None and factor and original:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if scale is not None:
        config.rope_parameters = part | dict.fromkeys(sorted(MSCALES), scale)


def _keep_overridden(model: "ModelConfig") -> None:
    """Give overridden rotations the weights' values that the override leaves out."""
    config = model.hf_text_config
    given: Any = getattr(config, "rope_parameters", None)
    without = _without_overrides(model)
    checkpoint: Any = getattr(without, "rope_parameters", None)
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
        whole = {kind: _completed(given[kind], kinds[kind], without) for kind in kinds}
        config.rope_parameters = given | whole
    else:
        config.rope_parameters = _completed(given, checkpoint, without)
    before, now = parts(given), parts(config.rope_parameters)
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


def _completed(given: Parameters, part: Parameters, checkpoint: Any) -> Parameters:
    """An override's parameters, with those of the checkpoint that it leaves out.

    Args:
        given: The override's, for a kind of layers.
        part: The checkpoint's, for the same kind.
        checkpoint: The checkpoint's configuration.
    """
    kept = _own(part)
    if given.get("rope_type") == "yarn":  # vLLM would look for it when it makes the layers
        kept[ORIGINAL] = part.get(ORIGINAL) or trained_length(checkpoint)
    return kept | given


def trained_length(config: Any) -> int:
    """Tokens that a model was trained for, by its configuration in transformers."""
    most: int = config.max_position_embeddings
    return TRAINED.get(config.model_type, {}).get(most, most)


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
    if wanted is not None and all(part.get("rope_theta") != wanted for part in parts(given)):
        right = {"rope_parameters": given | {"rope_theta": wanted}}
        raise RetrievalConfigError(
            f"--hf-overrides with rope_theta={wanted} has no effect here; give it inside of "
            f"rope_parameters: {json.dumps(right)}."
        )


def parts(given: Parameters) -> Iterator[Parameters]:
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
    for part in parts(given):
        kind = part.get("rope_type", "default")
        original = part.get(ORIGINAL)
        if kind == "longrope":
            if original and length <= original:
                logger.info(
                    "%s rotates by its short factors, which serve --max-model-len up to %d.",
                    *(model.model, original),
                )
            elif original:
                logger.info(
                    "%s rotates prompts of all lengths by its long factors, as --max-model-len %d "
                    "is beyond %d; up to this length answers are better with --max-model-len %d.",
                    *(model.model, length, original, original),
                )
            continue
        plain = kind == "default" and length <= most
        made = None if plain else rotations(vllm_config, part, most)
        if made is not None and made < length:
            option = lengthened(model.hf_text_config, length)
            yarn = f", or scale by YaRN: --hf-overrides '{json.dumps(option)}'" if option else "."
            raise RetrievalConfigError(
                f"vLLM makes rotations for {made} tokens of {model.model} (rope_type {kind}), and "
                f"--max-model-len is {length}: what comes later would be rotated by memory behind "
                f"them. Set --max-model-len {made}{yarn}"
            )


def rotations(vllm_config: "VllmConfig", part: Parameters, most: int) -> int | None:
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


def lengthened(config: Any, length: int) -> dict[str, Any] | None:
    """The ``--hf-overrides`` by which YaRN lengthens a context, to a power of two of the model's.

    Layers with windows keep their rotations, where no two tokens are farther apart than before.

    Args:
        config: The text model's, as transformers reads its config.json.
        length: Tokens to serve.

    Returns:
        None: the model's rotations are scaled in a way that belongs to its weights, or it has none.
    """
    given: Any = getattr(config, "rope_parameters", None)
    most: int | None = getattr(config, "max_position_embeddings", None)
    if not isinstance(given, dict) or most is None:
        return None
    if not any(isinstance(part, dict) for part in given.values()):
        given = {"": given}
    scaled = [kind for kind in given if kind not in PARTLY]
    if any(given[kind].get("rope_type", "default") not in SCALABLE for kind in scaled):
        return None
    longest, whole = 0, dict[str, Parameters](given)
    for kind in scaled:
        part = given[kind]
        trained, factor = part.get(ORIGINAL) or trained_length(config), 2.0
        while trained * factor < length:
            factor *= 2
        yarn = {"rope_type": "yarn", "factor": factor, ORIGINAL: trained}
        whole[kind], longest = yarn | _own(part), int(trained * factor)
    return {"rope_parameters": whole.get("", whole), "max_position_embeddings": longest}
