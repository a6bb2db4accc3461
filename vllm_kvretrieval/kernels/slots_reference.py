"""The ops over slots in plain torch: their specification. Slow, and meant to be read."""

import torch

from vllm_kvretrieval.kernels.slots import DecodeWorkspace


def recall_units(
    home: torch.Tensor,
    slots: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    count: torch.Tensor,
    *,
    programs: int = 16,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.recall_units`."""
    listed = int(count)
    slots[targets[:listed].long()] = home.flatten(0, 1)[sources[:listed].long()]


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    home: torch.Tensor,
    slots: torch.Tensor,
    tail_slots: torch.Tensor | None = None,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.write_kv`."""
    for token, destination in enumerate(slot_mapping.tolist()):
        if destination < 0:
            continue
        page, offset = divmod(destination, home.shape[2])
        written = torch.cat([key[token], value[token]], dim=-1)
        home[page, :, offset] = written
        if tail_slots is not None:
            resident = tail_slots[token] >= 0
            slots[tail_slots[token][resident].long(), offset] = written[resident]


def sparse_decode(
    query: torch.Tensor,
    slots: torch.Tensor,
    slot_lists: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: DecodeWorkspace,
) -> None:
    """See :meth:`vllm_kvretrieval.kernels.slots.SlotOps.sparse_decode`. Computes in float64."""
    group = lse.shape[1]
    kv_heads = query.shape[1] // group
    for row, length in enumerate(lengths.tolist()):
        request, head = divmod(row, kv_heads)
        members = slice(head * group, (head + 1) * group)
        listed = slots[slot_lists[row, : -(-length // slots.shape[1])].long()]
        keys, values = listed.flatten(0, 1)[:length].double().chunk(2, dim=-1)
        scores = query[request, members].double() @ keys.T * scale
        lse[row] = scores.logsumexp(dim=-1)
        out[request, members] = (scores.softmax(dim=-1) @ values).to(out.dtype)
