"""Options, the environment and files."""

from types import SimpleNamespace

import pytest
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.platforms import resolve_current_platform_cls_qualname
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.surprises.rows import LATEST, surprise


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """What `vllm serve` makes of its options; text for a file is written as c.yaml."""
    monkeypatch.chdir(tmp_path)
    parser = FlexibleArgumentParser()
    commands = parser.add_subparsers(required=False, dest="subparser")
    ServeSubcommand().subparser_init(commands)

    def serve(*options, file=None):
        if file is not None:
            (tmp_path / "c.yaml").write_text(file)
        return parser.parse_args(["serve", "M", *options])

    return serve


@surprise(
    "platforms/__init__.py",
    expected="`VLLM_TARGET_DEVICE=cpu` concerns builds",
    happens="where it is set, a server does not even look for platform plug-ins, such as this one",
    remedy="unset it: `vllm-kvretrieval doctor` and the log say so, and our backends are refused",
)
def test_a_variable_hides_plugins(monkeypatch):
    assert "vllm_kvretrieval" in resolve_current_platform_cls_qualname()
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert resolve_current_platform_cls_qualname() == "vllm.platforms.cpu.CpuPlatform"


@surprise(
    "utils/argparse_utils.py",
    expected="values of dotted options have the type that they look like",
    happens="`1.5k` is 1500, `1.5K` and `True` are texts, `true` is a switch, and lists hold texts",
    remedy="write lower-case `true`, whole numbers, and lists as JSON",
)
def test_types_of_dotted_values(serve):
    options = {
        "list+": "1,2",
        "k": "1.5k",
        "K": "1.5K",
        "whole": "2K",
        "True": "True",
        "true": "true",
    }
    given = [
        part for name, value in options.items() for part in (f"--additional-config.{name}", value)
    ]
    assert serve(*given).additional_config == {
        "list": ["1", "2"], "k": 1500, "K": "1.5K", "whole": 2048, "True": "True", "true": True
    }  # fmt: skip


@surprise(
    "utils/argparse_utils.py",
    expected="an option as JSON and the same one dotted are merged",
    happens="of a nested one the dotted part alone stays, whatever their order",
    remedy="`--kv-retrieval` merges the two; give other options one way",
)
def test_json_loses_to_dotted(serve):
    json = ("--additional-config", '{"kv": {"budget": 512}}')
    dotted = ("--additional-config.kv.sink", "64")
    for given in (json + dotted, dotted + json):
        assert serve(*given).additional_config == {"kv": {"sink": 64}}


@surprise(
    "utils/argparse_utils.py",
    expected="`--config=FILE` reads the file as `--config FILE` does",
    happens="it is not read, without a word",
    remedy="write a space; the plug-in refuses the other where the file has options of retrieval",
)
def test_a_file_behind_an_equals_sign(serve):
    file = "max-num-seqs: 7\n"
    assert serve("--config", "c.yaml", file=file).max_num_seqs == 7
    assert serve("--config=c.yaml").max_num_seqs is None


@surprise(
    "utils/argparse_utils.py",
    expected="`enable-prefix-caching: false` in a file turns it off",
    happens="a switch that is off is dropped; `true` works",
    remedy="give `--no-enable-prefix-caching` on the command line",
)
def test_false_in_a_file(serve):
    for value, seen in (("true", True), ("false", None)):
        file = f"enable-prefix-caching: {value}\n"
        assert serve("--config", "c.yaml", file=file).enable_prefix_caching is seen


@surprise(
    "platforms/cpu.py v1/attention/backends/cpu_attn.py",
    expected="a `--kv-cache-dtype` that CPUs cannot serve is refused",
    happens="`turboquant_4bit_nc` changes nothing, without a word",
    newer={"0.33": "it is refused"},
    remedy="the plug-in refuses it",
)
def test_types_of_the_cache_on_cpus():
    wanted = SimpleNamespace(use_sparse=False, use_mla=False, kv_cache_dtype="turboquant_4bit_nc")
    if LATEST:
        with pytest.raises(ValueError, match="turboquant_4bit_nc is not supported"):
            CpuPlatform.get_attn_backend_cls(None, wanted)
    else:
        assert CpuPlatform.get_attn_backend_cls(None, wanted).endswith("CPUAttentionBackend")


@surprise(
    "model_executor/layers/quantization/auto_gptq.py",
    expected="checkpoints of GPTQ are served, whatever their options",
    happens="those with `desc_act` and groups, and asymmetric ones, are refused; with one group "
    "`desc_act` is ignored, which is right",
    remedy="on CPUs the plug-in reads them; elsewhere take a checkpoint without `desc_act`, or AWQ",
)
def test_gptq_with_an_order():
    def read(**given):
        whole = {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "desc_act": False,
        }
        return AutoGPTQConfig.from_config(whole | given)

    assert read(group_size=-1, desc_act=True).desc_act is False
    for given in ({"desc_act": True}, {"sym": False}):
        with pytest.raises(ValueError, match=r"desc_act|sym"):
            read(**given)
