"""Types of the compiled extension; see csrc/cpu/bindings.cpp."""

import torch

MOST_SCORES: int
MODES: dict[str, int]
INDEX_KINDS: dict[str, int]
OUTSIDE: int
NO_INDEX: int
LAYOUTS: dict[str, int]
CODECS: dict[str, int]

class DecodeRows:
    def __init__(self, **fields: int) -> None: ...

class Index:
    def __init__(self, *, torch_dtype: torch.dtype, **fields: float) -> None: ...

class Chooser:
    def __init__(self, *, index: Index, **fields: float) -> None: ...

class ContextSelector:
    def __init__(self, *, index: Index, **fields: float) -> None: ...

class EncodedHome:
    def __init__(self, **fields: int) -> None: ...

class UnitLists:
    def __init__(self, **fields: int) -> None: ...

class RecallCache:
    used: int
    pinned: int
    read_ahead_ns: int
    waited_ns: int

    def __init__(self, *, encoded: EncodedHome | None, memory: object, **fields: int) -> None: ...
    def write(self, slot_mapping: int, tokens: int) -> None: ...
    def resolve(self, rows: DecodeRows, found: UnitLists) -> None: ...
    def stream(self, rows: DecodeRows, found: UnitLists, late: UnitLists) -> bool: ...
    def wait(self) -> None: ...
    def prefetch(self, rows: DecodeRows, chooser: Chooser) -> None: ...
    def drop_pages(self, pages: list[int]) -> None: ...
    def close(self, pages: int, count: int) -> None: ...
    def closed(self, pages: list[int]) -> bool: ...
    def adopt(self, pages: list[int]) -> None: ...
    def abandon(self, pages: list[int]) -> None: ...
    def stage(self, pages: int, count: int, target: int, parts: int) -> None: ...
    def release(self, request: int) -> None: ...
    def take_failed_pages(self) -> list[int]: ...
    def take_error(self) -> int: ...
    def read_in_pieces(self, bytes: int, /) -> None: ...
    def resident(self) -> list[int]: ...
    def check(self) -> str: ...

class TokenRecall:
    used: int
    read_ahead_ns: int
    waited_ns: int

    def __init__(
        self,
        requests: int,
        kv_heads: int,
        page_size: int,
        capacity: int,
        lists: int,
        pages: int,
        token_bytes: int,
        counts: int,
        memory: list[int],
        homes: list[int],
        tensors: object,
    ) -> None: ...
    def recall(self, rows: DecodeRows, found: UnitLists) -> None: ...
    def wait(self, layer: int, /) -> None: ...
    def release(self, request: int, /) -> None: ...
    def check(self) -> str: ...

class MappingGuard:
    def __init__(self, memory: int, bytes: int, fd: int, scattered: bool) -> None: ...
    def take(self) -> list[tuple[int, int]]: ...

def isa() -> str: ...
def isas() -> list[str]: ...
def use_isa(isa: str) -> None: ...
def code_units(
    codec: int,
    dtype: int,
    page_size: int,
    head_size: int,
    units: int,
    encoded: int,
    count: int,
    encodes: bool,
) -> None: ...
def update_index(
    keys: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    torch_dtype: torch.dtype,
    slot_mapping: int,
    num_tokens: int,
    index: Index,
) -> None: ...
def index_pages(pages: int, lengths: int, num_pages: int, index: Index) -> None: ...
def read_keys(entries: int, num_entries: int, index: Index, keys: int) -> None: ...
def multiply(
    *,
    x: int,
    weights: int,
    bias: int,
    out: int,
    tokens: int,
    inputs: int,
    outputs: int,
    dtype: int,
) -> None: ...
def stage_pages(
    source: int,
    source_pages: int,
    pages: int,
    num_pages: int,
    target: int,
    blocks: int,
    pages_per_block: int,
    kv_heads: int,
    page_size: int,
    head_size: int,
    element_size: int,
    source_layout: int,
    target_layout: int,
) -> None: ...
def stage_tokens(
    source: int,
    cache_tokens: int,
    entries: int,
    entries_width: int,
    entries_stride: int,
    lengths: int,
    target: int,
    blocks: int,
    rows: int,
    block_tokens: int,
    kv_heads: int,
    head_size: int,
    element_size: int,
    target_layout: int,
) -> None: ...
def write_token_major(
    key: int,
    key_shape: tuple[int, ...],
    key_strides: tuple[int, ...],
    key_dtype: torch.dtype,
    value: int,
    value_shape: tuple[int, ...],
    value_strides: tuple[int, ...],
    value_dtype: torch.dtype,
    slot_mapping: int,
    num_tokens: int,
    cache: int,
    pages: int,
    kv_heads: int,
    page_size: int,
    head_size: int,
    element_size: int,
    torch_dtype: torch.dtype,
) -> None: ...
def drop_tokens(*, rows: DecodeRows, **numbers: float) -> None: ...
def attend(
    query: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    query_dtype: torch.dtype,
    output: int,
    output_shape: tuple[int, ...],
    output_strides: tuple[int, ...],
    output_dtype: torch.dtype,
    output_floats: bool,
    lse: int,
    weights: int,
    weight_stride: int,
    entries: int,
    entries_width: int,
    entries_stride: int,
    per_head: bool,
    lengths: int,
    rows: int,
    run: int,
    cache: int,
    cache_tokens: int,
    layout: int,
    kv_heads: int,
    group: int,
    head_size: int,
    page_size: int,
    dtype: int,
    torch_dtype: torch.dtype,
    scale: float,
    softcap: float,
    sinks: int,
    rest_values: int,
    rest_lse: int,
) -> None: ...
def attend_prompt(
    query: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    query_dtype: torch.dtype,
    output: int,
    output_shape: tuple[int, ...],
    output_strides: tuple[int, ...],
    output_dtype: torch.dtype,
    lse: int,
    tokens: int,
    starts: int,
    seen: int,
    sequences: int,
    entries: int,
    entries_width: int,
    entries_stride: int,
    per_head: bool,
    cache: int,
    units: int,
    layout: int,
    kv_heads: int,
    group: int,
    head_size: int,
    page_size: int,
    dtype: int,
    torch_dtype: torch.dtype,
    window: int,
    scale: float,
    softcap: float,
    sinks: int,
) -> None: ...
def check_plan(
    query: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    torch_dtype: torch.dtype,
    rows: DecodeRows,
    chooser: Chooser,
) -> None: ...
def plan_decode(
    query: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    torch_dtype: torch.dtype,
    rows: DecodeRows,
    chooser: Chooser,
    scores: int,
    score_stride: int,
    rest_values: int,
    rest_lse: int,
) -> None: ...
def select_context(
    query: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    torch_dtype: torch.dtype,
    weights: int,
    queries_per_row: int,
    rows: DecodeRows,
    selector: ContextSelector,
    ratings: int,
    rating_stride: int,
    rated: bool,
) -> None: ...
def list_context(rows: DecodeRows, selector: ContextSelector, kv_heads: int) -> None: ...
