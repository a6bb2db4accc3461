"""Run the cells of a notebook, and keep what they give in it.

    make notebook

Logs, warnings and what else goes to the error stream are left out: they are of this machine alone.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

LONGEST_S = 900


def main() -> None:
    """Run the notebook that the command line names."""
    path = Path(sys.argv[1])
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "NO_COLOR": "1"}
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=LONGEST_S, resources=place).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
