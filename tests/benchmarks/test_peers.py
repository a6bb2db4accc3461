"""`benchmarks.serving peers`: its protocol, its turns, and its result file, without any engine."""

import json
import struct
import sys
import time
from dataclasses import replace

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest

from benchmarks.common import ROOT
from benchmarks.engines import EngineError
from benchmarks.peers import catalogue, environment, slot_file
from benchmarks.peers.catalogue import Kind, Starting
from benchmarks.peers.process import Peer
from benchmarks.serving import __main__ as driver
from benchmarks.serving import peers
from benchmarks.tables import peers as tables
from benchmarks.texts import paragraphs

COMMAND = [sys.executable, "-m", "tests.support.peer"]


def peer(tmp_path, **arguments):
    given = {"context": 512, "threads": 1, "saved": str(tmp_path)} | arguments
    return Peer("counting", COMMAND, given, {}, tmp_path / "counting.log", 20.0)


def await_state(counting, state):
    """A signal takes a moment."""
    for _ in range(200):
        if psutil.Process(counting._process.pid).status() == state:
            return
        time.sleep(0.01)
    raise AssertionError(f"it does not come to be {state}")


def test_a_peer_answers_and_is_frozen_between_calls(tmp_path):
    with peer(tmp_path) as counting:
        assert counting.versions == {"counting": "1"}
        assert counting.start_s > 0.01
        counting.pause()
        await_state(counting, psutil.STATUS_STOPPED)
        with counting.awake(), counting.peak() as most:
            found = counting.call("generate", tokens=[1, 2, 3], count=3)
        assert found["tokens"] == [4, 5, 6]
        assert len(found["steps_s"]) == 2
        assert 1 << 20 < most[0] < 1 << 30
    assert counting._process.poll() is not None


def test_a_peer_that_fails_says_why_with_its_log(tmp_path):
    with pytest.raises(EngineError, match=r"counting: ValueError: no threads(.|\n)*Traceback"):
        peer(tmp_path, threads=-1)
    with peer(tmp_path, fails_from=4) as counting:
        counting.call("generate", tokens=[1], count=1)
        with pytest.raises(EngineError, match="RuntimeError: so long a prompt"):
            counting.call("generate", tokens=[1] * 4, count=1)
    with peer(tmp_path) as counting, pytest.raises(EngineError, match="ended unexpectedly"):
        counting.call("die")


class Tokenizer:
    """A token per character; a pass key is found by the engine that is asked for it."""

    def __call__(self, text, **_):
        ids = [ord(c) % 1000 for c in text]
        offsets = [(n, n + 1) for n in range(len(ids))]
        return type("Encoding", (dict,), {"input_ids": ids, "offset_mapping": offsets})(
            input_ids=ids
        )

    def decode(self, tokens):
        return "".join(map(chr, tokens))


@pytest.fixture
def kinds(monkeypatch, tmp_path):
    """Three engines: one that widens saved contexts, one that has a limit, one that fails."""

    def make(**given):
        def starting(sizes, alone):
            arguments = {"context": sizes.room, "threads": 1, "saved": str(sizes.saved)}
            started.append((sizes.context, alone))
            return Starting(COMMAND, arguments | given)

        return starting

    started: list[tuple[int, bool]] = []
    made = {
        "wide": Kind(make(), {"wide": None, "other": "m"}, widens=True, saves=True),
        "limited": Kind(make(), {"limited": None}, longest=700, limit="no more"),
        "failing": Kind(make(fails_from=600), {"failing": None}),
    }
    monkeypatch.setattr(peers, "KINDS", made)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--quick"])
    monkeypatch.setattr(environment, "FOLDER", tmp_path / "build")
    for module in ("benchmarks.models.AutoTokenizer", "benchmarks.serving.peers.AutoTokenizer"):
        monkeypatch.setattr(f"{module}.from_pretrained", lambda _: Tokenizer())
    assert len(paragraphs()) > 1000
    return started


def measured(tmp_path, *words):
    """The cells by lane, figure and context, after a run."""
    output = tmp_path / "peers.json"
    command = ["peers", "--quick", "--model", str(tmp_path), "--output", str(output)]
    command += ["--engines", "wide", "limited", "failing", "--first", "256", "512"]
    command += ["--contexts", "512", "1024", "--memory-context", "512", *words]
    assert driver.main(command) == 0
    store = json.loads(output.read_text())
    assert store["versions"]["counting"] == "1"
    return {(c["lane"], c["figure"], c["context"]): c for c in store["cells"]}


