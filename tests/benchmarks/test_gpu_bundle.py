"""The bundle for offline GPU machines: what it cuts out of a library, and what comes back; and
the calls that are made there, with a stand-in for Python."""

import ast
import os
import re
import struct
import subprocess
import sys
import zipfile

import psutil  # type: ignore[import-untyped]
import pytest

from benchmarks.common import ROOT
from benchmarks.gpu import goals
from tools.gpu import bundle
from vllm_kvretrieval import compat


def image(architecture, payload, kind=bundle.CUBIN):
    header = struct.pack("<HHIQ", kind, 1, 64, len(payload)).ljust(28, b"h")
    return (header + struct.pack("<I", architecture)).ljust(64, b"h") + payload


def fat_binary(*images):
    body = b"".join(images)
    return bundle.FAT_BINARY + struct.pack("<HHQ", 1, 16, len(body)) + body


def code(library):
    """The (architecture, payload) pairs of each fat binary, as the driver finds them."""
    return [
        [(i.architecture, library[i.start + i.header : i.end]) for i in images]
        for _, _, images in bundle.fat_binaries(library)
    ]


def test_only_our_code_is_left():
    ours, foreign = image(90, b"ours" * 9), image(80, b"other" * 7)
    intermediate = image(90, b"text" * 5, kind=1)
    library = b"".join(
        [
            b"ELF" + bundle.FAT_BINARY + b"no fat binary",
            fat_binary(foreign, ours, intermediate),
            b"between",
            fat_binary(foreign),
            b"end",
        ]
    )
    pruned = bundle.prune(library, bundle.everything)
    assert len(pruned) == len(library)
    assert pruned.endswith(b"end")
    assert b"between" in pruned
    assert b"other" not in pruned
    assert code(pruned) == [[(90, b"ours" * 9)], [(120, bytes(35))]]
    unwanted = bundle.prune(library, lambda payload: b"ours" not in payload)
    assert [[architecture for architecture, _ in found] for found in code(unwanted)] == [
        [120, 120, 120],
        [120],
    ]


