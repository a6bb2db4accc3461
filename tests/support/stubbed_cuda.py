"""vLLM's own CUDA platform where there is no GPU: what an engine is configured like there.

Run as a program it prints that as JSON. Stubs stand for NVML, torch's view of a GPU, and vLLM's
compiled libraries, of which nothing is called before a worker starts. All else is vLLM's and ours,
from the arguments of an engine to the classes of worker, scheduler and backend.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

MEMORY = 80 << 30
"""Bytes of the GPU, an H100."""
CAPABILITY = 9, 0
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
}
"""Llama-3.1-8B's configuration."""
COMPILED = "_C _C_stable_libtorch _moe_C_stable_libtorch".split()
"""Libraries of vLLM's CUDA wheel that its platform and its ops import."""


class FlashAttention(ModuleType):
    """vLLM's FlashAttention 3, of which only the presence is asked."""

    FA2_AVAILABLE, FA3_AVAILABLE = False, True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda version=None: version == 3


class Nvml(ModuleType):
    """NVML of a machine with one GPU; what is not asked about a GPU answers None."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_P2P_CAPS_INDEX_NVLINK = NVML_P2P_STATUS_OK = 0

    @staticmethod
    def nvmlDeviceGetCount() -> int:  # noqa: N802
        return 1

    @staticmethod
    def nvmlDeviceGetCudaComputeCapability(handle: Any) -> tuple[int, int]:  # noqa: N802
        return CAPABILITY

    @staticmethod
    def nvmlDeviceGetName(handle: Any) -> str:  # noqa: N802
        return "NVIDIA H100 80GB HBM3"

    @staticmethod
    def nvmlDeviceGetMemoryInfo(handle: Any) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=MEMORY, free=MEMORY, used=0)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *_: None


def pretend(folder: Path) -> None:
    """Before vLLM chooses its platform: let it find its CUDA wheel and a GPU.

    Args:
        folder: An empty one, which stays for the life of the process.
    """
    import torch
    import triton
    from triton.backends import Backend, backends

    from vllm_kvretrieval import compat

    metadata = folder / "vllm-0.0.0.dist-info" / "METADATA"  # no "+cpu" at the end
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.0\n")
    sys.path.insert(0, str(folder))
    # Those of this environment belong to no GPU's.
    compat.OFFLINE = compat._release(torch.__version__), compat._release(triton.__version__)
    backends.clear()
    driver = SimpleNamespace(is_active=lambda: True)
    backends["nvidia"] = Backend(compiler=None, driver=driver)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    major, minor = CAPABILITY
    gpu = SimpleNamespace(total_memory=MEMORY, multi_processor_count=132, major=major, minor=minor)
    torch.cuda.get_device_properties = lambda *_, **__: gpu
    torch.version.cuda = "13.0"
    nvml = Nvml("pynvml")
    sys.modules |= {"pynvml": nvml, "vllm.third_party.pynvml": nvml}
    import vllm.third_party

    vllm.third_party.pynvml = nvml
    for name in COMPILED:
        sys.modules.setdefault(f"vllm.{name}", ModuleType(name))
    flash = FlashAttention("vllm.vllm_flash_attn")
    sys.modules |= {flash.__name__: flash, f"{flash.__name__}.flash_attn_interface": flash}
    from vllm import _custom_ops

    for name in dir(_custom_ops):
        if "_supports_" in name:  # a kernel that reads weights of other types
            setattr(_custom_ops, name, lambda *_: False)


def configure(model: str, method: str, **options: Any) -> Any:
    """The configuration of a server's engine, by its method and its ``kv_retrieval`` options."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    arguments = AsyncEngineArgs(
        model=model,
        attention_backend=method,
        additional_config={"kv_retrieval": options},
        skip_tokenizer_init=True,
    )
    return arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)


def describe(config: Any) -> dict[str, Any]:
    """What the platform and vLLM have chosen for an engine."""
    scheduler, compilation = config.scheduler_config, config.compilation_config
    transfer = config.kv_transfer_config
    return {
        "worker": config.parallel_config.worker_cls,
        "scheduler": scheduler.scheduler_cls,
        "v2": config.use_v2_model_runner,
        "block": config.cache_config.block_size,
        "seats": scheduler.max_num_seqs,
        "graphs": compilation.cudagraph_mode.name,
        "largest": compilation.max_cudagraph_capture_size,
        "connector": transfer and transfer.kv_connector,
    }


def choose_backend(config: Any, method: str) -> list[str]:
    """The backend of the engine's layers, and the one that it attends to whole contexts by."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vllm_kvretrieval.attention.cuda import backend

    layer = AttentionSelectorConfig(128, torch.bfloat16, "auto", None)
    with (
        set_current_vllm_config(config),
        mock.patch.object(backend, "is_flash_attn_varlen_func_available", return_value=True),
        mock.patch.object(backend, "get_flash_attn_version", return_value=3),
    ):
        chosen = AttentionBackendEnum[method.upper()]
        path = current_platform.get_attn_backend_cls(chosen, layer, 32)
        return [path, getattr(backend, method.upper()).dense.get_name()]


def refusals(model: str) -> Iterator[tuple[str, str | None]]:
    """Why each preset is not served as it comes; None: it is."""
    from vllm_kvretrieval.doctor.options import refusal
    from vllm_kvretrieval.retrieval.presets import OWN

    needs: dict[str, dict[str, Any]]
    needs = {"razor": {"heads": [[1] + [0] * 7] * 32}, "omnikv": {"filters": [0, 9]}}
    for name in OWN:
        try:
            configure(model, name, **needs.get(name, {}))
        except ValueError as error:
            yield name, refusal(error)
        else:
            yield name, None


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        pretend(Path(folder))
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        from vllm.platforms import current_platform

        from vllm_kvretrieval.doctor.gpu import check_gpu

        config = configure(folder, "freekv")
        found = {
            "platform": [cls.__name__ for cls in type(current_platform).__mro__],
            "gpu": str(next(check_gpu())),
            "device": describe(config),
            "backend": choose_backend(config, "freekv"),
            "host": describe(configure(folder, "freekv", home="host")),
            "refusals": dict(refusals(folder)),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
