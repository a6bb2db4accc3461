"""Options on a command line, and its help."""

import argparse
import os
import re

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.support import forked_server
from vllm_kvretrieval.command_line import check_command_line
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.options.help import help_texts
from vllm_kvretrieval.platforms.arguments import add_options
from vllm_kvretrieval.retrieval.presets import OWN


@pytest.fixture
def parse():
    """Parses a command line with all of vLLM's own engine arguments; gives additional_config."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return lambda *argv: parser.parse_args(argv).additional_config


OTHERS = ("--additional-config", '{"other": 7, "kv_retrieval": {"sink": 64, "budget": 512}}')


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), {}),
        (
            ("--kv-retrieval.budget", "1024", "--kv-retrieval.correction_threshold=0.9"),
            {"kv_retrieval": {"budget": 1024, "correction_threshold": 0.9}},
        ),
        (("--kv_retrieval.budget", "1024"), {"kv_retrieval": {"budget": 1024}}),
        (("--kv-retrieval", '{"budget": 1024}'), {"kv_retrieval": {"budget": 1024}}),
        (
            ("--additional-config.kv_retrieval.budget", "1024"),
            {"kv_retrieval": {"budget": 1024}},
        ),
        (OTHERS, {"other": 7, "kv_retrieval": {"sink": 64, "budget": 512}}),
        (
            ("--kv-retrieval.budget", "1024", *OTHERS),
            {"other": 7, "kv_retrieval": {"sink": 64, "budget": 1024}},
        ),
        (
            (*OTHERS, "--kv-retrieval.budget", "1024"),
            {"other": 7, "kv_retrieval": {"sink": 64, "budget": 1024}},
        ),
        (
            (*OTHERS, "--additional-config.kv_retrieval.budget", "1024"),
            {"kv_retrieval": {"sink": 64, "budget": 1024}},
        ),
        (
            ("--kv-retrieval", '{"budget": 1024, "window": 64}', *OTHERS),
            {"other": 7, "kv_retrieval": {"window": 64, "sink": 64, "budget": 512}},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_command_line(parse, argv, expected):
    assert parse(*argv) == expected
    assert parse() == {}, "the parser keeps nothing for its next command line"


@pytest.mark.parametrize("value", ["null", "5", "[]"])
def test_options_beside_others_are_an_object(parse, value, capsys):
    strange = ("--additional-config", f'{{"kv_retrieval": {value}}}')
    given = ("--kv-retrieval", '{"budget": 5}')
    for argv in ((*strange, *given), (*given, *strange)):
        with pytest.raises(SystemExit):
            parse(*argv)
        assert "kv_retrieval must be a JSON object such as" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1024", "[]", "budget=1024"])
def test_command_line_wants_an_object(parse, text, capsys):
    with pytest.raises(SystemExit):
        parse("--kv-retrieval", text)
    assert "expected a JSON object such as '{\"budget\": 1024}'" in capsys.readouterr().err


def test_options_are_added_once_and_only_beside_vllms():
    other = argparse.ArgumentParser()
    add_options(other)
    assert "--kv-retrieval" not in other.format_help()
    engine = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    before = len(engine._actions)
    add_options(engine)
    assert len(engine._actions) == before


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        (
            "--kv-retreival.budget=512",
            "there is no --kv-retreival.budget; write --kv-retrieval.bud",
        ),
        ("--kvretrieval", "there is no --kvretrieval; write --kv-retrieval."),
        ("--attention-backend=kvretreival", "kvretreival: there is none; write kvretrieval."),
        ("--attention-backend=FREKV", "FREKV: there is none; write freekv."),
    ],
)
def test_names_that_are_nearly_ours(argument, said):
    with pytest.raises(RetrievalConfigError, match=re.escape(said)):
        check_command_line(["vllm", "serve", "MODEL", argument])


def test_names_that_are_vllms():
    """None of its options, and none of its backends, is taken for one of ours."""
    options = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    check_command_line(["vllm", "serve", *options])
    for name in AttentionBackendEnum.__members__:
        check_command_line(["vllm", "serve", "MODEL", "--attention-backend", name])


def test_help_explains_every_option(tmp_path):
    """Every option has a help text, and every help text an option, as a user sees them."""
    log, command = tmp_path / "log.txt", ["serve", "--help=kv-retrieval"]
    log.touch()
    settings = os.environ | {"COLUMNS": "1000", "VLLM_LOGGING_LEVEL": "INFO"}
    assert forked_server.Process(command, log, settings).wait(timeout=300) == 0
    shown = log.read_text()
    for key, text in help_texts().items():
        assert f"--kv-retrieval.{key}: {text}" in shown
    assert set(help_texts()) == set(RetrievalConfig.__dataclass_fields__) - {"method"}
    for method in OWN:
        assert method in shown
