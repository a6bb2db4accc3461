"""``vllm-kvretrieval doctor``: what it finds without a server, and what it says of servers."""

import importlib
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from benchmarks.common import ROOT
from tests.support.engine import checkpoint
from tests.support.local_http import listening, name_dead_proxy
from tests.support.model_configs import QWEN_3_5
from vllm_kvretrieval import compat, plugin
from vllm_kvretrieval.command import main
from vllm_kvretrieval.doctor import caches, home, software
from vllm_kvretrieval.doctor.findings import Finding, Severity, advice, error, failed
from vllm_kvretrieval.doctor.server import Server, compare
from vllm_kvretrieval.retrieval.model_files import check_model


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    """A size of the KV cache, so that nothing depends on what other programs take."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


def severities(findings):
    return {finding.name: finding.severity for finding in findings}


def test_this_installation(capsys):
    """Nothing keeps a machine that runs these tests from serving."""
    assert main(["doctor", "--json"]) == 0
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"package", "vllm", "platform", "kernels", "threads", "home", "disk"} <= found.keys()
    assert found["platform"]["text"].startswith("RetrievalCpuPlatform")
    assert all(finding["remedy"] for finding in found.values() if finding["severity"] != "ok")


def test_one_line_a_finding(capsys, tmp_path):
    assert main(["doctor", "--home-path", str(tmp_path / "none")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("error")]) == 1
    assert "make it, or name another directory with kv_retrieval.home_path" in lines[-1]


def test_without_vllm(tmp_path):
    """A Python that has the package and nothing else."""
    (tmp_path / "vllm_kvretrieval").symlink_to(ROOT / "vllm_kvretrieval")

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-S", "-m", "vllm_kvretrieval", *arguments],
            cwd=tmp_path,
            env={"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=False,
        )

    done = run("doctor")
    assert done.returncode == 1, done.stderr
    assert "vLLM is not installed; install it first" in done.stdout
    done = run("store", "ls", "/tmp")
    assert done.returncode == 2
    assert "vLLM is not installed here" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("VLLM_PLUGINS", "other", "keeps vLLM from loading kvretrieval; add kvretrieval to it"),
        ("VLLM_PLUGINS", "other,kvretrieval", None),
    ],
)
def test_plugins_that_vllm_may_load(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    (found,) = software.check_plugin()
    assert found.severity is (Severity.ERROR if said else Severity.OK)
    assert said is None or said in str(found)


def test_vllm_installed_twice(monkeypatch):
    monkeypatch.setattr(software, "packages_distributions", lambda: {"vllm": ["vllm", "vllm-cpu"]})
    monkeypatch.setattr(software, "version", lambda name: "0.32.0")
    assert severities(software.check_vllm())["vllm"] is Severity.ERROR


def test_vllm_by_another_name(monkeypatch):
    """As ``vllm-cpu`` brings it: vLLM's command looks for its version by the name ``vllm``."""

    def version(name):
        if name == "vllm":
            raise PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(software, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr(software, "version", version)
    *_, found = software.check_vllm()
    assert found.severity is Severity.ERROR
    assert "./tools/packaging/vllm-metadata" in str(found)


def test_another_version(monkeypatch):
    import vllm.version

    monkeypatch.setattr(vllm.version, "__version__", "0.1.0")
    *_, found = software.check_vllm()
    assert found.severity is Severity.ERROR
    assert "under vLLM 0.1.0; install one of these versions" in str(found)


def test_another_triton_on_a_gpu(monkeypatch):
    monkeypatch.delenv(compat.ALLOW_UNTESTED, raising=False)
    monkeypatch.setattr(compat, "vllm_platform", lambda: compat.VllmPlatform("cuda", ""))
    monkeypatch.setattr("triton.__version__", "3.1.0")
    *_, found = software.check_vllm()
    assert found.severity is Severity.ERROR
    assert "and Triton 3.1.0; pip install 'torch==2.1" in str(found)


def test_the_model_runner(monkeypatch):
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
    assert str(software.check_runner()).endswith("V1 model runner")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert software.check_runner().severity is Severity.ERROR
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    assert str(software.check_runner()).endswith("V2 model runner")


@pytest.mark.parametrize(
    ("cxx", "headers", "said"),
    [
        ("true", True, None),
        ("no-g++", True, "there is no C++ compiler no-g++, and vLLM compiles the model"),
        ("true", False, "Python.h, and vLLM compiles the model"),
        ("no-g++", False, "no C++ compiler no-g++ and no "),
    ],
)
def test_the_compiler(monkeypatch, tmp_path, cxx, headers, said):
    """torch calls it when a server starts that does not say --enforce-eager."""
    from vllm.config import CompilationMode

    monkeypatch.setenv("CXX", cxx)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    if headers:
        (tmp_path / "Python.h").touch()
    found = software.check_compiler()
    assert found.severity is (Severity.ADVICE if said else Severity.OK), "options may be others"
    assert said is None or said in str(found)
    assert said is None or "serve with --enforce-eager" in found.remedy
    eager = SimpleNamespace(mode=CompilationMode.NONE, backend="inductor")
    found = software.check_compiler(SimpleNamespace(compilation_config=eager))
    assert found.severity is Severity.OK
    compiled = SimpleNamespace(mode=CompilationMode.DYNAMO_TRACE_ONCE, backend="inductor")
    found = software.check_compiler(SimpleNamespace(compilation_config=compiled))
    assert found.severity is (Severity.ERROR if said else Severity.OK)


def test_disk(tmp_path, monkeypatch):
    found = severities(home.check_home(str(tmp_path), 1 << 20))
    assert found["home"] is Severity.OK
    monkeypatch.setattr(home, "SLOW_READS", float("inf"))
    assert severities(home.check_home(str(tmp_path)))["disk"] is Severity.ADVICE
    assert severities(home.check_home("/dev/shm"))["home"] is Severity.ADVICE
    (full,) = home.check_home(str(tmp_path), 1 << 60)
    assert full.severity is Severity.ERROR
    assert "home_bytes" in full.remedy
    monkeypatch.setattr(home, "keeps_space", lambda directory: False)
    found, _ = home.check_home(str(tmp_path))
    assert found.severity is Severity.ADVICE
    assert "copies on write" in str(found)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.model
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--kv-retrieval.budget", "1000"), "kv_retrieval.budget=1000 must be a positive multiple"),
        (("--kv-retrieval.home", "host"), "is for GPUs"),
        (("--kv-retrieval.allow_exact",), "has no value; write --kv-retrieval.allow_exact true"),
    ],
)
def test_options_that_a_start_refuses(capsys, options, said):
    model = checkpoint("SmolLM2-135M-Instruct")
    backend = ("--attention-backend", "kvretrieval")
    assert main(["doctor", "--json", "--serve", model, *backend, *options]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [said in one["text"] for one in found if one["severity"] == "error"] == [True]


def test_a_package_that_the_code_of_a_model_lacks(capsys, tmp_path, monkeypatch):
    """VLLM prints a traceback, and keeps what it has found of models that it could look at."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3_5))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setitem(sys.modules, "torchvision", None)
    options = ("--attention-backend", "kvretrieval", "--skip-tokenizer-init")
    assert main(["doctor", "--json", "--serve", str(tmp_path), *options]) == 1
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    (found,) = [one for one in json.loads(printed.out) if one["severity"] == "error"]
    assert "needs torchvision, for text alone, too; install the build" in found["text"]


@pytest.mark.model
def test_what_refused_options_leave_unsaid(capsys, monkeypatch):
    """The size of the KV cache is given, so it is not said to be missing."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    given = "--attention-backend kvretrieval --kv-cache-memory-bytes 1G --kv-retrieval.budget 8"
    model = checkpoint("SmolLM2-135M-Instruct")
    assert main(["doctor", "--json", "--serve", model, *given.split()]) == 1
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["options"]["severity"] == "error"
    assert "memory" not in found
    assert "threads" in found


def test_a_model_that_is_not_there(capsys, monkeypatch, tmp_path):
    """A hub would call its path a bad name."""
    monkeypatch.chdir(ROOT)
    backend = ("--attention-backend", "kvretrieval")
    for model in (str(tmp_path / "none"), "./none", "tests/none"):
        assert main(["doctor", "--serve", model, *backend]) == 1
        assert f"the model {model} is not there: no such directory" in capsys.readouterr().out
    (tmp_path / "text.txt").write_text("A text.")
    given = [str(tmp_path / "none"), str(tmp_path / "text.txt")]
    for command in (["explain", *given, "--no-plot"], ["store", "add", *given, "--store", "x"]):
        assert main(command) == 1
        assert "is not there: no such directory" in capsys.readouterr().err
    for name in (
        "MODEL",
        "owner/name",
        "owner/name:Q4_K_M",
        "s3://bucket/of/models",
        str(tmp_path),
    ):
        check_model(name)


def test_a_package_without_its_kernels(capsys, monkeypatch, tmp_path):
    """It is said in words wherever the kernels would be loaded."""

    def fail(*_):
        raise ImportError("vllm-kvretrieval was installed without its CPU kernels. Install a wheel")

    monkeypatch.setattr("vllm_kvretrieval.doctor.options.read_options", fail)
    assert main(["doctor", "--serve", "MODEL"]) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    assert len(found) == 1
    assert "cannot be checked (vllm-kvretrieval was installed without its CPU kernels" in found[0]
    monkeypatch.setattr("vllm_kvretrieval.explain.command.read_text", fail)
    (tmp_path / "text.txt").write_text("A text.")
    assert main(["explain", "MODEL", str(tmp_path / "text.txt"), "--no-plot"]) == 1
    assert "was installed without its CPU kernels" in capsys.readouterr().err


@pytest.mark.parametrize("vendor", ["0x10de", "0x8086"])
def test_no_driver(monkeypatch, tmp_path, vendor):
    """vLLM's build for GPUs then knows no platform at all."""
    from vllm.platforms.interface import UnspecifiedPlatform

    for number, kind in enumerate(("0x060000", "0x030200")):
        device = tmp_path / str(number)
        device.mkdir()
        (device / "vendor").write_text(f"{vendor if number else '0x10de'}\n")
        (device / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(plugin, "PCI", tmp_path)
    monkeypatch.setattr("vllm.platforms.current_platform", UnspecifiedPlatform())
    (found,) = software.check_plugin()
    assert found.severity is Severity.ERROR
    assert ("has an NVIDIA GPU, and vLLM finds no driver" in str(found)) == (vendor == "0x10de")
    assert "vllm-cpu" in found.remedy


def test_folders_that_cannot_be_written(capsys, monkeypatch):
    """As in a container whose user has no home: the folder, why, and what moves it."""

    def fail(*_):
        raise PermissionError(13, "Permission denied", "/none/torchinductor_uid_7/x")

    monkeypatch.setenv("VLLM_CACHE_ROOT", "/proc/none")
    (found,) = caches.check_caches()
    assert found.severity is Severity.ADVICE, "options may say --enforce-eager"
    assert str(found).startswith("/proc/none cannot be written by user")
    assert "set VLLM_CACHE_ROOT to a folder that this user may write" in found.remedy
    (found,) = caches.check_caches(compiles=True)
    assert found.severity is Severity.ERROR
    assert not [*caches.check_caches(compiles=False)]
    monkeypatch.setattr("vllm_kvretrieval.doctor.options.read_options", fail)
    main(["doctor", "--serve", "MODEL"])
    assert "torchinductor_uid_7/x cannot be written" in capsys.readouterr().out
    monkeypatch.setattr("vllm_kvretrieval.compat.version_refusal", fail)
    *_, found = software.check_vllm()
    assert "Permission denied" in found.text
    assert found.remedy.startswith("set TORCHINDUCTOR_CACHE_DIR to a folder")


@pytest.mark.parametrize(
    ("folder", "variable"),
    [
        ("/mine/hub/models--a--b", "HF_HOME"),
        ("/.cache/vllm/torch_compile_cache", "VLLM_CACHE_ROOT"),
        ("/.config/vllm", "VLLM_CONFIG_ROOT"),
        ("/.something", "HOME"),
    ],
)
def test_variables_of_folders(monkeypatch, folder, variable):
    monkeypatch.setenv("HF_HOME", "/mine")
    found = caches.check_refused("vllm", OSError(30, "Read-only file system", folder))
    assert found is not None
    assert found.remedy.startswith(f"set {variable} to")
    assert caches.check_refused("vllm", OSError(2, "No such file or directory", folder)) is None


@pytest.mark.model
def test_sizes(capsys):
    """SmolLM2-135M: 30 layers, 28 of which retrieve, with 3 KV heads of 64, in bfloat16."""
    model = checkpoint("SmolLM2-135M-Instruct")
    options = "--attention-backend quest --kv-cache-memory-bytes 1G --dtype bfloat16".split()
    assert main(["doctor", "--serve", model, *options]) == 0
    text = capsys.readouterr().out
    assert "128 tokens; routers" in text
    assert "a token takes 22.5 KiB of KV cache and 1344 bytes of page index" in text
    tokens = (1 << 30) // (128 * 30 * 3 * 64 * 4) * 128
    assert f"1.00 GiB hold {tokens} tokens" in text


def test_a_store_that_has_yet_to_be_made(capsys, tmp_path):
    """The server makes it; the directory above it has to be there."""
    options = "--attention-backend kvretrieval --kv-retrieval.home disk".split()
    for store, status in ((tmp_path / "store", 0), (tmp_path / "none" / "store", 1)):
        given = [*options, "--kv-retrieval.store", str(store)]
        assert main(["doctor", "--serve", checkpoint("SmolLM2-135M-Instruct"), *given]) == status
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "said"), [("open", "is open to other users (mode 777)"), ("file", "Not a directory")]
)
def test_a_store_that_cannot_be_used(capsys, tmp_path, kind, said):
    """It is a finding like others."""
    store = tmp_path / "store"
    if kind == "file":
        store.write_text("")
    else:
        store.mkdir()
        store.chmod(0o777)
    options = "--attention-backend kvretrieval --kv-retrieval.home disk".split()
    given = [*options, "--kv-retrieval.store", str(store)]
    assert main(["doctor", "--json", "--serve", checkpoint("SmolLM2-135M-Instruct"), *given]) == 1
    *_, found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["severity"]) == ("store", "error")
    assert said in found["text"]


