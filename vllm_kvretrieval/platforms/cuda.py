"""vLLM's CUDA platforms with retrieval."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_kvretrieval.kernels.device import RECORD_ALIGNMENT
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.source import options_of
from vllm_kvretrieval.platforms.shared import RetrievalPlatform
from vllm_kvretrieval.retrieval.needs import GPU
from vllm_kvretrieval.retrieval.presets import presets

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CudaRetrieval(RetrievalPlatform):
    """In front of one of vLLM's CUDA platforms: a backend of its own for layers that retrieve."""

    worker = "vllm_kvretrieval.engine.cuda.worker.RetrievalGPUWorker"
    refusals = "vllm_kvretrieval.attention.cuda.refusals"
    setting = GPU
    record_alignment = RECORD_ALIGNMENT

    @classmethod
    def check_preset(cls, method: str, options: Any) -> None:
        importlib.import_module(cls.refusals).check_preset(method, options)

    @classmethod
    def finer_options(cls, vllm_config: "VllmConfig", method: str) -> Mapping[str, Any]:
        """A method that keeps the cache on a disk keeps it in host memory here."""
        options = options_of(vllm_config)
        names_none = isinstance(options, Mapping) and "home" not in options
        return {"home": "host"} if names_none and presets()[method].home == "disk" else {}

    @classmethod
    def add_drafter(cls, vllm_config: "VllmConfig", config: RetrievalConfig) -> None:
        from vllm_kvretrieval.engine.cuda.drafting import add_drafter

        add_drafter(vllm_config, config)

    @classmethod
    def retrieval_backend(cls, backend: Any, selector: Any, num_heads: int | None) -> str:
        vllms: Any = super(RetrievalPlatform, cls)
        return str(vllms.get_attn_backend_cls(backend, selector, num_heads))
