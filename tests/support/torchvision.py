"""torchvision as far as text needs it, which vLLM's code for Qwen3.5 imports.

The package that ``make test-all`` takes is built for CUDA, so its operators do not load beside
torch's CPU build, and its import fails where it says how they behave on tensors without data. Here
it finds their declarations; a call of one of them is an error.
"""

import sys
from importlib.util import find_spec

import pytest
import torch

from benchmarks.common import ROOT

FOLDER = ROOT / "build" / "torchvision"
OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []


def permit() -> None:
    """Let this process import torchvision, and those that it has forked (``workers.py``); without
    the package the test is skipped."""
    if find_spec("torchvision") is None:
        if not (FOLDER / "torchvision").is_dir():
            pytest.skip("vLLM loads Qwen3.5 with torchvision only: make torchvision")
        sys.path.append(str(FOLDER))
    declare()


def declare() -> None:
    """Declare the operators of the package without, where it is on the path."""
    if str(FOLDER) in sys.path and not _declared:
        _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
        for operator in OPERATORS:
            _declared[0].define(operator)
