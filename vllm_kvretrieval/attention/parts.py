"""The division of a step's requests by how they decode; the same on every device."""

from typing import NamedTuple

import numpy as np


class Part(NamedTuple):
    """Rows that one method decodes sparsely.

    Attributes:
        method: The method's number in the engine.
        rows: int64 [n]; their places among the rows, rising; None where they are all of them.
    """

    method: int
    rows: np.ndarray | None


class Parts(NamedTuple):
    """How the rows of one token of a step attend.

    Attributes:
        sparse: bool [R]; whose contexts exceed their budgets, of which they attend to a part.
        sparsely: These, by method.
        whole: int64 [n]; the other rows, which attend to everything, as vLLM has it.
    """

    sparse: np.ndarray
    sparsely: list[Part]
    whole: np.ndarray


def split_rows(options: np.ndarray, pages: np.ndarray, decodes: np.ndarray) -> Parts:
    """Sort rows by how they attend.

    Args:
        options: :data:`SEAT` [R]; what each row's request asks for.
        pages: int [R]; pages of each row's context.
        decodes: bool [R]; whether a row decodes. A step may compute a single token of a prompt,
            too.
    """
    sparse = (pages > options["total"]) & decodes & ~options["exact"]
    sparsely = []
    for method in np.unique(options["method"][sparse]).tolist():
        rows = np.flatnonzero(sparse & (options["method"] == method))
        sparsely.append(Part(method, None if len(rows) == len(pages) else rows))
    return Parts(sparse, sparsely, np.flatnonzero(~sparse))