def test_a_vllm_that_does_not_load(capsys, monkeypatch):
    """As with a torch whose libraries are missing: doctor says so, others are left out."""

    def fail(*_):
        raise ImportError("libcudart.so.13: cannot open shared object file")

    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", fail)
        with pytest.raises(SystemExit):
            main(["--help"])
    assert "vLLM cannot be imported here (libcudart.so.13" in capsys.readouterr().out
    monkeypatch.setattr("vllm_kvretrieval.compat.version_refusal", fail)
    *_, found = software.check_vllm()
    assert found.severity is Severity.ERROR
    assert "install vLLM anew" in found.remedy


def llama_8b(path):
    """The configuration of Llama 3.1 8B, without weights, saved at ``path``."""
    LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        vocab_size=128256,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("home", ["device", "disk"])
def test_sizes_of_many_users(capsys, tmp_path, home):
    """They are those of the page on deployment."""
    options = "--attention-backend freekv --dtype bfloat16 --max-model-len 32768".split()
    options += ["--skip-tokenizer-init", "--kv-retrieval.home", home]
    main(["doctor", "--serve", llama_8b(tmp_path), *options])
    (line,) = (s for s in capsys.readouterr().out.splitlines() if "1,000 users" in s)
    gib = 1000 * 32768 * 8 * 128 * 2 * 2 / (1 << 30)  # of a layer: one of them is dense
    on_disk = f"{31 * gib:.0f} GiB of KV cache on disk; {gib:.0f} GiB of KV cache (dense layers)"
    assert {"device": f"{32 * gib:.0f} GiB of KV cache", "disk": on_disk}[home] in line
    page = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
    assert line.partition("1,000 users")[2].strip() in page