def test_files_come_back_where_they_were(tmp_path):
    wheel, packed, site = tmp_path / "a.whl", tmp_path / "bundle", tmp_path / "site"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/engine.py", "text")
        archive.writestr("vllm/_C.abi3.so", "code")
    packed.mkdir()
    files = bundle._tar([wheel], lambda name: not bundle.LEFT_OUT.search(f"/{name}"))
    bundle._compress((packed / "vllm.tar.xz", files))
    bundle._compress((packed / "vllm_flash_attn___vllm_fa3_C.abi3.so.xz", b"library"))
    bundle.unpack(packed, site)
    assert (site / "vllm" / "engine.py").read_text() == "text"
    assert not (site / "vllm" / "_C.abi3.so").exists()
    assert (site / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so").read_bytes() == b"library"


def test_there_is_one_of_every_release_that_is_tested():
    """Its requirements are those of that release's lock file."""
    assert bundle.RELEASES == compat.TESTED
    found = set()
    for release in bundle.RELEASES:
        vllm, needed = bundle.pinned(release)
        assert vllm.startswith(f"vllm=={release}.")
        found |= {line.split("==")[0] for line in needed}
    assert found == {*bundle.DEPENDENCIES}


ON_THE_MACHINE = """
numpy packaging prometheus_client psutil pytest regex safetensors torch transformers triton yaml
"""
"""Requirements beside Python and the bundled files. vLLM needs all of them, too, except for
pytest."""
OPTIONAL = "flashinfer xformers"
OURS = "benchmarks tests vllm_kvretrieval"


def imports(path):
    """Names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            assert not node.level, "relative"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def source(module):
    """The file of a module of this repository; None where it is none."""
    path = ROOT / module.replace(".", "/")
    found = [path.with_suffix(".py"), path / "__init__.py"]
    return next((file for file in found if file.exists()), None)


def test_everything_that_runs_there_is_there():
    """Without vLLM's own modules, whose needs the bundle has been made for."""
    todo = [*(ROOT / "benchmarks/gpu").glob("*.py"), *(ROOT / "tests/gpu").glob("*.py")]
    todo += [ROOT / "tests/conftest.py"]
    seen, foreign = set(todo), set()
    while todo:
        for name in imports(todo.pop()):
            if name.split(".")[0] in OURS.split():
                if (file := source(name)) and file not in seen:
                    seen.add(file)
                    todo.append(file)
            else:
                foreign.add(name.split(".")[0])
    assert ROOT / "vllm_kvretrieval/kernels/triton/select.py" in seen
    there = {*sys.stdlib_module_names, *ON_THE_MACHINE.split(), *OPTIONAL.split(), "vllm"}
    there |= {name.replace("-", "_") for name in bundle.DEPENDENCIES}
    assert foreign - there == {"matplotlib"} & foreign, "plots are made elsewhere"


STAND_IN = r"""#!/bin/bash
case "$*" in
"-c import"*) exit "${MISSING:-0}" ;;
esac
echo "$@" | sed "s#$OUT#OUT#; s#$TMPDIR#TMP#" >> "$LOG"
case "$*" in
*goals*) echo the goals ;;
*ceilings*)
  (trap 'echo where it was; exit' ABRT; while :; do sleep 0.1; done) &
  sleep 0.5
  exit 3 ;;
*--engine\ device\ --defaults*)
  printf 'INFO fine\nRuntimeError: no kernel image\nValueError: later\n'
  exit 1 ;;
*peers*) sleep 100 &> /dev/null & echo "$!" > "$LOG.left" ;;
*install*) exec sleep "${SLEEP:-0}" ;;
esac
"""
CALLS = "day kernels engine host million baseline sanitizer".split()


def call(tmp_path, *names, **environment):
    """Run the script; its last lines, and what it has run."""
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    log.write_text("")
    given = {"PYTHON": python, "LOG": log, "OUT": tmp_path / "out", "TMPDIR": tmp_path}
    program = subprocess.run(
        ["bash", ROOT / "tools/gpu/run.sh", *names],
        env=os.environ | {name: str(value) for name, value in (given | environment).items()},
        capture_output=True,
        text=True,
        check=False,
    )
    return program, log.read_text().splitlines()


def test_a_failed_step_does_not_stop_later_ones(tmp_path):
    program, log = call(tmp_path, "kernels")
    assert program.returncode == 1
    ran = [re.sub(r"^-m (pip|pytest|benchmarks\.gpu\.\w+).*", r"\1", line) for line in log]
    expected = "pip pytest pytest decode_layer ceilings sparse_decode pytest goals".split()
    assert [name.removeprefix("benchmarks.gpu.") for name in ran] == expected
    assert log[3] == "-m benchmarks.gpu.decode_layer --output OUT/gpu_decode_layer.json"
    _, summary = program.stdout.split("== summary\n")
    first, *steps, last = summary.splitlines()
    assert first == "the goals"
    assert [step.split(":")[0] for step in steps][-2:] == ["sparse_decode", "peers"]
    assert last == "FAILED ceilings: exit status 3"
    assert program.stdout.count("where it was") == 1, "said by what a failed step has left"
    assert (tmp_path / "out" / "gpu_kernels.log").read_text() == program.stdout
    left = int((tmp_path / "log.left").read_text())
    assert not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE


def test_a_step_has_its_time(tmp_path):
    program, log = call(tmp_path, "engine", CALL_SECONDS=3, SLEEP=60)
    assert program.returncode == 1
    assert re.search(r"FAILED install: stopped after [123] s", program.stdout)
    assert re.search(r"^install: [1-9] s$", program.stdout, re.M), "it is interrupted, not killed"
    late = re.findall(r"FAILED (\w+): no time left", program.stdout)
    assert late == ["preemption", "engine_decode"]
    assert [line.split()[1] for line in log] == ["pip", "benchmarks.gpu.goals"]


def test_a_step_that_would_be_cut_is_not_begun(tmp_path):
    program, _ = call(tmp_path, "engine", CALL_SECONDS=120)
    assert re.search(r"== preemption \(at most 1[12]\d s\)", program.stdout)
    assert "FAILED engine_decode: no time left" in program.stdout


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_time_for_its_steps(tmp_path, name):
    """As much as the documentation says. And no more files come of it than come back from a machine
    that is lent."""
    checker = tmp_path / "compute-sanitizer"
    checker.symlink_to("/bin/true")
    program, log = call(tmp_path, name, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "no time left" not in program.stdout
    limits = dict(re.findall(r"== (\w+) \(at most (\d+) s\)", program.stdout))
    limits.pop("unpack", None)  # takes seconds
    total = sum(map(int, limits.values()))
    assert total <= 550, limits
    assert f"| `{name}` | {total} |" in (ROOT / "docs/gpu.md").read_text()
    results = [line for line in log if "gpu_" in line]
    engines = [line for line in results if "engine_decode --output" in line]
    assert len(results) + len(engines) + 1 <= 8, "with a log of each engine, and one of the call"


def test_the_first_call_says_what_to_repair(tmp_path):
    """Steps come in the order of their worth; a failure says its error, and where to look."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "gpu_day.json").write_text("of another day")
    program, log = call(tmp_path, "day")
    steps = re.findall(r"== (\w+) \(at most", program.stdout)
    assert steps[-6:] == "install smoke toy toy_host user stock".split()
    assert not (tmp_path / "out" / "gpu_day.json").exists(), "results of one day only"
    assert "benchmarks.gpu.smoke" in log[1]
    assert [re.findall(r"--engine (\w+) --defaults --add", line) for line in log[4:6]] == [
        ["device"],
        ["stock"],
    ]
    _, summary = program.stdout.split("== summary\n")
    (failure,) = [line for line in summary.splitlines() if line.startswith("FAILED")]
    assert failure.startswith("FAILED user: exit status 1: RuntimeError: no kernel image (if toy")


@pytest.mark.parametrize("missing", [0, 1])
def test_tests_run_by_the_plugins_that_are_there(tmp_path, missing):
    _, log = call(tmp_path, "kernels", "toy", "toy_host", MISSING=missing)
    limits = [re.findall(r"--timeout=(\d+) --timeout-method=thread", line) for line in log]
    expected = [["60"], ["60"], ["60"], ["100"], ["70"]]
    assert [found for found in limits if found] == expected[missing * 5 :]
    together = [line for line in log if "pytest" in line and " -n 8 " in line]
    assert len(together) == (0 if missing else 3)
    assert all("-v --tb=short --maxfail=3" in line for line in log if "-m pytest" in line)


def test_the_calls_measure_every_goal(tmp_path):
    commands = []
    for name in CALLS:
        _, log = call(tmp_path, name)
        commands += [(name, word) for line in log for word in re.findall(r"gpu_(\w+)\.json", line)]
    assert {(goal.call, goal.result) for goal in goals.GOALS} <= set(commands)


@pytest.mark.parametrize("names", [(), ("kernels", "nonsense")])
def test_the_script_says_what_it_can_do(tmp_path, names):
    program, log = call(tmp_path, *names)
    assert program.returncode == 2
    assert "bash tools/gpu/run.sh engine" in program.stdout
    assert not log
