"""How to serve a longer context of a model: its own length, the options for more, what is known."""

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_kvretrieval.command_line import serve_arguments
from vllm_kvretrieval.doctor.findings import Finding, advice, error
from vllm_kvretrieval.doctor.logs import quiet
from vllm_kvretrieval.doctor.options import refusal
from vllm_kvretrieval.retrieval.model_files import check_model
from vllm_kvretrieval.upstream.rotations import OWN, lengthened, parts

BACKEND = ("--attention-backend", "kvretrieval")
TESTED_BY_MAKERS = {
    "qwen2": (4.0, "Qwen2.5"),
    "qwen2_moe": (4.0, "Qwen2.5"),
    "qwen3": (4.0, "Qwen3"),
    "qwen3_moe": (4.0, "Qwen3"),
}
"""By the kind of a model: up to which factor of YaRN its model card says it was tested."""
COMPARE = "compare answers on your own text with full attention, and with shorter ones"


def read_model(arguments: Sequence[str]) -> Any:
    """vLLM's configuration of a model.

    Args:
        arguments: The arguments of ``vllm serve`` that name it.

    Raises:
        ValueError: vLLM cannot read the model.
        OSError: It is not there.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = serve_arguments(arguments)
    check_model(given.model)
    given.skip_tokenizer_init = True
    with quiet():
        return AsyncEngineArgs.from_cli_args(given).create_model_config()


def read_length(model: str, length: str) -> tuple[Any, int]:
    """vLLM's configuration of a model, and a length as vLLM reads it, such as ``128K``.

    Raises:
        ValueError: vLLM cannot read the model.
        SystemExit: The length is none.
    """
    wanted = serve_arguments([model, "--max-model-len", length]).max_model_len
    return read_model([model]), wanted


def check_length(model: str, length: str) -> tuple[list[Finding], list[str] | None]:
    """Findings about a length of contexts, and the arguments of ``vllm serve`` that serve it.

    The arguments are None where no known ones do.

    Args:
        model: Path or name on a hub.
        length: As ``--max-model-len`` takes it.
    """
    try:
        config, wanted = read_length(model, length)
    except (ValueError, OSError) as e:
        return [error("length", refusal(e), "name a model, and a number of tokens")], None
    if wanted < 1:
        return [error("length", f"{wanted} is no number of tokens", "name one")], None
    own = own_length(config)
    findings = [Finding("length", f"{model} takes {own} tokens by its {_described(config)}")]
    arguments = [model, *BACKEND, "--max-model-len", str(wanted)]
    if wanted > own:
        overrides = lengthened(config.hf_text_config, wanted)
        if overrides is None:
            remedy = f"serve up to {own} tokens, or a model that was made for more"
            return [*findings, error("recipe", _belongs(config), remedy)], None
        arguments += ["--hf-overrides", json.dumps(overrides)]
    findings.append(Finding("recipe", f"vllm serve {shlex.join(arguments)}"))
    findings += _accuracy(config, own, wanted)
    return findings, arguments


def own_length(config: Any) -> int:
    """Tokens of the longest context for which a model's weights, by its config.json, were made.

    Args:
        config: vLLM's of the model, for which no length was named.
    """
    text, served = config.hf_text_config, int(config.max_model_len)
    most, kinds = getattr(text, "max_position_embeddings", None), _kinds(config)
    if most is None:
        return served
    if "longrope" in kinds:  # the default of vLLM may be the original length
        return int(most)
    # What vLLM derives goes beyond the rotations that it makes: dynamic scaling, model_max_length.
    return served if {"linear"} & {*kinds} else min(served, int(most))


def _kinds(config: Any) -> list[str]:
    given = getattr(config.hf_text_config, "rope_parameters", None)
    if not isinstance(given, dict):
        return []
    return [part.get("rope_type", "default") for part in parts(given)]


def _described(config: Any) -> str:
    """What says how long a context is."""
    text = config.hf_text_config
    given = getattr(text, "rope_parameters", None)
    said = (
        f"config.json (max_position_embeddings {getattr(text, 'max_position_embeddings', 'none')}"
    )
    if not isinstance(given, dict):
        return f"{said}, no rope_parameters)"
    names = ("factor", "original_max_position_embeddings", *OWN)
    for part in parts(given):
        said += f"; rotations: {part.get('rope_type', 'default')}"
        said += "".join(f", {name} {part[name]}" for name in names if name in part)
    return f"{said})"


def _belongs(config: Any) -> str:
    """Why a model cannot be lengthened by an override."""
    kinds = _kinds(config)
    if not kinds:
        return "it has no rotary embedding that could be scaled"
    scaled = f"its rotations ({', '.join(kinds)}) are scaled by its makers"
    return f"{scaled}, and no further scaling is known"


def _accuracy(config: Any, own: int, wanted: int) -> Iterator[Finding]:
    """What is known of answers at such a length."""
    text, kinds = config.hf_text_config, _kinds(config)
    given = getattr(text, "rope_parameters", None)
    if wanted > own:
        overrides = lengthened(text, wanted) or {}
        factor = max(part.get("factor", 1.0) for part in parts(overrides["rope_parameters"]))
        most, name = TESTED_BY_MAKERS.get(config.hf_text_config.model_type, (0.0, ""))
        scaled = "contexts of all lengths are scaled, short ones, too"
        if factor <= most:
            known = (
                f"{name} was tested with YaRN of factor {factor:g} by its makers (its model card)"
            )
            yield advice("accuracy", f"{known}; {scaled}", f"leave it out where {own} are enough")
        else:
            known = f"no test of this model with YaRN of factor {factor:g} is known"
            yield advice("accuracy", f"{known}; {scaled}", COMPARE)
        return
    if "longrope" in kinds and isinstance(given, dict):
        (part,) = parts(given)
        original = part.get("original_max_position_embeddings") or own
        which = "long" if wanted > original else "short"
        known = f"prompts of all lengths are rotated by its {which} factors"
        remedy = f"serve prompts of up to {original} tokens with --max-model-len {original}"
        long = which == "long"
        yield advice("accuracy", known, remedy) if long else Finding("accuracy", known)
        return
    known = "a length that its config.json names; what retrieval changes: docs/benchmarks.md"
    yield Finding("accuracy", known)