def test_sizes_of_other_numbers_of_users(capsys, tmp_path):
    """Of 20 users, those of the page's table."""
    options = "--attention-backend freekv --dtype bfloat16 --max-model-len 32768".split()
    options += ["--skip-tokenizer-init", "--kv-retrieval.home", "disk"]
    main(["doctor", "--users", "20", "--serve", llama_8b(tmp_path), *options])
    (line,) = (s for s in capsys.readouterr().out.splitlines() if "20 users" in s)
    assert "78 GiB of KV cache on disk; 2.5 GiB of KV cache (dense layers)" in line
    assert "and 2.4 GiB of index in memory" in line
    with pytest.raises(SystemExit):
        main(["doctor", "--users", "0"])
    assert "'0' is not a whole number from 1" in capsys.readouterr().err


def test_a_server_and_what_is_not_looked_at_there(capsys):
    """Nothing that is asked for is left out without a word."""
    for more in (["--serve", "m"], ["--home-path", "/"]):
        assert main(["doctor", "http://127.0.0.1:9", *more]) == 1
        assert "a running server is looked at by its URL alone" in capsys.readouterr().err
    assert main(["doctor", "--serve"]) == 1
    assert "--serve wants the arguments of vllm serve" in capsys.readouterr().err


class Stranger(BaseHTTPRequestHandler):
    """A server that is not vLLM's."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *args):
        pass


class Speechless(Stranger):
    """A server of another protocol."""

    def handle(self):
        self.wfile.write(b"SSH-2.0-other\r\n")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:9", "http://", "http://[::1", "http://a:b", "http://a:0", "http://a b/"]
)
def test_no_address(capsys, url):
    assert main(["doctor", url]) == 1
    assert "is no address of a server, such as http://127.0.0.1:8000" in capsys.readouterr().out


def test_no_server_of_vllm(capsys):
    assert main(["doctor", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().out
    assert main(["doctor", "file:///etc/passwd"]) == 1
    assert "is no address of a server" in capsys.readouterr().out
    with listening(Stranger) as port:
        assert main(["doctor", f"http://127.0.0.1:{port}"]) == 1
    assert "is no vLLM server; mend the URL" in capsys.readouterr().out
    with listening(Speechless) as port:
        assert main(["doctor", f"http://127.0.0.1:{port}"]) == 1
    assert "does not answer" in capsys.readouterr().out


def test_no_proxy_is_asked_for_this_machine(capsys, monkeypatch):
    """The proxy is dead, so an answer has come without it."""
    name_dead_proxy(monkeypatch)
    with listening(Stranger) as port:
        for host in ("127.0.0.1", "localhost"):
            main(["doctor", f"http://{host}:{port}"])
            assert "is no vLLM server" in capsys.readouterr().out
    main(["doctor", "http://example.invalid"])
    assert "Connection refused" in capsys.readouterr().out, "others are asked by the proxy"


def test_replicas_that_differ():
    facts = {"model": "m", "vLLM": "0.32.0", "budget": "1024", "block size": "128"}
    servers = [Server(f"http://{host}", [], dict(facts)) for host in "abc"]
    (found,) = compare(servers)
    assert str(found) == "3 servers have the same model, options, block size and versions"
    assert list(compare(servers[:1])) == []
    servers[1].facts["budget"] = "512"
    servers[2].facts["vLLM"] = "0.33.0"
    servers.append(Server("http://dead", [], {}))
    first, second = compare(servers)
    assert first.text == "vLLM differs: 0.32.0 at http://a, http://b; 0.33.0 at http://c"
    assert second.text == "budget differs: 1024 at http://a, http://c; 512 at http://b"
    assert first.severity is Severity.ADVICE


def test_only_errors_fail():
    assert not failed([Finding("a", "b"), advice("a", "b", "c")])
    assert failed([Finding("a", "b"), error("a", "b", "c")])
