"""``vllm-kvretrieval certify``: measure whether a model loses anything by retrieval."""

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.command_inputs import read_text, versions, write
from vllm_kvretrieval.options.table import CONFIG_KEY
from vllm_kvretrieval.retrieval.certificates import (
    DIVERGENCE,
    DRAFTS,
    FORMAT,
    PERPLEXITY,
    STEP,
    path_for,
    read_certificate,
)
from vllm_kvretrieval.retrieval.model_files import check_model, name_of, shape_of

if TYPE_CHECKING:
    from vllm import LLM, EngineArgs

LONGEST = 8192
"""Tokens of the longest context, where --max-model-len is not named."""
CONTEXTS = 5
"""Contexts for which the KV cache has room; with less, prompts are read twice."""


def add_certify(commands: Any) -> None:
    """Add the subcommand to a parser's."""
    parser = commands.add_parser(
        "certify",
        help="measure whether a model loses anything by retrieval on this machine",
        description="Asks one engine for pass keys and the tokens of a text, by retrieval and with "
        "full attention, and times decode steps of both. A model passes if it finds all pass keys "
        f"that full attention finds, perplexity grows by {100 * (PERPLEXITY - 1):g} % at most, KL "
        f"is {DIVERGENCE:g} nats or less, and no step takes more than {STEP:g} of full attention's "
        "time. Writes a certificate, by which --attention-backend certified serves the model. "
        "Options of the engine follow --, and must be those of the server: --max-model-len is the "
        "longest context, --kv-retrieval.budget and --attention-backend are what is certified.",
    )
    parser.add_argument("model", metavar="MODEL", help="path, or name on a hub")
    parser.add_argument(
        "--text",
        type=Path,
        help="a plain text file (UTF-8) of more tokens than the longest context (default: the "
        "documentation of Python)",
    )
    parser.set_defaults(run=certify, engine=[])


def certify(given: argparse.Namespace) -> int:
    """Measure, write, and show; returns 0 if the model passes.

    Raises:
        OSError: The text cannot be read, or the certificate could not be written.
        RetrievalConfigError: Options of the engine are wrong.
        ValueError: The text is too short, or contexts are.
    """
    from vllm import envs

    text = own_text() if given.text is None else read_text(given.text)
    check_model(given.model)
    path = path_for(Path(envs.VLLM_CACHE_ROOT), given.model)
    with _written_at_once(path) as new:
        llm = _engine(given.model, given.engine)
        try:
            result = _measure(llm, text, "" if given.text is None else given.text.name)
        finally:
            llm.llm_engine.engine_core.shutdown()
        write(new, result, ())
    certificate = read_certificate(path)
    failed = certificate.failures()
    print(f"{certificate.model}: {certificate.summary()}.")
    for why in failed:
        print(f"  {why}")
    print(
        "It does not pass: --attention-backend certified serves it with full attention."
        if failed
        else f"It passes: --attention-backend certified serves it by {certificate.method}, with "
        f"--max-model-len of up to {certificate.longest}."
    )
    print(f"certificate: {path}")
    return int(bool(failed))


