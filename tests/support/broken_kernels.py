"""Kernels with something left out or changed, to see that checks find it."""

import importlib
from unittest import mock

from triton.runtime.interpreter import InterpretedFunction

KERNELS = {
    "decode": "_sparse_decode_kernel",
    "dropping": "_drop_kernel",
    "encoded": "_decode_rows",
    "index": "build_record",
    "mass": "_cut_kernel",
    "one_bit": "_score_bits_kernel",
    "outliers": "find_bar",
    "recall": "_recall_kernel",
    "resolve": "_resolve_kernel",
    "rows": "_prepare_kernel",
    "select": "_select_kernel",
    "stage": "_stage_kernel",
    "stats": "keep_scores",
    "tokens": "_rank_kernel",
    "write": "_write_kernel",
}
"""By their modules."""


def find(device, *, module, old, new, check, number=0, **options):
    """Run a check with a kernel one of whose lines is another.

    Args:
        device: For the check.
        module: The kernel's.
        old, new: What stands there instead of what; anything but one occurrence is left as it is.
        check: That is to fail.
        number: Of the occurrence.
        options: For the check.

    Returns:
        What the check says; None where it passes.
    """
    kernel = getattr(
        importlib.import_module(f"vllm_kvretrieval.kernels.triton.{module}"), KERNELS[module]
    )
    prepare = kernel.rewriter._prepare_source

    def changed(lines):
        parts = prepare(lines).split(old)
        assert len(parts) > number + 1, f"{old} is not in {module}"
        return old.join(parts[: number + 1]) + new + old.join(parts[number + 1 :])

    InterpretedFunction.rewritten_fn.pop(kernel.fn, None)
    try:
        with mock.patch.object(kernel.rewriter, "_prepare_source", changed):
            check(device, **options)
    except Exception as error:
        return str(error)
    finally:
        InterpretedFunction.rewritten_fn.pop(kernel.fn, None)
    return None
