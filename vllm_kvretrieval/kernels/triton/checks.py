"""What the launchers refuse; metadata only, so nothing here waits for the device."""

import torch

DTYPES = (torch.bfloat16, torch.float16)


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
