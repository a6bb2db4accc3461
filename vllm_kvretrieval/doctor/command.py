"""``vllm-kvretrieval doctor``: what stands in the way of serving here, and what would help."""

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm_kvretrieval.command_inputs import count
from vllm_kvretrieval.doctor.caches import check_caches
from vllm_kvretrieval.doctor.findings import Finding, Severity, failed
from vllm_kvretrieval.doctor.software import (
    check_compiler,
    check_element,
    check_kernels,
    check_plugin,
    check_runner,
    check_vllm,
    compiles,
)
from vllm_kvretrieval.errors import RetrievalConfigError

EXAMPLES = """\
examples:
  vllm-kvretrieval doctor
  vllm-kvretrieval doctor http://127.0.0.1:8000
  vllm-kvretrieval doctor http://replica-1:8000 http://replica-2:8000
  vllm-kvretrieval doctor --serve MODEL --attention-backend kvretrieval --kv-retrieval.home disk
  vllm-kvretrieval doctor --users 20 --serve MODEL --attention-backend kvretrieval
  vllm-kvretrieval doctor --max-model-len 128K MODEL

The exit status is 1 if there is an error, and 0 if there is only advice."""


USERS = 1000


def add_doctor(commands: Any) -> None:
    """Add the subcommand to those of the command line."""
    about = "check this machine and installation, or a running server, and say what to change"
    doctor: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help=about,
        description=about,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument(
        "targets",
        metavar="URL",
        nargs="*",
        help="look at this server instead; of several, say in what they differ, too; with "
        "--max-model-len the model",
    )
    doctor.add_argument(
        "--max-model-len",
        metavar="N",
        help="say how this model serves contexts of so many tokens, and what they take",
    )
    doctor.add_argument(
        "--api-key",
        default=os.environ.get("VLLM_API_KEY"),
        help="of the server (default: VLLM_API_KEY of the environment)",
    )
    doctor.add_argument("--home-path", metavar="DIR", help="check the disk of this directory")
    doctor.add_argument("--json", action="store_true", help="print a JSON array of findings")
    doctor.add_argument(
        "--users",
        type=count,
        default=USERS,
        metavar="N",
        help="with --serve: say what so many users take (default: %(default)s)",
    )
    doctor.add_argument(
        "--serve",
        nargs=argparse.REMAINDER,
        metavar="ARG",
        help="check these arguments of `vllm serve`, too; all that follows belongs to them",
    )
    doctor.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Print findings; returns the exit status."""
    wanted = None
    if given.serve == []:
        raise ValueError("--serve wants the arguments of vllm serve behind it: --serve MODEL ...")
    if given.max_model_len is not None:
        if len(given.targets) != 1 or given.serve:
            raise ValueError("--max-model-len wants a model, and no --serve")
        wanted = Wanted(given.targets[0], given.max_model_len)
    if given.targets and wanted is None:
        if given.serve is not None or given.home_path is not None:
            raise ValueError(
                "a running server is looked at by its URL alone; leave --serve and --home-path "
                "out, or the URL"
            )
        found = examine_servers(given.targets, given.api_key)
    else:
        found = examine(given.home_path, given.serve, given.users, wanted)
    findings = []
    for finding in found:
        findings.append(finding)
        if not given.json:
            print(line(finding), flush=True)
    if given.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    return int(failed(findings))


def examine_servers(urls: list[str], key: str | None) -> Iterator[Finding]:
    """Findings about running servers, and about what they differ in.

    Args:
        urls: The servers' addresses.
        key: The API key that they ask for, if any.
    """
    from vllm_kvretrieval.doctor.server import Client, check_server, compare

    servers = []
    for url in urls:
        servers.append(server := check_server(Client(url, key)))
        yield from (dataclasses.replace(found, server=server.url) for found in server.findings)
    yield from compare(servers)


def line(finding: Finding) -> str:
    """A finding as one line."""
    mark = "" if finding.severity is Severity.OK else finding.severity
    return f"{mark:7} {finding.name:14} {finding}"


class Wanted(NamedTuple):
    """A model, and how long contexts it is to serve, as ``--max-model-len`` takes it."""

    model: str
    length: str


def examine(
    home_path: str | None, serve: list[str] | None, users: int, wanted: Wanted | None = None
) -> Iterator[Finding]:
    """Findings about this machine and installation, and options of a server.

    Args:
        home_path: A directory for a home on disk, if one is to be checked in any case.
        serve: Arguments of ``vllm serve``, if there are any.
        users: How many users to say the sizes of.
        wanted: In place of the arguments: a length of contexts, for which they are found.
    """
    software = [*check_vllm()]
    yield from software
    if failed(software):
        return
    plugin = [*check_plugin()]
    yield from plugin
    if failed(plugin):
        return
    from vllm.platforms import current_platform

    from vllm_kvretrieval.doctor.options import check_options, home_of

    if wanted is not None:
        from vllm_kvretrieval.doctor.lengths import check_length

        lengths, serve = check_length(*wanted)
        yield from lengths
        if serve is None:
            return
    options, vllm_config = check_options(serve, users) if serve else ([], None)
    yield from options
    if not current_platform.is_cpu():
        from vllm_kvretrieval.doctor.gpu import check_gpu

        yield from check_gpu()
        return
    yield from _examine_cpu(vllm_config, refused=bool(serve) and vllm_config is None)
    from vllm_kvretrieval.doctor.home import check_home

    try:
        named = None if vllm_config is None else home_of(vllm_config)
    except RetrievalConfigError as e:
        yield Finding("store", str(e).rstrip("."), Severity.ERROR)
        return
    directory, size = named or (None, None)
    yield from check_home(home_path or directory, size)


def _examine_cpu(vllm_config: Any, refused: bool) -> Iterator[Finding]:
    """Findings about a CPU.

    Args:
        vllm_config: vLLM's configuration; None: that of a server without options.
        refused: Whether the options of a server are refused, so that its memory is not known.
    """
    from vllm_kvretrieval.doctor import machine

    parallel = connector = cache = None
    if vllm_config is not None:
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        connector = vllm_config.kv_transfer_config
    yield check_runner()
    yield check_compiler(vllm_config)
    yield from check_caches(None if vllm_config is None else compiles(vllm_config))
    kernels = [*check_kernels(vllm_config)]
    yield from kernels
    if not failed(kernels):
        yield check_element(vllm_config)
    yield from machine.check_threads(parallel, connector)
    yield machine.check_openmp()
    yield machine.check_huge_pages()
    if not refused:
        yield machine.check_memory(cache)
    yield machine.check_shared_memory(1 if parallel is None else parallel.local_world_size)
