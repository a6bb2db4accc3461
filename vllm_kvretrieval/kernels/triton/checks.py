"""What the launchers refuse; metadata only, so nothing here waits for the device."""

import torch

from vllm_kvretrieval.kernels.device import COLUMNS, DevicePlan, DeviceRequests, DeviceRows

DTYPES = (torch.bfloat16, torch.float16)
MOST_METHODS = 31
"""Methods of an engine whose lists are of tokens: bits of a number."""


def check_units(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse a tensor that does not hold contiguous units of a dtype that the kernels know.

    Raises:
        ValueError: Says what is wrong with the tensor called ``name``.
    """
    page, row = tensor.shape[-2:]
    if tensor.dtype not in DTYPES or tensor.dtype != dtype:
        raise ValueError(f"{name} must be bfloat16 or float16 throughout, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    if page & (page - 1) or row % 32 or row > 512:
        raise ValueError(
            f"{name} must hold units of a power of two tokens with a head size that is a multiple "
            f"of 16 up to 256, got [{page}, 2 * {row / 2:g}]"
        )


def check_list(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a list of another dtype or shape, or one that is not contiguous.

    Raises:
        ValueError: Says what is wrong with the tensor called ``name``.
    """
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be {dtype} {list(shape)}, contiguous, got {tensor.dtype} "
            f"{list(tensor.shape)} with strides {tensor.stride()}"
        )


def check_counts(
    counts: torch.Tensor, shape: tuple[int, int], name: str = "selection.counts"
) -> None:
    """Refuse counts per (seat, KV head) that are not contiguous in KV heads, or of another shape.

    Raises:
        ValueError: Says what is wrong with the tensor called ``name``.
    """
    if counts.dtype != torch.int32 or counts.shape != shape or counts.stride(1) != 1:
        raise ValueError(
            f"{name} must be int32 {list(shape)} with contiguous rows, got "
            f"{counts.dtype} {list(counts.shape)} with strides {counts.stride()}"
        )


def check_heads(name: str, tensor: torch.Tensor, head_size: int, dtype: torch.dtype) -> None:
    """Refuse a tensor that is not [tokens, heads, head_size] with contiguous tokens.

    Raises:
        ValueError: Says what is wrong with the tensor called ``name``.
    """
    if (
        tensor.dtype != dtype
        or tensor.shape[-1] != head_size
        or tensor.stride()[1:] != (head_size, 1)
    ):
        raise ValueError(
            f"{name} must be {dtype} [tokens, heads, {head_size}] with contiguous tokens, got "
            f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
        )


def check_rows(rows: DeviceRows) -> None:
    """Refuse rows whose tensors are not those of their description.

    Raises:
        ValueError: Says what is wrong with which tensor.
    """
    count = len(rows)
    of_rows = "seats", "prefilling", "seq_lens", "choosers", "fresh", "dense_lens", "certain"
    for name in of_rows:
        check_list(f"rows.{name}", getattr(rows, name), (count,), torch.int32)
    check_list("rows.query_start", rows.query_start, (count + 1,), torch.int32)
    check_list("rows.slot_mapping", rows.slot_mapping, (len(rows.slot_mapping),), torch.int64)
    table = rows.block_table
    if table.dtype != torch.int32 or len(table) < count or table.stride(1) != 1:
        raise ValueError(
            f"rows.block_table must be int32 [{count}, pages] with contiguous rows, got "
            f"{table.dtype} {list(table.shape)} with strides {table.stride()}"
        )


def check_requests(requests: DeviceRequests) -> None:
    """Refuse a table of requests that is not of its description.

    Raises:
        ValueError: Says what is wrong with which tensor.
    """
    seats = len(requests.table)
    check_list("requests.table", requests.table, (seats, COLUMNS), torch.int32)
    check_list("requests.corrected", requests.corrected, (seats,), torch.int64)


def check_token_plan(plan: DevicePlan, pairs: int, number: int) -> None:
    """Refuse a plan that is not for lists of tokens, or has no room for all of them.

    Args:
        plan: The plan.
        pairs: Rows times KV heads.
        number: The highest number of a chooser whose rows are listed.

    Raises:
        ValueError: Says what is wrong.
    """
    for name, tensor, kind in (
        ("scores", plan.scores, torch.float32),
        ("stats", plan.stats, torch.float32),
        ("lists", plan.lists, torch.int32),
        ("lengths", plan.lengths, torch.int32),
    ):
        check_list(f"plan.{name}", tensor, tuple(tensor.shape), kind)
        if len(tensor) < pairs:
            raise ValueError(f"plan.{name} has room for {len(tensor)} of {pairs} lists")
    if number >= MOST_METHODS:
        raise ValueError(f"methods of tokens have numbers below {MOST_METHODS}, got {number}")
