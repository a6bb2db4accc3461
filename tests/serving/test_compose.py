"""The compose file of ``docker``: what it mounts is there, and its server's options are vLLM's."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from benchmarks.common import ROOT
from tests.support.monitoring import board
from vllm_kvretrieval.options.engine import RetrievalConfig

FOLDER = ROOT / "docker"
NOT_COMMITTED = {"../models"}
"""Made by ``make model``."""


def by_default(text: str) -> str:
    """A text of the file where nothing of the environment is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.fixture(scope="module")
def services() -> Any:
    return yaml.safe_load(by_default((FOLDER / "compose.yaml").read_text()))["services"]


def mounts(service: Any) -> list[tuple[str, str]]:
    """What a service mounts, and where."""
    return [tuple(line.split(":")[:2]) for line in service["volumes"]]


def test_what_is_mounted_is_there(services):
    """A file or a folder of the checkout, or a volume of the file."""
    volumes = yaml.safe_load((FOLDER / "compose.yaml").read_text())["volumes"]
    used = [source for service in services.values() for source, _ in mounts(service)]
    assert {source for source in used if not source.startswith(".")} == {*volumes}
    paths = {source for source in used if source.startswith(".")} - NOT_COMMITTED
    assert all((FOLDER / path).is_file() for path in paths)
    build = services["server"]["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).is_file()


def test_the_image_has_the_folders_of_volumes(services):
    """A new volume takes over their owner; the store is below, since it must not be its root."""
    made = (FOLDER / "Dockerfile.cpu").read_text()
    own = [target for source, target in mounts(services["server"]) if not source.startswith(".")]
    (line,) = re.findall(r"RUN install -d -o vllm -g vllm -m 700 (.+)", made)
    assert {*own} == {*line.split()}
    assert "/kv/store" in services["server"]["command"]


def test_the_server_starts_by_vllms_options(services, tmp_path):
    command = [str(word) for word in services["server"]["command"]]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(command)
    assert parsed.model_tag.startswith(dict(mounts(services["server"]))["../models"])
    assert parsed.shutdown_timeout < int(services["server"]["stop_grace_period"].rstrip("s"))
    given = parsed.additional_config["kv_retrieval"]
    there = {**given, "store": str(tmp_path / Path(given["store"]).name)}
    RetrievalConfig.from_options(parsed.attention_backend, there)


@pytest.mark.parametrize("port", [8000, 3000, 9090])
def test_ports_are_those_of_this_machine_alone(services, port):
    (found,) = (
        line for one in services.values() for line in one["ports"] if line.endswith(f":{port}")
    )
    assert found == f"127.0.0.1:{port}:{port}"


def test_prometheus_finds_server_and_rules(services, tmp_path):
    """Its files as they are mounted: by Prometheus's own checker, if there is one."""
    for source, target in mounts(services["prometheus"]):
        if source.startswith("."):
            shutil.copy(FOLDER / source, tmp_path / Path(target).name)
    (job,) = yaml.safe_load((tmp_path / "prometheus.yaml").read_text())["scrape_configs"]
    (address,) = job["static_configs"][0]["targets"]
    name, port = address.split(":")
    assert f":{port}" in services[name]["ports"][0]
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(
        [promtool, "check", "config", "prometheus.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


def test_grafana_finds_board_and_prometheus(services):
    placed = {target: source for source, target in mounts(services["grafana"])}
    (boards,) = (path for path in placed if path.endswith(".json"))
    (provider,) = yaml.safe_load((ROOT / "monitoring/grafana-provisioning.yaml").read_text())[
        "providers"
    ]
    assert Path(boards).parent == Path(provider["options"]["path"])
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == boards
    (source,) = yaml.safe_load((FOLDER / "grafana-source.yaml").read_text())["datasources"]
    (variable,) = (v for v in board()["templating"]["list"] if v["type"] == "datasource")
    assert source["isDefault"]
    assert source["type"] == variable["query"]
    address = re.fullmatch(r"http://(\w+):(\d+)", source["url"])
    assert address is not None
    assert address[1] in services
