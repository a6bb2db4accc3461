"""The ops on the CPU: bindings of the compiled kernels in csrc/cpu.

The extension takes addresses, not tensors, so a call costs about a microsecond. Shapes and dtypes
of rows and layers are checked once, when they are bound; the extension checks at every call that
they fit one another.
"""

try:
    from vllm_kvretrieval import _cpu  # noqa: F401
except ImportError as error:
    raise ImportError(
        "vllm-kvretrieval was installed without its CPU kernels, as it is where torch is a CUDA "
        "build. To have them compiled: pip install -C wheel.cmake=true . in a checkout"
    ) from error
from vllm_kvretrieval.kernels.cpu.attention import (
    attend,
    attend_prompt,
    stage_pages,
    stage_tokens,
    write_cache,
)
from vllm_kvretrieval.kernels.cpu.binding import CODINGS, INDEXES, LAYOUTS, TOKEN_MAJOR
from vllm_kvretrieval.kernels.cpu.decoding import decode_layer, decodes
from vllm_kvretrieval.kernels.cpu.ops import (
    drop_tokens,
    index_pages,
    isa,
    isas,
    list_context,
    plan_decode,
    read_keys,
    scratch_bytes,
    select_context,
    update_index,
    use_isa,
)
from vllm_kvretrieval.kernels.cpu.recall import (
    MappingGuard,
    RecallCache,
    TokenRecall,
    decode_units,
    encode_units,
)

__all__ = [
    "CODINGS",
    "INDEXES",
    "LAYOUTS",
    "TOKEN_MAJOR",
    "MappingGuard",
    "RecallCache",
    "TokenRecall",
    "attend",
    "attend_prompt",
    "decode_layer",
    "decode_units",
    "decodes",
    "drop_tokens",
    "encode_units",
    "index_pages",
    "isa",
    "isas",
    "list_context",
    "plan_decode",
    "read_keys",
    "scratch_bytes",
    "select_context",
    "stage_pages",
    "stage_tokens",
    "update_index",
    "use_isa",
    "write_cache",
]
