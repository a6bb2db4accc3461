"""A tensor whose rows come in any order, for what recorders keep by slot or position."""

import torch


class Growing:
    """Rows by number; they are NaN until they are put.

    Args:
        dtype: Of what is kept.
    """

    def __init__(self, dtype: torch.dtype):
        self._rows = torch.empty(0, dtype=dtype)

    def put(self, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Put rows at places, in place of what is there."""
        more = int(places.max()) + 1 - len(self._rows)
        if more > 0:
            new = torch.full((more, *rows.shape[1:]), torch.nan, dtype=self._rows.dtype)
            self._rows = torch.cat([self._rows, new]) if len(self._rows) else new
        self._rows[places] = rows.to(self._rows.dtype)

    def at(self, places: torch.Tensor) -> torch.Tensor:
        """The rows at places, all of which have been put."""
        rows = self._rows[places]
        assert not rows.isnan().any(), "nothing was put there"
        return rows