def test_every_cell_has_a_value_or_a_reason(kinds, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    cells = measured(tmp_path, "--figures", "start", "first", "steps", "restart", "passkey",
                     "--passkey", "2", "--restarts", "256", "1024")  # fmt: skip
    for lane in ("wide", "limited"):
        assert cells[lane, "steps", 512]["value"] == pytest.approx(2.0, rel=0.3)
        assert 0 < cells[lane, "start_warm", None]["value"] < 10
        assert cells[lane, "memory", 512]["value"] > 1 << 20
        assert cells[lane, "passkey", 1536]["of"] == 2
    assert cells["other", "steps", 512]["value"] == pytest.approx(4.0, rel=0.3)
    assert cells["limited", "steps", 1024]["reason"] == "no more"
    assert cells["limited", "restart", 256]["reason"] == "no such option"
    assert cells["wide", "steps", 1024]["value"] == pytest.approx(2.0, rel=0.3)
    assert cells["wide", "restart", 1024]["value"] < 10
    assert "so long a prompt" in cells["failing", "steps", 1024]["reason"]
    assert cells["failing", "steps", 512]["value"] > 0
    shown = tables.peers({"peers.json": {"cells": list(cells.values())}}, {})
    assert shown.splitlines()[0].startswith("| engine | token at 512, ms | token at 1,024, ms |")
    assert "no more" in shown
    assert "0 of 2" in shown


def test_what_stands_is_not_measured_again(kinds, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    first = measured(tmp_path, "--figures", "start", "steps")
    count = len(kinds)
    again = measured(tmp_path, "--figures", "start", "steps")
    assert kinds[count:] == [(1024, False)] * 2, "those whose cells have reasons, and no others"
    assert again["wide", "steps", 512] == first["wide", "steps", 512]
    assert ("wide", "restart", 1024) not in again
    more = measured(tmp_path, "--figures", "restart")
    assert ("wide", "restart", 1024) in more
    assert ("wide", "steps", 512) in more
    output = str(tmp_path / "peers.json")
    assert driver.main(["peers", "--quick", "--steps", "5", "--output", output]) == 2


def test_a_prompt_that_takes_too_long_is_widened_or_left_out(kinds, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    words = ["--figures", "first", "steps", "--first", "256", "512", "1024"]
    cells = measured(tmp_path, *words, "--longest", "1", "--reading", "1")
    for lane in ("wide", "limited"):
        assert cells[lane, "first", 512]["value"] == 0.512
    assert cells["wide", "first", 1024]["reason"] == "> 1 s"
    assert cells["wide", "steps", 1024]["value"] > 0
    assert cells["failing", "steps", 1024]["reason"] == "> 1 s"


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_saved_slot_gets_longer(transposed):
    """Cells repeat; what stands behind them, and the layout of each layer, are kept."""
    cells, layers, size = 3, 2, 4
    kept = [-1, 1, cells, 10, 11, 12, 0]
    data = struct.pack(f"<III{len(kept)}i", 7, 2, len(kept), *kept)
    data += struct.pack("<II", 1, cells)
    data += b"".join(struct.pack("<iII", n, 1, 0) for n in range(cells))
    data += struct.pack("<4I", transposed, layers, 0, 0)
    keys = np.arange(cells * size, dtype=np.uint8)
    for _ in range(layers):
        data += struct.pack("<iQ", 1, size) + keys.tobytes()
    for _ in range(layers):
        if transposed:
            data += struct.pack("<iII", 1, 2, size // 2) + keys.tobytes()
        else:
            data += struct.pack("<iQ", 1, size) + keys.tobytes()
    longer = slot_file.widened(data + b"end", [20, 21, 22, 23])
    assert longer.endswith(b"end")
    assert struct.unpack_from("<III8i", longer) == (7, 2, 8, -1, 1, 4, 20, 21, 22, 23, 0)
    last = longer[-3 - 4 * size : -3]
    if transposed:
        channels = keys.reshape(2, cells, 2)
        assert last == np.concatenate([channels, channels[:, :1]], axis=1).tobytes()
    else:
        assert last == keys.tobytes() + keys[:size].tobytes()
    assert slot_file.widened(data + b"end", [10, 11, 12]) == data + b"end"
    with pytest.raises(ValueError, match="not a known form"):
        slot_file.widened(data.replace(struct.pack("<i", -1), struct.pack("<i", 5), 1), [1] * 9)


def test_weights_of_a_gguf_file(tmp_path):
    """bfloat16 as float32, and rows in the order that llama.cpp rotates them in."""
    gguf_model = pytest.importorskip("benchmarks.peers.gguf_model")
    values = np.array([[1.5, -2.0], [0.25, 3.0]], np.float32)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    header = {"w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    (tmp_path / "w").write_bytes(len(text).to_bytes(8, "little") + text + halves.tobytes())
    np.testing.assert_array_equal(gguf_model.tensors(tmp_path / "w")["w"], values)
    rows = np.arange(16).reshape(16, 1)
    order = gguf_model.interleaved(rows, 2).ravel().tolist()
    assert order == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


def test_the_catalogue_names_every_lane_once():
    lanes = [lane for kind in catalogue.KINDS.values() for lane in kind.lanes]
    assert len({*lanes}) == len(lanes)
    assert {*catalogue.DEFAULT} <= catalogue.KINDS.keys()
    assert (ROOT / "requirements" / "peers.txt").exists()
    assert replace(catalogue.KINDS["vllm"], longest=1).longest == 1