@contextmanager
def _written_at_once(path: Path) -> Iterator[Path]:
    """A file that takes the place of ``path`` in the end; of starts and other runs meanwhile each
    finds a whole one.

    Raises:
        OSError: There can be no such file, as is found out before anything takes time.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = tempfile.TemporaryDirectory(dir=path.parent, prefix=".")
        (new := Path(beside.name) / path.name).touch()
    except OSError as error:
        raise OSError(
            f"the certificate could not be written ({error}); name another directory of caches by "
            "VLLM_CACHE_ROOT"
        ) from None
    with beside:
        yield new
        new.replace(path)


def own_text() -> str:
    """The text that every Python has: its documentation.

    Raises:
        ValueError: This one has none.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python comes without its documentation; name a --text") from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def _engine(model: str, options: Sequence[str]) -> "LLM":
    """The engine, as ``vllm serve`` would make it; by our own method if none is named."""
    from vllm import EngineArgs
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_kvretrieval.calibration.divergence import TOP_LOGPROBS
    from vllm_kvretrieval.calibration.forcing import ForceTokens
    from vllm_kvretrieval.command_line import serve_arguments
    from vllm_kvretrieval.options.table import DEFAULT_METHOD
    from vllm_kvretrieval.retrieval.presets import CERTIFIED, preset_names
    from vllm_kvretrieval.upstream.starting import start_engine

    parsed = EngineArgs.from_cli_args(serve_arguments([model, *options]))
    _check_covered(parsed)
    named = parsed.attention_backend
    backend = named if isinstance(named, str | None) else named.name
    if backend is None or backend.lower() == "auto":
        parsed.attention_backend = AttentionBackendEnum[DEFAULT_METHOD.upper()]
    elif backend.lower() not in preset_names():
        why = f"--attention-backend {backend.lower()}: name a method"
        known = ", behind which certificates are" if backend.lower() == CERTIFIED else ""
        raise ValueError(f"{why}{known}, or leave it out")
    parsed.max_logprobs, parsed.logits_processors = TOP_LOGPROBS, [ForceTokens]
    parsed.enable_prefix_caching, parsed.disable_log_stats = True, True
    _fit(parsed)
    return start_engine(parsed)


def _check_covered(parsed: "EngineArgs") -> None:
    """Refuse what no certificate covers.

    Raises:
        ValueError: Names it.
    """
    from vllm.platforms import current_platform

    given = (parsed.additional_config or {}).get(CONFIG_KEY)
    options = given if isinstance(given, Mapping) else {}
    uncovered = {
        "GPUs": not current_platform.is_cpu(),
        "LoRA adapters: leave --enable-lora out": parsed.enable_lora,
        "drafts: leave --speculative-config out": parsed.speculative_config is not None,
    }
    uncovered |= {f"drafts: leave --kv-retrieval.{name} out": options.get(name) for name in DRAFTS}
    for what, present in uncovered.items():
        if present:
            raise ValueError(f"no certificate covers {what}")


def _fit(parsed: "EngineArgs") -> None:
    """Choose the longest context, and the memory of the KV cache, where the user does not."""
    model = parsed.create_model_config()
    if parsed.max_model_len is None:
        parsed.max_model_len = min(LONGEST, model.max_model_len)
    if parsed.kv_cache_memory_bytes is None:
        heads = model.get_total_num_kv_heads() * model.get_total_num_hidden_layers()
        token = 2 * heads * model.get_head_size() * model.dtype.itemsize
        parsed.kv_cache_memory_bytes = CONTEXTS * parsed.max_model_len * token


def _measure(llm: "LLM", text: str, source: str) -> dict[str, Any]:
    """The contents of the file."""
    from vllm_kvretrieval.calibration.certifying import lengths_of, quality, steps
    from vllm_kvretrieval.calibration.samples import TokenText
    from vllm_kvretrieval.options.engine import RetrievalConfig
    from vllm_kvretrieval.options.source import options_of
    from vllm_kvretrieval.platforms.measured import facts_of

    vllm_config = llm.llm_engine.vllm_config
    model, config = vllm_config.model_config, RetrievalConfig.from_vllm(vllm_config)
    assert config is not None
    longest = model.max_model_len
    lengths = lengths_of(longest, config.budget)
    tokenizer: Any = llm.get_tokenizer()
    words = TokenText(tokenizer, text.split("\n\n"))
    sparse = config.prefill_budget is not None
    answers = [asdict(quality(llm, words, tokens, anew=sparse)) for tokens in lengths]
    return {
        "format": FORMAT,
        "model": name_of(model.model),
        "shape": shape_of(model.hf_text_config),
        "method": config.method,
        "options": {**options_of(vllm_config), "budget": config.budget},
        "longest": longest,
        "facts": facts_of(vllm_config, config),
        "quality": answers,
        "steps": [asdict(each) for each in steps(llm, words, longest)],
        "settings": {
            "text": source or "documentation of Python",
            "cores": len(os.sched_getaffinity(0)),
            "compiled": not model.enforce_eager,
        },
        "versions": versions(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
