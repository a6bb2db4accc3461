"""Room that layers of one shape share: what a step finds out on its way, and throws away."""

import torch

from vllm_kvretrieval.kernels.device import DevicePlan, ScoreRoom
from vllm_kvretrieval.kernels.slots import DecodeWorkspace
from vllm_kvretrieval.kernels.triton.decode import SPLITS_PER_UNIT, count_splits

PROGRAMS_PER_UNIT = 4
"""Programs of a score kernel per multiprocessor. Each takes several tiles of long contexts."""


def count_programs(pairs: int, units: int) -> int:
    """Programs that score the entries of one context and KV head: a power of two.

    Args:
        pairs: Contexts times KV heads.
        units: Multiprocessors.
    """
    return 1 << max(0, (PROGRAMS_PER_UNIT * units // pairs).bit_length() - 1)


class Workspace:
    """Plans and partial results, for steps of up to ``rows`` rows.

    One buffer of each kind serves steps of any number of rows: fewer rows get more programs each,
    in powers of two, for each of which the kernels are compiled. Tensors for a number of rows are
    made when it first comes up and stay as they are.

    Args:
        rows: Most rows of a step.
        kv_heads, group, head_size: Sizes of the layers.
        queries: Most tokens of a row that decodes, its drafts among them.
        entries: Most entries of a context's page index; or tokens of a list whose scores are noted.
        width: Most pages that a KV head attends to.
        usual: Most that it attends to, but for rare ones: attention is divided by these.
        page_size: Tokens per page.
        units: Multiprocessors of the device.
        positions: Whether plans hold pages by their positions; see :class:`DevicePlan`.
        ahead: Whether layers select beside others for the next step, in room of its own.
        outliers: Whether some pages are selected as outliers.
        device: Where; ``meta``: nowhere, only to know the size.
    """

    def __init__(
        self,
        *,
        rows: int,
        kv_heads: int,
        group: int,
        queries: int,
        head_size: int,
        entries: int,
        width: int,
        usual: int,
        page_size: int,
        units: int,
        positions: bool,
        ahead: bool,
        outliers: bool,
        device: torch.device | str,
    ) -> None:
        self.kv_heads, self.queries, self.units = kv_heads, queries, units
        self._longest = usual * page_size, head_size
        self._positions = positions
        pairs = rows * kv_heads
        programs = max(pairs, PROGRAMS_PER_UNIT * units)
        parts = max(pairs, SPLITS_PER_UNIT * units)
        rooms = 2 if ahead else 1
        self._scores = torch.empty(rooms, pairs, group, entries, device=device)
        self._stats = torch.empty(rooms, programs, 2, group, device=device)
        kept = rooms, pairs, 2, entries
        self._cosines = torch.empty(kept, device=device) if outliers else None
        self._ended = torch.zeros(rooms, pairs, dtype=torch.int32, device=device)
        self._lists = torch.zeros(pairs, width, dtype=torch.int32, device=device)
        self._lengths = torch.full((pairs,), -1, dtype=torch.int32, device=device)
        self._out = torch.empty(parts, queries * group, head_size, device=device)
        self._lse = torch.empty(parts, queries * group, device=device)
        self._merged = torch.empty(pairs, queries * group, device=device)
        self._arrivals = torch.zeros(pairs, dtype=torch.int32, device=device)
        self._steps: dict[int, tuple[DevicePlan, DecodeWorkspace, torch.Tensor]] = {}
        self._rooms: dict[int, ScoreRoom] = {}

    @staticmethod
    def rows_that_differ(most: int) -> list[int]:
        """Numbers of rows, up to ``most``, that together need every variant of the kernels.

        Variants differ by programs and parts per row: powers of two, which halve where rows double.
        So what a number of rows needs, the power of two below or above it needs, or ``most``.
        """
        return sorted({1 << power for power in range(most.bit_length())} | {most})

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.nbytes for b in vars(self).values() if isinstance(b, torch.Tensor))

    def of(self, rows: int) -> tuple[DevicePlan, DecodeWorkspace, torch.Tensor]:
        """The buffers that a step of ``rows`` rows writes to.

        Returns:
            The plan; room for partial results of attention; and its log-sum-exps, float32
            [rows * kv_heads, queries * group].
        """
        if rows not in self._steps:
            self._steps[rows] = self._slice(rows * self.kv_heads)
        return self._steps[rows]

    def ahead(self, rows: int) -> ScoreRoom:
        """Where the layers of a step of ``rows`` rows select for the next one."""
        if rows not in self._rooms:
            self._rooms[rows] = self._room(rows * self.kv_heads, -1)
        return self._rooms[rows]

    def _room(self, pairs: int, number: int) -> ScoreRoom:
        programs = count_programs(pairs, self.units)
        stats = self._stats[number, : pairs * programs].unflatten(0, (pairs, programs))
        cosines = None if self._cosines is None else self._cosines[number, :pairs]
        scores, ended = self._scores[number, :pairs], self._ended[number, :pairs]
        return ScoreRoom(scores, stats, ended, cosines=cosines)

    def _slice(self, pairs: int) -> tuple[DevicePlan, DecodeWorkspace, torch.Tensor]:
        room = self._room(pairs, 0)
        splits = count_splits(pairs, self.units, *self._longest)
        plan = DevicePlan(
            room.scores,
            room.stats,
            room.arrivals,
            self._lists[:pairs],
            self._lengths[:pairs],
            self._positions,
            cosines=room.cosines,
        )
        partial = DecodeWorkspace(
            self._out[: pairs * splits].unflatten(0, (pairs, splits)),
            self._lse[: pairs * splits].unflatten(0, (pairs, splits)),
            self._arrivals[:pairs],
        )
        return plan, partial, self._merged[:pairs]
