"""Which KV heads select before attention: by their queries, and those of their last steps."""

import triton
import triton.language as tl

from vllm_kvretrieval.kernels.device import Column

_THRESHOLD = tl.constexpr(int(Column.THRESHOLD))


@triton.jit
def is_corrected(
    now,
    before,
    options,
    fresh,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    MEMBERS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Whether a KV head attends to what its own query selects (FreeKV, section 3.3).

    Args:
        now, before: Pointers to the first of the head's queries, now and in its last step.
        options: Pointer to the columns of the request.
        fresh: int32; nonzero if the request did not select in its last step.

    Returns:
        bool.
    """
    members = tl.arange(0, MEMBERS)
    dims = tl.arange(0, DIMS)
    mask = (members < GROUP)[:, None] & (dims < HEAD_SIZE)[None, :]
    offsets = members[:, None] * HEAD_SIZE + dims[None, :]
    new = tl.load(now + offsets, mask=mask, other=0.0).to(tl.float32)
    old = tl.load(before + offsets, mask=mask, other=0.0).to(tl.float32)
    # As torch.cosine_similarity bounds the norms, each for itself.
    norms = tl.maximum(tl.sqrt(tl.sum(new * new, 1)), 1e-8)
    norms *= tl.maximum(tl.sqrt(tl.sum(old * old, 1)), 1e-8)
    cosine = tl.sum(tl.where(members < GROUP, tl.sum(new * old, 1) / norms, 0.0), 0) / GROUP
    threshold = tl.load(options + _THRESHOLD).to(tl.float32, bitcast=True)
    corrected = (fresh != 0) | (threshold >= 1)
    return corrected | ((threshold > -1) & (cosine < threshold))
