"""Every boolean and every list option, in each of the ways in which people write options.

Parsers only: what comes out is the same :class:`RetrievalConfig`, or an error that says the right
spelling. Of vLLM's own behaviour this notices, too, when a way begins to work.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from vllm.benchmarks import latency, throughput
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.cli import serve
from vllm.entrypoints.launchers import run_batch
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.support.engine import checkpoint
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.request import RequestOptions
from vllm_kvretrieval.values import parse_size

BOOLEANS = [("freekv", "allow_exact", value) for value in (True, False)]
LISTS = [
    ("freekv", "also", ["quest", "snapkv"]),
    ("freekv", "also", ["quest"]),
    ("omnikv", "filters", [2, 8]),
    ("freekv", "budget_shares", [3, 2.5, 1]),
    ("freekv", "budget_shares", [[1, 2], [2, 1]]),
    ("razor", "heads", [[1, 0], [0, 1]]),
]
MAPPINGS = [
    ("freekv", "also", {"fine": {"summary_size": 16}}),
    ("freekv", "budget_shares", {"pyramid": {"beta": 10}}),
    ("razor", "heads", {"share": 0.2}),
    ("freekv", "index", {"low_rank": {"rank": 4}}),
]
SCALARS = [
    ("freekv", "budget", 1024),
    ("freekv", "correction_threshold", -1),
    ("freekv", "memory_fraction", 0.3),
    ("freekv", "pooling", "max"),
    ("freekv", "max_budget", 4096),
]
CASES = BOOLEANS + LISTS + MAPPINGS + SCALARS


def of(case):
    return f"{case[1]}-{json.dumps(case[2])}"


every_option = pytest.mark.parametrize(("method", "key", "value"), CASES, ids=map(of, CASES))
COMMANDS = {
    # The words before the options, and what adds the parser of the last of them.
    "serve": (["serve", "MODEL"], serve.make_arg_parser),
    "run-batch": (["run-batch", "-i", "x", "-o", "y"], run_batch.make_arg_parser),
    "throughput": (["bench", "throughput"], throughput.add_cli_args),
    "latency": (["bench", "latency"], latency.add_cli_args),
}


@pytest.fixture
def vllm(monkeypatch):
    """Parses as the ``vllm`` command does: its sub-commands get their parsers, those with plug-ins
    in any case, and then ``sys.argv`` is read."""

    def run(command, *arguments):
        words, add = COMMANDS[command]
        monkeypatch.setattr(sys, "argv", ["vllm", *words, *map(str, arguments)])
        parser = FlexibleArgumentParser(prog="vllm")
        subparsers = parser.add_subparsers(dest="subparser")
        for name in {"serve", words[0]}:
            below = subparsers.add_parser(name)
            if name == "bench":
                below = below.add_subparsers(dest="bench_type").add_parser(words[1])
            (add if name == words[0] else serve.make_arg_parser)(below)
        return parser.parse_args().additional_config

    return run


def served(method, additional):
    """The options that an engine reads from it."""
    return RetrievalConfig.from_options(method, additional["kv_retrieval"])


def expected(method, key, value):
    return RetrievalConfig.from_options(method, {key: value})


# ------------------------------------------------------------------------------- command line


def dotted(prefix):
    return lambda key, value: [f"{prefix}.{key}", value if type(value) is str else dumps(value)]


def dumps(value):
    return json.dumps(value)


WAYS = {
    "dotted": dotted("--kv-retrieval"),
    "with underscores": dotted("--kv_retrieval"),
    "equals": lambda key, value: ["=".join(dotted("--kv-retrieval")(key, value))],
    "JSON": lambda key, value: ["--kv-retrieval", dumps({key: value})],
    "vLLM's own option": dotted("--additional-config.kv_retrieval"),
    "JSON of vLLM's own": lambda key, value: [
        "--additional-config",
        dumps({"kv_retrieval": {key: value}}),
    ],
}
ANYWHERE = ("vLLM's own option", "JSON of vLLM's own")


@pytest.mark.parametrize("way", WAYS)
@every_option
def test_command_lines(vllm, way, method, key, value):
    for command in COMMANDS:
        if command == "latency" and way not in ANYWHERE:
            continue
        additional = vllm(command, *WAYS[way](key, value))
        assert served(method, additional) == expected(method, key, value)


@pytest.mark.parametrize("name", ["--kv-retrieval", "--kv_retrieval", "--additional-config"])
def test_lists_item_by_item(vllm, name):
    name += ".kv_retrieval.also+" if "additional" in name else ".also+"
    for given in ([name, "quest", name, "snapkv"], [f"{name}=quest,snapkv"]):
        additional = vllm("serve", *given)
        assert served("freekv", additional) == expected("freekv", "also", ["quest", "snapkv"])


@pytest.mark.parametrize("way", sorted(WAYS.keys() - set(ANYWHERE)))
def test_commands_that_plug_ins_cannot_extend_say_what_to_write(vllm, way, capsys):
    given = WAYS[way]("budget", 512)
    with pytest.raises(SystemExit):
        vllm("latency", *given)
    key = "" if way == "JSON" else ".budget"
    said = capsys.readouterr().err
    assert f"vllm bench latency does not know {given[0].partition('=')[0]}" in said
    assert f"Write --additional-config.kv_retrieval{key}, which" in said
    right = f"--additional-config.kv_retrieval{key}"
    additional = vllm("latency", right, given[-1].rpartition("=")[2])
    assert served("freekv", additional) == expected("freekv", "budget", 512)


def test_a_client_has_no_engine(vllm, monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "client", (["bench", "serve"], lambda parser: parser))
    with pytest.raises(SystemExit):
        vllm("client", "--kv-retrieval.budget", 512)
    said = capsys.readouterr().err
    assert "vllm bench serve has no engine: give --kv-retrieval.budget to the server" in said
    body = json.loads(said.split("--extra-body '")[1].split("'")[0])
    server = RetrievalConfig.from_options("freekv", {})
    assert RequestOptions.parse(body["vllm_xargs"], server).budget.total == 512 // 32


@pytest.mark.parametrize(
    ("given", "right"),
    [
        (["--kv-retrieval.allow_exact", "--port", "8000"], "--kv-retrieval.allow_exact true"),
        (["--port", "8000", "--kv_retrieval.allow_exact"], "--kv-retrieval.allow_exact true"),
        (["--no-kv-retrieval.allow_exact"], "--kv-retrieval.allow_exact false"),
        (["--no-kv-retrieval"], "--kv-retrieval.allow_exact false"),
        (
            ["--additional-config.kv_retrieval.allow_exact", "--port", "8000"],
            "--kv-retrieval.allow_exact true",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_switches_want_a_value(vllm, given, right, capsys):
    with pytest.raises(SystemExit):
        vllm("serve", *given)
    assert f"write {right}" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- YAML


@pytest.fixture
def config(tmp_path):
    """Writes a file for ``--config``; gives its path."""

    def write(lines):
        path = tmp_path / "options.yaml"
        path.write_text(yaml.safe_dump(lines))
        return path

    return write


NESTED = {
    "nested": lambda key, value: {"kv-retrieval": {key: value}},
    "with underscores": lambda key, value: {"kv_retrieval": {key: value}},
    "JSON": lambda key, value: {"kv-retrieval": dumps({key: value})},
    "vLLM's own option": lambda key, value: {"additional-config": {"kv_retrieval": {key: value}}},
}


@pytest.mark.parametrize("size", ["64Gi", "64G", "64g", "64GB", "512M", "1.5T"])
def test_sizes_mean_the_same_everywhere(vllm, config, size):
    """vLLM reads some of them before we do, where a name has a dot."""
    file = config(NESTED["nested"]("home_bytes", size))
    for arguments in (["--config", file], *(way("home_bytes", size) for way in WAYS.values())):
        read = vllm("serve", *arguments)["kv_retrieval"]["home_bytes"]
        assert parse_size("home_bytes", read) == parse_size("home_bytes", size)


DOTTED = ("kv-retrieval", "kv_retrieval", "additional-config.kv_retrieval")


@pytest.mark.parametrize("way", NESTED)
@every_option
def test_files_with_options_below_a_name(vllm, config, way, method, key, value):
    path = config(NESTED[way](key, value) | {"port": 8001})
    for command in ("serve", "run-batch"):
        additional = vllm(command, "--config", path)
        assert served(method, additional) == expected(method, key, value)


@pytest.mark.parametrize("name", DOTTED)
@every_option
def test_files_with_names_that_have_a_dot(vllm, config, name, method, key, value, capsys):
    """Served alike, or refused with what is served alike."""
    path = config({f"{name}.{key}": value, "port": 8001})
    if not isinstance(value, bool | list):
        additional = vllm("serve", "--config", path)
    else:
        with pytest.raises(SystemExit):
            vllm("serve", "--config", path)
        said = capsys.readouterr().err
        assert f"{path}: vLLM would lose or misread '{name}.{key}: {dumps(value)}'" in said
        right = said.split("Write '")[1].split("'.")[0]
        additional = vllm("serve", "--config", config(yaml.safe_load(right)))
    assert served(method, additional) == expected(method, key, value)


@pytest.mark.parametrize(
    ("lines", "right"),
    [
        ({"kv-retrieval.allow_exact": None}, "kv-retrieval: {allow_exact: null}"),
        ({"kv-retrieval": False}, "kv-retrieval: {budget: 1024}"),
        ({"kv-retrieval": None}, "kv-retrieval: {budget: 1024}"),
        ({"kv-retrieval": ["also", "quest"]}, "kv-retrieval: {budget: 1024}"),
        ({"kv-retrieval.also": []}, "kv-retrieval: {also: []}"),
        ({"kv-retrieval.a.b": True}, "kv-retrieval: {a: {b: true}}"),
    ],
    ids=str,
)
def test_lines_that_say_nothing(vllm, config, lines, right, capsys):
    with pytest.raises(SystemExit):
        vllm("serve", "--config", config(lines))
    assert f"Write '{right}'." in capsys.readouterr().err


def test_the_command_line_comes_before_the_file(vllm, config, capsys):
    options = {"budget": 512, "sink": 64}
    nested = ["--config", config({"kv-retrieval": options})]
    for given in (
        ["--kv-retrieval.budget", 1024, *nested],
        [*nested, "--kv-retrieval", '{"budget": 1024}'],
    ):
        assert vllm("serve", *given) == {"kv_retrieval": {"budget": 1024, "sink": 64}}
    dots = ["--config", config({f"kv-retrieval.{key}": value for key, value in options.items()})]
    both = {"kv_retrieval": {"budget": 1024, "sink": 64}}
    assert vllm("serve", *dots, "--kv-retrieval.budget", 1024) == both
    with pytest.raises(SystemExit):
        vllm("serve", *dots, "--kv-retrieval", '{"budget": 1024}')
    said = capsys.readouterr().err
    assert "'kv-retrieval.budget: 512' would win over --kv-retrieval of the command line" in said
    assert "Write 'kv-retrieval: {budget: 512}'." in said


def test_a_file_that_vllm_does_not_read(vllm, config, capsys):
    path = config({"kv-retrieval": {"allow_exact": False}})
    with pytest.raises(SystemExit):
        vllm("serve", f"--config={path}")
    assert f"vLLM does not read --config={path}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[", "- 1\n- 2", "", "port: 8001"])
def test_files_without_our_options_are_vllms_affair(monkeypatch, tmp_path, text):
    path = tmp_path / "options.yaml"
    path.write_text(text)
    for given in (["--config", str(path)], ["--config", "missing.yaml"], ["--config"]):
        monkeypatch.setattr(sys, "argv", ["vllm", "serve", *given])
        assert AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


# ------------------------------------------------------------------------------------- in code


@pytest.mark.parametrize("made", [EngineArgs, AsyncEngineArgs])
@every_option
def test_arguments_in_code(made, method, key, value):
    arguments = made(
        model="m", attention_backend=method, additional_config={"kv_retrieval": {key: value}}
    )
    assert served(method, arguments.additional_config) == expected(method, key, value)


@pytest.mark.model
def test_an_engine_in_code_looks_at_the_file_of_its_program(monkeypatch, config):
    """Programs whose parsers have vLLM's arguments without plug-ins."""
    path = config({"additional-config.kv_retrieval.allow_exact": False})
    monkeypatch.setattr(sys, "argv", ["program", "--config", str(path)])
    arguments = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args()
    arguments.model, arguments.attention_backend = checkpoint("SmolLM2-135M-Instruct"), "freekv"
    with pytest.raises(RetrievalConfigError, match="would lose or misread"):
        EngineArgs.from_cli_args(arguments).create_engine_config()


