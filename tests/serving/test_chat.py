"""``vllm-kvretrieval chat`` as a user calls it: it starts a server, and keeps what it has read."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.engine import DTYPE, checkpoint
from tests.support.server import FILLER, NEEDLE
from vllm_kvretrieval.command_inputs import printable

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.slow]

MODEL = "SmolLM2-135M-Instruct-32K"
WAIT_S = 300


@pytest.fixture
def chat(tmp_path):
    """Starts the command for a document of some 12,000 tokens, in one directory each time."""
    path = tmp_path / "report.html"
    path.write_text(f"<html><p>{240 * FILLER}</p><p>{NEEDLE}</p><p>{240 * FILLER}</p></html>")

    def start(*options):
        program = Path(sys.executable).with_name("vllm-kvretrieval")
        own = ("--model", checkpoint(MODEL), "--directory", tmp_path / "kept")
        with (tmp_path / "told.txt").open("w") as told:
            return subprocess.Popen(
                [program, "chat", path, *own, *options, "--", "--dtype", DTYPE],
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # if it is ignored
            )

    return start


def test_what_was_read_is_kept(chat, tmp_path):
    """Ctrl-C while it reads loses nothing; the next start goes on there, and answers by it."""
    told, end = tmp_path / "told.txt", time.monotonic() + WAIT_S
    first = chat()
    while not re.search(r"reading: +[1-9]", told.read_text()):
        assert first.poll() is None, told.read_text()
        assert time.monotonic() < end, told.read_text()
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    assert first.wait(WAIT_S) == 130, told.read_text()
    said = re.search(r"([\d,]+) tokens have been read; (\S+) keeps them: the", told.read_text())
    assert said is not None, told.read_text()
    read = int(said[1].replace(",", ""))
    assert said[2].startswith(str(tmp_path / "kept"))
    again = chat(
        "--max-tokens", "24", "--question", "What is the pass key?", "--question", "/sources"
    )
    answer, _ = again.communicate(timeout=WAIT_S)
    assert again.returncode == 0, told.read_text()
    known = re.search(r"([\d,]+) of ([\d,]+) tokens were read before", told.read_text())
    assert known is not None, told.read_text()
    before, total = (int(number.replace(",", "")) for number in known.groups())
    assert read - 128 <= before < total
    assert "report.html, " in answer
    assert printable(answer) == answer
