"""The backend ``certified``: retrieval where it is measured to lose nothing, else full attention.

It is a name that stands for one of the methods, and is replaced by it before anything else looks.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.source import add_options, options_of
from vllm_kvretrieval.options.table import CONFIG_KEY
from vllm_kvretrieval.retrieval.certificates import (
    CERTIFY,
    DRAFTS,
    KIND,
    Certificate,
    path_for,
    read_certificate,
    shipped_for,
)
from vllm_kvretrieval.retrieval.presets import CERTIFIED, EXACT, preset_names

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvretrieval.platforms.shared import RetrievalPlatform

logger = init_logger("vllm.kvretrieval.certified")

OPEN = frozenset({"allow_exact", "client_options", "reuse", "sessions", "sources"})
"""Options that leave alone what is computed of a request without options; others are those of the
certificate."""


def is_named(vllm_config: "VllmConfig") -> bool:
    """Whether ``certified`` is named as a backend."""
    attention = vllm_config.attention_config
    named = (attention.backend, *attention.backend_per_kind.values())
    return any(backend is not None and backend.name.lower() == CERTIFIED for backend in named)


def resolve(platform: type["RetrievalPlatform"], vllm_config: "VllmConfig") -> None:
    """Put a method in the place of ``certified``, with the options of its certificate, and say why.

    Args:
        platform: That of the engine.
        vllm_config: The engine's configuration; without ``certified`` nothing changes.

    Raises:
        RetrievalConfigError: The user names options that are the certificate's.
    """
    if not is_named(vllm_config):
        return
    given = options_of(vllm_config)
    if not isinstance(given, Mapping):
        RetrievalConfig.from_options(EXACT, given)  # refuses it
    if decided := sorted(set(given) - OPEN):
        covered = f", and certify it: {CERTIFY} -- --kv-retrieval.{decided[0]} VALUE"
        raise RetrievalConfigError(
            f"{CONFIG_KEY}.{decided[0]} cannot be set with --attention-backend {CERTIFIED}, whose "
            f"certificate decides it. Leave it out, or name a method"
            f"{'; no certificate covers drafts' if decided[0] in DRAFTS else covered}."
        )
    model = vllm_config.model_config.model
    try:
        certificate = _find(vllm_config)
        if certificate is None:
            why = f"there is no certificate of {model}; `{CERTIFY}` measures one"
        elif not (why := _why_not(platform, vllm_config, certificate)):
            logger.info(
                "%s: %s is served by %s, as %s of %s allows: %s in contexts of up to %d tokens.",
                CERTIFIED,
                model,
                certificate.method,
                certificate.path,
                certificate.date,
                certificate.summary(),
                certificate.longest,
            )
            return
    except (RetrievalConfigError, OSError) as error:  # of files, such as the certificate's
        why = str(error)
    _serve_by(vllm_config, EXACT, given)
    logger.warning("%s: %s is served with full attention: %s.", CERTIFIED, model, why.rstrip("."))


def _find(vllm_config: "VllmConfig") -> Certificate | None:
    """The user's certificate of the model, or else this package's.

    Raises:
        OSError: The system does not say whether there is one of the user's.
        RetrievalConfigError: The user's cannot be read.
    """
    from vllm import envs

    model = vllm_config.model_config
    own = path_for(Path(envs.VLLM_CACHE_ROOT), model.model)
    if own.exists():
        return read_certificate(own)
    return shipped_for(model.model, model.hf_text_config)


def _why_not(
    platform: type["RetrievalPlatform"], vllm_config: "VllmConfig", certificate: Certificate
) -> str:
    """Serve by a certificate's method, or say why that cannot be; empty: it can.

    Raises:
        RetrievalConfigError: The certificate is of another model, or its options are none.
    """
    model, path = vllm_config.model_config, certificate.path
    KIND.check_model(certificate, model.model, model.hf_text_config)
    if failed := certificate.failures():
        return f"by {path} of {certificate.date} retrieval does not pass: {'; '.join(failed)}"
    if certificate.method not in preset_names():
        return f"{path} is of {certificate.method}, which is no method; measure anew by `{CERTIFY}`"
    if vllm_config.lora_config is not None:
        return "no certificate covers LoRA adapters; leave --enable-lora out"
    if vllm_config.speculative_config is not None:
        return "no certificate covers drafts; leave --speculative-config out"
    if model.max_model_len > certificate.longest:
        return (
            f"{path} is of contexts of up to {certificate.longest} tokens, and --max-model-len is "
            f"{model.max_model_len}; set it to {certificate.longest}, or measure longer ones by "
            f"`{CERTIFY} -- --max-model-len {model.max_model_len}`"
        )
    given = options_of(vllm_config)
    _serve_by(vllm_config, certificate.method, {**certificate.options, **given})
    finer = platform.finer_options(vllm_config, certificate.method)
    options = {**options_of(vllm_config), **finer}
    config = RetrievalConfig.from_options(certificate.method, options)
    facts = platform.facts_of(vllm_config, config)
    if facts is None:
        return "certificates are of CPUs"
    if different := certificate.differences(facts):
        return (
            f"{path} was measured otherwise ({'; '.join(different)}); measure anew by `{CERTIFY}`"
        )
    return ""


def _serve_by(vllm_config: "VllmConfig", method: str, options: Mapping[str, Any]) -> None:
    """Name a method, and all of its options."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    attention, backend = vllm_config.attention_config, AttentionBackendEnum[method.upper()]
    attention.backend = backend
    attention.backend_per_kind = dict.fromkeys(attention.backend_per_kind, backend)
    additional = vllm_config.additional_config
    kept = dict(additional) if isinstance(additional, Mapping) else {}
    vllm_config.additional_config = {**kept, CONFIG_KEY: {}}
    add_options(vllm_config, options)
