"""The environment of other engines, and the project's checkpoint in their formats.

All of it lies under ``build/peers``, in folders that are named after what is in them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.environments import interpreter, run

FOLDER = ROOT / "build" / "peers"
LOCK = ROOT / "requirements" / "peers.txt"


def python() -> Path:
    """The interpreter of the environment; see :func:`benchmarks.environments.interpreter`."""
    return interpreter(LOCK)


def gguf(checkpoint: Path, kind: str) -> Path:
    """The checkpoint as a GGUF file, of ``f16`` or ``q8_0``."""

    def convert(target: Path) -> None:
        command = [str(python()), "-m", "benchmarks.peers.gguf_model"]
        run([*command, str(checkpoint), str(target), kind], "the conversion to GGUF has failed")

    return _made(FOLDER / "models" / f"{checkpoint.name}-{kind}.gguf", convert)


def onnx(checkpoint: Path) -> Path:
    """The checkpoint as a folder of ONNX Runtime GenAI: weights of 4 bits, tokens of 8 bits.

    Its builder wants PyTorch and transformers, which it finds in the project's environment.
    """

    def convert(target: Path) -> None:
        own = python()
        found = run([sys.executable, "-c", _PURELIB], "Python has failed").strip()
        program = f"import runpy, site; site.addsitedir({found!r}); {_BUILDER}"
        command = [str(own), "-c", program, "-m", str(checkpoint), "-o", str(target)]
        command += ["-p", "int4", "-e", "cpu", "--extra_options", "accuracy_level=4"]
        run(command, "the conversion to ONNX has failed")

    return _made(FOLDER / "models" / f"{checkpoint.name}-int4", convert)


_PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
_BUILDER = "runpy.run_module('onnxruntime_genai.models.builder', run_name='__main__')"


def _made(target: Path, convert: Callable[[Path], None]) -> Path:
    """What is there, or what appears at once when it has been converted."""
    if not target.exists():
        print(f"converting to {target.name}", flush=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            partial = Path(scratch) / target.name
            convert(partial)
            shutil.move(partial, target)
    return target
