"""Programs of tests, each in a process that has imported vLLM before (tests/support/workers.py)."""

import os
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

from tests.support import workers

TIMEOUT_S = 300


def run(program: str, *arguments: str) -> CompletedProcess[str]:
    """Run a program to its end.

    Args:
        program: Its text.
        arguments: Of its command line.

    Returns:
        Its exit status, or minus the signal that ended it, and all that it wrote.

    Raises:
        TimeoutError: It has not ended after five minutes, and was killed.
    """
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / name for name in ("stdout", "stderr")]
        process = workers.context().Process(target=_run, args=(program, arguments, files))
        process.start()
        process.join(TIMEOUT_S)
        status = process.exitcode
        if status is None:
            process.kill()
            process.join()
            raise TimeoutError(f"a program still ran after {TIMEOUT_S} s:\n{program}")
        written = [file.read_text(errors="replace") for file in files]
    return CompletedProcess(arguments, status, *written)


def _run(program: str, arguments: tuple[str, ...], files: list[Path]) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