@pytest.mark.model
@pytest.mark.parametrize(
    "name", ["kv-retrieval", "kvretrieval", "kv_retrieval.budget", "KV_RETRIEVAL"]
)
@pytest.mark.parametrize("backend", ["freekv", None])
def test_other_names_in_additional_config(name, backend):
    value = 512 if "budget" in name else {"budget": 512}
    with pytest.raises(ValueError, match=f"additional_config: '{name}' is not read; write"):
        EngineArgs(
            model=checkpoint("SmolLM2-135M-Instruct"),
            attention_backend=backend,
            additional_config={name: value},
        ).create_engine_config()


def test_names_with_dashes():
    with pytest.raises(RetrievalConfigError, match=r"no option 'allow-exact'.*Write 'allow_exact'"):
        RetrievalConfig.from_options("freekv", {"allow-exact": False})


@pytest.mark.parametrize("name", ["kv-retrieval", "kv_retrieval.budget", "kv-retrieval-budget"])
def test_other_names_in_a_request(name):
    server = RetrievalConfig.from_options("freekv", {})
    asked = SamplingParams(extra_args={name: 512, "kv_transfer_params": {}}).extra_args
    with pytest.raises(RetrievalConfigError, match=f"'{name}' is not read; write kv_retrieval="):
        RequestOptions.parse(asked, server)


# --------------------------------------------------------------------------------- as a process


def test_as_a_process(config):
    """The ``vllm`` command itself, up to its parser."""
    path = config({"kv-retrieval.allow_exact": False})
    done = subprocess.run(
        [str(Path(sys.executable).with_name("vllm")), "serve", "MODEL", "--config", str(path)],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"vllm: error: {path}: vLLM would lose or misre")
