"""Types of the compiled extension; see csrc/cpu/bindings.cpp."""

class DecodeRows:
    def __init__(self, *args: int) -> None: ...

class LayerState:
    def __init__(self, *args: float) -> None: ...

def isa() -> str: ...
def use_isa(isa: str) -> None: ...
def update_index(
    keys: int, key_stride: int, slot_mapping: int, num_tokens: int, layer: LayerState
) -> None: ...
def stage_pages(
    source: int,
    pages: int,
    num_pages: int,
    target: int,
    pages_per_block: int,
    kv_heads: int,
    page_size: int,
    head_size: int,
    element_size: int,
) -> None: ...
def plan_decode(query: int, query_stride: int, rows: DecodeRows, layer: LayerState) -> None: ...
