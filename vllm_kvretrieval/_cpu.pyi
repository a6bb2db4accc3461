"""Types of the compiled extension; see csrc/cpu/bindings.cpp."""

class DecodeRows:
    def __init__(self, *args: int) -> None: ...

class LayerState:
    def __init__(self, *args: float) -> None: ...

def isa() -> str: ...
def use_isa(isa: str) -> None: ...
def update_index(
    dtype: int,
    keys: int,
    key_stride: int,
    slot_mapping: int,
    num_tokens: int,
    index: int,
    kv_heads: int,
    head_size: int,
    page_size: int,
) -> None: ...
def plan_decode(query: int, query_stride: int, rows: DecodeRows, layer: LayerState) -> None: ...
