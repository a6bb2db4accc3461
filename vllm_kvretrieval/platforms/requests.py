"""The check of a request against what its engine serves, before it is computed."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any
from weakref import WeakKeyDictionary

from vllm.exceptions import VLLMClientError

from vllm_kvretrieval.attention.refusals import has_foreign_connector
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.of_hints import with_hints
from vllm_kvretrieval.options.of_requests import REQUEST
from vllm_kvretrieval.options.request import RequestReader
from vllm_kvretrieval.options.table import CONFIG_KEY
from vllm_kvretrieval.retrieval.needs import Setting
from vllm_kvretrieval.retrieval.seats import SEAT_FIELDS

OTHER_READERS = "vllm.logits_processors"
"""The group of plug-ins that read options of requests, too."""


class RetrievalRequestError(RetrievalConfigError, VLLMClientError):
    """A request's ``kv_retrieval`` options are not acceptable; vLLM's server answers 400."""


_readers: WeakKeyDictionary[Any, RequestReader | None] = WeakKeyDictionary()


def reader_of(owner: Any) -> RequestReader | None:
    """Reads options for the engine of something that has its ``vllm_config``; made once and kept
    there. None: the engine does not use retrieval."""
    if not hasattr(owner, "vllm_config"):
        return None
    if owner not in _readers:
        config = RetrievalConfig.from_vllm(owner.vllm_config)
        _readers[owner] = None if config is None else RequestReader(config)
    return _readers[owner]


def check_request(
    owner: Any,
    extra_args: Mapping[str, Any] | None,
    prompt_logprobs: Any,
    setting: Setting,
    hints: Any = None,
) -> None:
    """Refuse options of a request that its engine does not serve, or nobody would read.

    Args:
        owner: What has the engine's ``vllm_config``, such as vLLM's ``InputProcessor``.
        extra_args: ``SamplingParams.extra_args`` of the request, over HTTP its ``vllm_xargs``.
        prompt_logprobs: See ``SamplingParams``; None: the request asks for none.
        setting: What the platform does not serve.
        hints: The request's ``KvHintsEnvelope``; None: it has none.

    Raises:
        RetrievalRequestError: Names the option, and says why and what to do.
    """
    reader = reader_of(owner)
    if reader is None:
        return
    config = reader.config
    try:
        _reject_bare(extra_args or {}, owner.vllm_config)
        options = reader.read(with_hints(extra_args, hints))
    except RetrievalConfigError as e:
        raise RetrievalRequestError(str(e)) from None
    for known in SEAT_FIELDS:
        number = options.numbers[known.name]
        lacking = {*setting.lacks, *(setting.of_methods - config.methods[options.method].needs)}
        if known.need in lacking and number != known.plain:
            instead = known.need in setting.of_methods
            raise RetrievalRequestError(
                f"kv_retrieval.{known.name}={number} is not served on {setting.name} yet; leave it "
                f"out{', or name a method that has one of its own' if instead else ''}."
            )
    if setting.drafts_alike and (options.drafts != config.drafts or options.lossless):
        raise RetrievalRequestError(
            f"{setting.name} drafts for all requests alike, {config.drafts} tokens here: leave "
            "kv_retrieval.drafts and lossless out. For full attention's answers ask for exact=True."
        )
    spares = options.prefill_budget is not None and (config.prefill_depth or 1) < 1
    if spares and prompt_logprobs is not None:
        raise RetrievalRequestError(
            f"prompt_logprobs cannot be served with prefill_depth={config.prefill_depth}: "
            "the last layers hardly read the prompt. Ask for full attention "
            "(kv_retrieval.exact), or start the server without prefill_depth."
        )
    if options.exact_prefix and has_foreign_connector(owner.vllm_config):
        raise RetrievalRequestError(
            "kv_retrieval.exact_prefix=True cannot be served beside a KV connector, which "
            "does not say how the keys and values that it loads were computed; leave it "
            "out, or ask for skip_reading_prefix_cache."
        )


def _reject_bare(extra_args: Mapping[str, Any], vllm_config: Any) -> None:
    """Refuse names of ours without the prefix, unless the engine has others who may read them."""
    bare = next((name for name in REQUEST if name in extra_args), None)
    if bare is None or vllm_config.model_config.logits_processors:
        return
    if not entry_points(group=OTHER_READERS):
        raise RetrievalConfigError(
            f"options of a request: {bare!r} is not read; write {CONFIG_KEY}_{bare}."
        )
