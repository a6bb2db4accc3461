"""Hits and misses of slots on a GPU, for the front end's metrics."""

from typing import Any

import torch

from vllm_kvretrieval.kernels.slots import Traffic


class TrafficReport:
    """Counts on their way from the device; they arrive a step late, since the host does not wait.

    Args:
        traffic: int64 [seats, len(Traffic)]; sums over all layers. None: no layer has slots.
        corrected: int64 [seats]; KV heads that selected anew.
        spared: int64 [seats]; units that the host has counted as attended to, and that were not.
        page_size: Tokens per unit.
        unit_bytes: Bytes of a unit.
        slots: Slots of all layers.
        rank: Rank of the worker.
    """

    def __init__(
        self,
        traffic: torch.Tensor | None,
        corrected: torch.Tensor,
        spared: torch.Tensor,
        *,
        page_size: int,
        unit_bytes: int,
        slots: int,
        rank: int,
    ) -> None:
        if traffic is None:
            traffic = torch.zeros(1, len(Traffic), dtype=torch.int64, device=corrected.device)
        self._traffic, self._corrected, self._spared = traffic, corrected, spared
        self._page_size, self._unit_bytes = page_size, unit_bytes
        self._slots, self._rank = slots, rank
        count = len(Traffic) + 2
        self._arriving = torch.zeros(count, dtype=torch.int64, pin_memory=traffic.is_cuda)
        self._seen = [0] * count
        self._arrived: Any = None
        self._told: dict[str, int] = {}

    def take(self, counted: dict[str, int]) -> dict[str, int]:
        """The counts to report; empty if nothing new has arrived.

        Args:
            counted: What the host has counted so far, by the names of metrics.
        """
        stats: dict[str, int] = {}
        if self._arrived is not None:
            if not self._arrived.query():
                return stats
            now = self._arriving.tolist()
            new = [after - before for after, before in zip(now, self._seen, strict=True)]
            self._seen = now
            stats = {
                **{name: count - self._told.get(name, 0) for name, count in counted.items()},
                "units_looked_up": new[Traffic.LOOKED_UP],
                "units_missed": new[Traffic.MISSED],
                "bytes_recalled": (new[Traffic.MISSED] + new[Traffic.AHEAD]) * self._unit_bytes,
                "heads_corrected": new[-2],
                f"slots_used/{self._rank}": now[Traffic.HELD],
                f"slots/{self._rank}": self._slots,
            }
            self._told = counted
            stats["units_attended"] -= new[-1]
            stats["tokens_read"] -= new[-1] * self._page_size
        counts = torch.stack((self._corrected, self._spared)).sum(1)
        totals = torch.cat((self._traffic.sum(0), counts))
        self._arriving.copy_(totals, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()
        return stats
