"""The division of a step's requests by how they decode; the same on every device."""

from typing import NamedTuple

import numpy as np


class RowOptions(NamedTuple):
    """Options of the rows of a step; arrays with an entry per row.

    ``method`` is the place of the row's method in :attr:`RetrievalConfig.methods`.
    """

    sink_pages: np.ndarray
    window_pages: np.ndarray
    select_pages: np.ndarray
    total_pages: np.ndarray
    threshold: np.ndarray
    mass: np.ndarray
    exact: np.ndarray
    method: np.ndarray


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


def split_rows(options: RowOptions, pages: np.ndarray, decodes: np.ndarray) -> Parts:
    """Sort rows by how they attend.

    Args:
        options: The options of each row's request.
        pages: int [R]; pages of each row's context.
        decodes: bool [R]; whether a row decodes. A step may compute a single token of a prompt,
            too.
    """
    sparse = (pages > options.total_pages) & decodes & ~options.exact
    sparsely = []
    for method in np.unique(options.method[sparse]).tolist():
        rows = np.flatnonzero(sparse & (options.method == method))
        sparsely.append(Part(method, None if len(rows) == len(pages) else rows))
    return Parts(sparse, sparsely, np.flatnonzero(~sparse))
