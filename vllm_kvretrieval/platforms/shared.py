"""The hooks that all platforms with retrieval share."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.logger import init_logger
from vllm.platforms.interface import Platform

from vllm_kvretrieval.attention.refusals import has_foreign_connector
from vllm_kvretrieval.command_line import check_command_line
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.source import (
    add_options,
    options_of,
    read_option_files,
    selected_method,
)
from vllm_kvretrieval.platforms import certified
from vllm_kvretrieval.platforms.requests import check_request
from vllm_kvretrieval.retrieval.layers import has_windows
from vllm_kvretrieval.retrieval.needs import CPU, Setting
from vllm_kvretrieval.retrieval.presets import backend_names, preset_names
from vllm_kvretrieval.upstream.rotations import check_rotations, keep_rotations

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvretrieval.platform")

SCHEDULER = "vllm_kvretrieval.engine.scheduler.RetrievalScheduler"
ASYNC_SCHEDULER = "vllm_kvretrieval.engine.scheduler.RetrievalAsyncScheduler"


class RetrievalPlatform(Platform):
    """Base class in front of one of vLLM's platforms; without a method it changes nothing.

    Attributes:
        worker: Path of the worker's class.
        refusals: The module with the refusals of this platform, of engines and of layers; imported
            when first needed.
        setting: The needs of methods that the platform does not serve.
        record_alignment: The alignment of the fields of page indexes' records, in bytes.
    """

    worker: ClassVar[str]
    refusals: ClassVar[str]
    setting: ClassVar[Setting] = CPU
    record_alignment: ClassVar[int] = 1

    @classmethod
    def retrieval_backend(cls, backend: Any, selector: Any, num_heads: int | None) -> str:
        """Path of a retrieval backend's class, for a layer that can have it."""
        raise NotImplementedError

    @classmethod
    def finer_options(cls, vllm_config: "VllmConfig", method: str) -> Mapping[str, Any]:
        """Options that a method has on this platform in place of its preset's."""
        return {}

    @classmethod
    def facts_of(
        cls, vllm_config: "VllmConfig", config: RetrievalConfig
    ) -> Mapping[str, Any] | None:
        """What figures of an engine depend on; None: there are no certificates on this platform."""
        return None

    @classmethod
    def attending_kernels(cls, vllm_config: "VllmConfig", config: RetrievalConfig) -> str:
        """Whose kernels attend to whole contexts on this platform, as option ``attention``."""
        return "vllm"

    @classmethod
    def add_drafter(cls, vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
        """Let vLLM draft tokens, for the option ``drafts``.

        Raises:
            RetrievalConfigError: The engine cannot have it; says why and what to do.
        """
        raise NotImplementedError

    @classmethod
    def check_preset(cls, method: str, options: Any) -> None:
        """Refuse a method that this platform does not serve as it comes.

        Args:
            method: Name of its preset.
            options: The ``kv_retrieval`` options as the user wrote them.

        Raises:
            RetrievalConfigError: Names the method, and says where it is served, and what is near.
        """

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        super().pre_register_and_update(parser)
        try:
            check_command_line(sys.argv)
        except RetrievalConfigError as e:
            if parser is None:
                raise
            parser.exit(2, f"{Path(sys.argv[0]).name}: error: {e}\n")
        if parser is not None:
            from vllm_kvretrieval.platforms import arguments

            arguments.add_options(parser)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend is None or selected_backend.name.lower() not in preset_names():
            return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        if attn_selector_config.has_sliding_window:
            return super().get_attn_backend_cls(None, attn_selector_config, num_heads)
        importlib.import_module(cls.refusals).check_layer(attn_selector_config)
        return cls.retrieval_backend(selected_backend, attn_selector_config, num_heads)

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        worker = vllm_config.parallel_config.worker_cls
        super().check_and_update_config(vllm_config)
        certified.resolve(cls, vllm_config)
        method = selected_method(vllm_config)
        if method is None:
            if worker == cls.worker or _drafts(vllm_config):
                return  # vLLM makes a draft model's configuration of one that has been checked
            if options_of(vllm_config):
                raise RetrievalConfigError(
                    f"kv_retrieval={options_of(vllm_config)!r} has no effect without a retrieval "
                    f"backend: add --attention-backend with one of {', '.join(backend_names())}."
                )
            return
        read_option_files(vllm_config)
        cls.check_preset(method, options_of(vllm_config))
        add_options(vllm_config, cls.finer_options(vllm_config, method))
        config = RetrievalConfig.from_vllm(vllm_config)
        assert config is not None, "a method is named"
        if config.drafts:
            cls.add_drafter(vllm_config, config)
        keep_rotations(vllm_config.model_config)
        check_rotations(vllm_config)
        importlib.import_module(cls.refusals).check_engine(vllm_config, config)
        if has_foreign_connector(vllm_config):
            # Connectors index the cache by vLLM's blocks, whose views are in our pages.
            # Since vLLM 0.33 a size that is not the user's is chosen again, later.
            vllm_config.cache_config.block_size = config.page_size
            vllm_config.cache_config.user_specified_block_size = True
        if worker not in ("auto", cls.worker):
            raise RetrievalConfigError(
                f"worker_cls={worker!r} cannot be combined with attention backend {method}, which "
                "brings its own worker; leave --worker-cls out."
            )
        vllm_config.parallel_config.worker_cls = cls.worker
        _set_scheduler(vllm_config, method)
        _retain_windows(vllm_config)
        reports = config.slow_home or config.store is not None
        if reports and not has_foreign_connector(vllm_config):
            from vllm_kvretrieval.engine.connector import connector_config

            engines = vllm_config.parallel_config.data_parallel_size_local
            vllm_config.kv_transfer_config = connector_config(max(engines, 1))

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse a request's options that its engine does not serve.

        All engines of a process share the platform, and vLLM does not say which of them asks, so
        the options are taken from the caller, vLLM's ``InputProcessor``, and so are the hints of a
        request, which vLLM 0.33 has. No local holds a frame: its cycle would keep the inputs,
        images among them, until Python collects garbage.
        """
        super().validate_request(processed_inputs, params)
        caller = sys._getframe(1).f_locals.get("self")
        hints = sys._getframe(1).f_locals.get("kv_hints")
        extra_args = getattr(params, "extra_args", None)
        logprobs = getattr(params, "prompt_logprobs", None)
        check_request(caller, extra_args, logprobs, cls.setting, hints)


def _drafts(vllm_config: "VllmConfig") -> bool:
    """Whether a configuration is that of a draft model."""
    model = vllm_config.model_config
    return model is not None and model.runner_type == "draft"


def _set_scheduler(vllm_config: "VllmConfig", method: str) -> None:
    """Choose our scheduler, which knows blocks that are not exact.

    The platform has decided before whether scheduling is asynchronous.

    Raises:
        RetrievalConfigError: The user has named another scheduler.
    """
    scheduler = vllm_config.scheduler_config
    given = scheduler.scheduler_cls
    if given not in (None, SCHEDULER, ASYNC_SCHEDULER):
        from vllm_kvretrieval.engine.scheduler import RetrievalAsyncScheduler, RetrievalScheduler

        needed = RetrievalAsyncScheduler if scheduler.async_scheduling else RetrievalScheduler
        if not issubclass(scheduler.get_scheduler_cls(), needed):
            raise RetrievalConfigError(
                f"scheduler_cls={given!r} cannot be combined with attention backend {method}, "
                "which brings its own scheduler; leave --scheduler-cls out, or derive it from "
                f"{needed.__module__}.{needed.__name__}."
            )
        return
    scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER


def _retain_windows(vllm_config: "VllmConfig") -> None:
    """Keep blocks of sliding windows and recurrent states, without which no prefix can be shared.

    By default vLLM keeps those at the end of a prompt alone. A second question about a document,
    and a chat that goes on, would find nothing, and pay for all of it again.
    """
    cache = vllm_config.cache_config
    model = vllm_config.model_config
    if not cache.enable_prefix_caching or not (has_windows(model) or model.is_hybrid):
        return
    if getattr(cache, "prefix_cache_retention_interval", None) == 0:
        cache.prefix_cache_retention_interval = None
        logger.info(
            "The prefix cache keeps all blocks of sliding windows and recurrent states, so that "
            "every request finds what it shares with an earlier one; "
            "--prefix-cache-retention-interval N keeps fewer."
        )
