"""What retrieval cannot serve is refused at start-up, with what to do instead.

Engines are configured as ``vllm serve`` does it; none is started.
"""

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.selector import AttentionSelectorConfig

from tests.support.engine import checkpoint
from tests.support.model_configs import DEEPSEEK, LLAMA, MIMO, WHISPER
from vllm_kvretrieval.attention.cpu import refusals
from vllm_kvretrieval.attention.cpu.speculation import check_speculation
from vllm_kvretrieval.attention.refusals import CONNECTOR, check_layer
from vllm_kvretrieval.engine.connector import RetrievalConnector
from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.engine import RetrievalConfig


@pytest.fixture
def configure(tmp_path):
    """Makes the configuration of an engine for a model that consists of a config.json."""

    def configure(model, **options):
        if not isinstance(model, str):
            (tmp_path / "config.json").write_text(json.dumps(model))
            model = str(tmp_path)
        options = {"attention_backend": "freekv", "skip_tokenizer_init": True} | options
        return EngineArgs(model=model, **options).create_engine_config()

    return configure


def test_small_pages_where_vllm_cannot_attend_to_them(configure, monkeypatch):
    options = {"additional_config": {"kv_retrieval": {"page_size": 16}}}
    configure(LLAMA, **options)
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "neon")
    configure(LLAMA)
    with pytest.raises(ValueError, match="page_size=16 is not supported on this CPU"):
        configure(LLAMA, **options)


def test_dual_chunk_attention(configure):
    """Qwen2.5-1M as its authors serve it; without it, as the message says, it is a plain model."""
    chunks = {"chunk_size": 1024, "local_size": 64, "original_max_position_embeddings": 1024}
    message = r"freekv does not support dual chunk attention, .* remove dual_chunk_attention_config"
    with pytest.raises(ValueError, match=message):
        configure(LLAMA | {"dual_chunk_attention_config": chunks})
    configure(LLAMA, max_model_len=1024)


def test_windows_that_vllm_puts_elsewhere(configure):
    """VLLM does not look at the list: findings/vllm-gpt-oss-has-windows-by-parity.sh."""
    kinds = ["sliding_attention", "full_attention"]
    model = LLAMA | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    model |= {"head_dim": 64, "sliding_window": 128, "num_local_experts": 2}
    configure(model | {"layer_types": kinds})
    with pytest.raises(
        ValueError, match=r"freekv cannot serve .* \(layer_types\) in another order"
    ):
        configure(model | {"layer_types": kinds[::-1]})


@pytest.mark.parametrize("backend", ["freekv", "streamingllm"])
def test_a_plain_model_is_accepted(configure, backend):
    config = configure(LLAMA, attention_backend=backend)
    assert "Retrieval" in config.parallel_config.worker_cls


def test_a_slow_home_brings_its_connector(configure):
    assert configure(LLAMA).kv_transfer_config is None
    for home in ("disk", "auto"):
        config = configure(LLAMA, additional_config={"kv_retrieval": {"home": home}})
        assert config.kv_transfer_config.kv_connector == CONNECTOR == RetrievalConnector.__name__
        assert not config.scheduler_config.disable_hybrid_kv_cache_manager


MODELS = {
    "mla": (DEEPSEEK, {}, "does not support multi-head latent attention (MLA), which"),
    "encoder-decoder": (WHISPER, {}, "serves decoder-only models; * is an encoder-decoder."),
    "pooling": (LLAMA, {"runner": "pooling"}, "serves text generation; * as a pooling model."),
    "values of another size": (
        MIMO,
        {},
        "does not support values of 32 channels beside keys of 64, as *",
    ),
    "head size": (
        LLAMA | {"head_dim": 48},
        {},
        "does not support head size 48, only (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512).",
    ),
}


@pytest.mark.parametrize(("model", "options", "message"), MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("backend", ["freekv", "streamingllm"])
def test_models(configure, model, options, message, backend):
    """The remedy is vLLM's own attention, and with it the model is accepted."""
    with pytest.raises(ValueError, match=pattern(f"{backend} {message}")) as error:
        configure(model, attention_backend=backend, **options)
    assert "Serve it without --attention-backend." in str(error.value)
    configure(model, attention_backend=None, **options)


def test_values_that_are_mixtures(configure):
    """K2-Horizon; without them it is served (`tests/models/test_plain_families.py`)."""
    model = LLAMA | {"mova_num_experts": 8}
    with pytest.raises(
        ValueError, match=r"freekv cannot serve .* on a CPU: its values are mixtures of 8 experts"
    ):
        configure(model)
    configure(model | {"mova_num_experts": 0})


STORE = {"kv_retrieval": {"home": "disk", "store": "/tmp/kvs"}}
TRANSFER = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
ENGINES = {
    "fp8 cache": (
        {"kv_cache_dtype": "fp8"},
        "freekv does not support a KV cache in fp8 with a model in torch.bfloat16; use "
        "--kv-cache-dtype bfloat16, which overrides the checkpoint's kv_cache_scheme. On CPUs "
        "kv_retrieval.home=disk with kv_retrieval.codec=k8v4 has fewer bits: 8 for keys, and 4 "
        "for values.",
    ),
    "cache of no name": (
        {"kv_cache_dtype": "fp8", "dtype": "float32"},
        "freekv does not support a KV cache in fp8 with a model in torch.float32; use "
        "--kv-cache-dtype auto, or if the checkpoint has a kv_cache_scheme --dtype bfloat16 and "
        "--kv-cache-dtype bfloat16. On CPUs *",
    ),
    "prompts of layers that share": (
        {"kv_sharing_fast_prefill": True},
        "freekv does not support --kv-sharing-fast-prefill, *; leave it out.",
    ),
    "all layers dense": (
        {"additional_config": {"kv_retrieval": {"dense_layers": 2}}},
        "kv_retrieval.dense_layers=2 leaves freekv none of the 2 layers of *. Use less than 2.",
    ),
    "two sizes of home": (
        {
            "additional_config": {"kv_retrieval": {"home": "disk", "home_bytes": "1GiB"}},
            "num_gpu_blocks_override": 99,
        },
        "kv_retrieval.home_bytes=1073741824 and --num-gpu-blocks-override 99 both fix the size of "
        "the home; leave one out.",
    ),
    "offloading": (
        {
            "kv_offloading_size": 1,
            "additional_config": {"kv_retrieval": {"home": "disk"}},
        },
        "kv_retrieval.home=disk cannot be combined with vLLM's offloading; leave "
        "--kv-offloading-size out, or use home=device.",
    ),
    "blocks for a connector": (
        {"block_size": 128, "kv_transfer_config": TRANSFER},
        "--block-size 128 cannot be combined with a KV connector, which moves whole blocks: they "
        "have to be pages. Leave it out, or use --block-size 32.",
    ),
    "drafter": (
        {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2}},
        "freekv does not verify the drafts of 'ngram_gpu'; use one of ngram, suffix, custom_class, "
        "draft_model, eagle, mtp as the method of --speculative-config, or leave that out.",
    ),
    "drafts": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 129}},
        "num_speculative_tokens=129 of --speculative-config are more drafts than vLLM verifies in "
        "a step; use 128 or less.",
    ),
    "sources of drafts": (
        {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
            "additional_config": {"kv_retrieval": {"sources": True}},
        },
        "kv_retrieval.sources=True notes what steps of single tokens attend to, and those of "
        "--speculative-config verify several; leave one out.",
    ),
    "drafts of methods that drop tokens": (
        {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
            "additional_config": {"kv_retrieval": {"also": ["h2o"]}},
        },
        "--speculative-config verifies drafts, of which some are taken back, and h2o drops a token "
        "at each step (schedule running or sliding); set schedule=once, or leave it out.",
    ),
    "drafts of methods that drop tokens, from a file": (
        {
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
            "additional_config": {"kv_retrieval": {"also": ["snapkv"], "home": "disk"}},
        },
        "--speculative-config with home=disk verifies several tokens, of which some are taken "
        "back, and snapkv drops tokens; use methods that select pages, such as kvretrieval, or "
        "home=device, or leave it out.",
    ),
    "decode contexts": (
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
        "freekv does not support context parallelism; set --decode-context-parallel-size and "
        "--prefill-context-parallel-size to 1 and use --tensor-parallel-size instead.",
    ),
    "prefill contexts": (
        {"prefill_context_parallel_size": 2},
        "freekv does not support context parallelism; set *",
    ),
    "block size": (
        {"block_size": 96, "additional_config": {"kv_retrieval": {"page_size": 64}}},
        "--block-size 96 must be a multiple of kv_retrieval.page_size=64; use 128.",
    ),
    "blocks smaller than pages": (
        {"block_size": 128, "additional_config": {"kv_retrieval": {"page_size": 256}}},
        "--block-size 128 must be a multiple of kv_retrieval.page_size=256; use 256.",
    ),
    "worker": (
        {"worker_cls": "somewhere.Worker"},
        "worker_cls='somewhere.Worker' cannot be combined with attention backend freekv, which "
        "brings its own worker; leave --worker-cls out.",
    ),
    "scheduler": (
        {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
        "scheduler_cls='vllm.v1.core.sched.scheduler.Scheduler' cannot be combined with attention "
        "backend freekv, which brings its own scheduler; leave --scheduler-cls out, or derive it "
        "from vllm_kvretrieval.engine.scheduler.RetrievalScheduler.",
    ),
    "connector": (
        {
            "kv_transfer_config": TRANSFER,
            "additional_config": {"kv_retrieval": {"home": "disk"}},
        },
        "kv_retrieval.home=disk cannot be combined with the KV connector ExampleConnector; "
        "leave --kv-transfer-config out, or use home=device.",
    ),
    "a store of an unknown home": (
        {"additional_config": {"kv_retrieval": {"home": "auto", "store": "/tmp/kvs"}}},
        "kv_retrieval.store='/tmp/kvs' is another one for each home, and home=auto may be either; "
        "use home=disk or home=device, or leave it out.",
    ),
    "a store and a connector": (
        {
            "kv_transfer_config": TRANSFER,
            "additional_config": {"kv_retrieval": {"store": "/tmp/kvs"}},
        },
        "kv_retrieval.store='/tmp/kvs' needs the place of a KV connector, of which vLLM has one; "
        "leave out --kv-transfer-config, or the store.",
    ),
    "a store and another place": (
        {
            "additional_config": {
                "kv_retrieval": {"home": "disk", "store": "/tmp/kvs", "home_path": "/tmp"}
            }
        },
        "kv_retrieval.home_path='/tmp' has no effect with store='/tmp/kvs', where the file of the "
        "home is; leave it out.",
    ),
    "a store nowhere": (
        {"additional_config": {"kv_retrieval": {"home": "disk", "store": "/nowhere/kv"}}},
        "kv_retrieval.store='/nowhere/kv' cannot be made: there is no directory above it.",
    ),
    "a store without prefixes": (
        {"enable_prefix_caching": False, "additional_config": STORE},
        "kv_retrieval.store='/tmp/kvs' is found through the prefix cache; leave "
        "--no-enable-prefix-caching out.",
    ),
    "a store with hashes of one process": (
        {"prefix_caching_hash_algo": "xxhash", "additional_config": STORE},
        "kv_retrieval.store='/tmp/kvs' needs hashes that mean the same in every run; use "
        "--prefix-caching-hash-algo sha256_cbor, or leave the option out.",
    ),
    "a store of two engines": (
        {"data_parallel_size": 2, "additional_config": STORE},
        "kv_retrieval.store='/tmp/kvs' is the store of one engine, whose workers have all layers; "
        "leave out --pipeline-parallel-size and --data-parallel-size, or the store.",
    ),
    "an age without a store": (
        {"additional_config": {"kv_retrieval": {"home": "disk", "store_days": 3}}},
        "kv_retrieval.store_days=3 has no effect without store; leave it out.",
    ),
    "an age of a store": (
        {"additional_config": {"kv_retrieval": {**STORE["kv_retrieval"], "store_days": 0}}},
        "kv_retrieval.store_days=0 must be a number of days above 0, up to 36500, e.g. 30.",
    ),
    "steps with less room than a chunk of a prompt": (
        {
            "attention_backend": "kvretrieval",
            "max_num_seqs": 8,
            "max_num_scheduled_tokens": 500,
            "additional_config": {"kv_retrieval": {"prefill_budget": 1024, "prefill_chunk": 512}},
        },
        "prompts in chunks of 512 tokens, and steps have 500. Raise --max-num-batched-tokens *520",
    ),
    "less of a prompt in a step than a chunk": (
        {
            "attention_backend": "kvretrieval",
            "long_prefill_token_threshold": 256,
            "additional_config": {"kv_retrieval": {"prefill_budget": 1024, "prefill_chunk": 512}},
        },
        "512 tokens, and --long-prefill-token-threshold 256 gives *Raise it to 512 or more",
    ),
    "two methods": (
        {
            "attention_backend": None,
            "attention_config": {
                "backend": "FREEKV",
                "backend_per_kind": {"sliding_window": "STREAMINGLLM"},
            },
        },
        "attention backends freekv, streamingllm cannot run in one engine; choose one.",
    ),
}


def pattern(message: str) -> str:
    """A regular expression for ``message``, in which * stands for anything."""
    return re.escape(message).replace(r"\*", ".*")


@pytest.mark.parametrize(("options", "message"), ENGINES.values(), ids=ENGINES.keys())
def test_engines(configure, options, message):
    with pytest.raises(ValueError, match=pattern(message)):
        configure(LLAMA, **options)


def test_drafts_with_the_other_model_runner(configure, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="V1 model runner, not with V2; set VLLM_USE_V2"):
        configure(LLAMA, speculative_config=drafts)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    configure(LLAMA, speculative_config=drafts)


def test_drafts_of_models_with_states():
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(method="ngram"),
        num_speculative_tokens=2,
        use_v2_model_runner=False,
        model_config=SimpleNamespace(is_hybrid=True, model="jamba"),
    )
    with pytest.raises(RetrievalConfigError, match="the states of jamba would keep what these"):
        check_speculation(config, RetrievalConfig(), "vec")


def test_hashes_of_a_store(configure):
    """vLLM's default depends on which equal texts Python holds once; a store gets another."""
    assert configure(LLAMA).cache_config.prefix_caching_hash_algo == "sha256"
    stored = configure(LLAMA, additional_config=STORE)
    assert stored.cache_config.prefix_caching_hash_algo == "sha256_cbor"


def test_checkpoints_that_ask_for_a_quantised_cache(configure):
    """The remedy is one: with it the engine is accepted, and so is every layer."""
    quantised = {
        "quant_method": "modelopt",
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    }
    model = LLAMA | {"quantization_config": quantised}
    for automatic in ({}, {"kv_cache_dtype": "auto"}):
        with pytest.raises(ValueError, match=r"KV cache in fp8\S* .* --kv-cache-dtype bfloat16,"):
            configure(model, **automatic)
    config = configure(model, kv_cache_dtype="bfloat16")
    layer = AttentionSelectorConfig(64, torch.bfloat16, "fp8", None)  # as vLLM makes it of "auto"
    with pytest.raises(
        RetrievalConfigError, match=r"KV cache in fp8 .* --kv-cache-dtype bfloat16,"
    ):
        check_layer(layer)
    check_layer(layer._replace(kv_cache_dtype=config.cache_config.cache_dtype))


def test_a_cache_of_another_type(configure):
    """vLLM 0.33 says it before we are asked."""
    vllms = 'kv_cache_dtype="float16" is incompatible with dtype="bfloat16"'
    ours = "freekv does not support a KV cache in float16 with a model in torch.bfloat16; use"
    with pytest.raises(ValueError, match=f"{vllms}|{ours}"):
        configure(LLAMA, kv_cache_dtype="float16")


def test_steps_come_one_after_the_other(configure):
    """vLLM's CPU platform sees to it; should that change, nothing goes wrong silently."""
    config = configure(LLAMA, async_scheduling=True)
    assert config.scheduler_config.async_scheduling is False
    config.scheduler_config.async_scheduling = True
    retrieval = RetrievalConfig.from_vllm(config)
    assert retrieval is not None
    with pytest.raises(RetrievalConfigError, match="one step after the other; set --no-async"):
        refusals.check_engine(config, retrieval)


def test_blocks_are_pages_where_a_connector_moves_them(configure):
    """Connectors count in vLLM's blocks, where the cache that they are shown has our pages."""
    for options in ({"block_size": 32}, {}):
        assert (
            configure(LLAMA, kv_transfer_config=TRANSFER, **options).cache_config.block_size == 32
        )
    assert configure(LLAMA).cache_config.block_size != 32


def test_instances_that_exchange_kv_by_tokens_have_to_say_so(configure):
    """Others' blocks may be laid out otherwise, and nobody would notice."""
    options: dict[str, Any] = {"attention_backend": "fier"}
    options["additional_config"] = {"kv_retrieval": {"dense_layers": 1}}
    configure(LLAMA, **options)
    for extra in ({}, {"kv_retrieval_layout": "vec"}):
        said = replace(TRANSFER, kv_connector_extra_config=extra)
        with pytest.raises(ValueError, match="ExampleConnector may bring them from instances that"):
            configure(LLAMA, kv_transfer_config=said, **options)
    said = replace(TRANSFER, kv_connector_extra_config={"kv_retrieval_layout": "rows"})
    configure(LLAMA, kv_transfer_config=said, **options)
    own = KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both")
    configure(LLAMA, kv_transfer_config=own, **options)


def nixl(role, **extra):
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra}


def test_nixl_exchanges_only_with_instances_that_read_alike(configure):
    """Where vLLM's check at the handshake is off, stock vLLM packs our blocks once more, and nobody
    packs those of a GPU for us."""
    refused = pattern(
        "freekv cannot send KV by NixlConnector to instances of vLLM without retrieval: *set "
        'kv_role to kv_consumer (got *"kv_connector_extra_config": {"kv_retrieval_consumers": '
        '"kvretrieval"}; got *'
    )
    alike = {"enforce_handshake_compat": False, "kv_retrieval_producers": "cpu"}
    served = nixl("kv_consumer", **alike), nixl("kv_both", kv_retrieval_consumers="kvretrieval")
    for transfer in served:
        configure(LLAMA, kv_transfer_config=KVTransferConfig(**transfer))
    for transfer in nixl("kv_producer"), nixl("kv_both", kv_retrieval_consumers=True):
        held = nixl("kv_both", connectors=[served[1], transfer])
        for given in transfer, held | {"kv_connector": "MultiConnector"}:
            with pytest.raises(ValueError, match=refused):
                configure(LLAMA, kv_transfer_config=KVTransferConfig(**given))
    unchecked = nixl("kv_consumer", enforce_handshake_compat=False)
    with pytest.raises(ValueError, match=pattern('{"kv_retrieval_producers": "cpu"}; got None')):
        configure(LLAMA, kv_transfer_config=KVTransferConfig(**unchecked))


SHARING: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline of unknown layers": (
        {"pipeline_parallel_size": 2, "hf_overrides": {"sliding_window": 64}},
        "--pipeline-parallel-size 2 * needs a configuration that says which layers have full "
        "attention, and omnikv lets layers share a selection; use another method, or *",
    ),
    "connector": (
        {"kv_transfer_config": TRANSFER},
        "omnikv keeps keys and values of its retrieval layers token by token, *",
    ),
    "connector and sparse prefill": (
        {
            "kv_transfer_config": KVTransferConfig(
                kv_connector="DecodeBenchConnector", kv_role="kv_both"
            ),
            "additional_config": {"kv_retrieval": {"filters": [0], "prefill_budget": 1024}},
        },
        "kv_retrieval.prefill_budget=1024 cannot be combined with a KV connector: *Leave one out.",
    ),
    "unknown model": (
        {"additional_config": {}},
        "the filter layers of * are not known (known: *). Measure them by *calibrate MODEL TEXT*",
    ),
    "no layers": (
        {"additional_config": {"kv_retrieval": {"filters": [6]}}},
        "filters=[6]: no layer would follow layer 6*Layers with full attention: 0 to 7.",
    ),
}


@pytest.mark.parametrize(("options", "message"), SHARING.values(), ids=SHARING.keys())
def test_layers_that_share_a_selection(configure, options, message):
    model = LLAMA | {"num_hidden_layers": 8}
    served: dict[str, Any] = {
        "attention_backend": "omnikv",
        "additional_config": {"kv_retrieval": {"filters": [1, 4]}},
    }
    configure(model, **served)
    with pytest.raises(ValueError, match=pattern(message)):
        configure(model, **served | options)


@pytest.mark.model
def test_a_real_model_is_refused_alike(configure):
    with pytest.raises(ValueError, match=r"freekv serves text generation; .*SmolLM2"):
        configure(checkpoint("SmolLM2-135M-Instruct"), runner="pooling")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}


def compressed(**weights):
    """The configuration of a checkpoint of compressed-tensors whose tokens have 16 bits."""
    given = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": given | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }


@pytest.mark.parametrize(
    ("weights", "name"),
    [
        (GPTQ, "auto_gptq"),
        (GPTQ | {"desc_act": True, "group_size": -1}, "auto_gptq"),
        (GPTQ | {"desc_act": True}, "kvr_gptq"),
        (GPTQ | {"sym": False, "bits": 8}, "kvr_gptq"),
        (compressed(), "compressed-tensors"),
        (compressed(num_bits=8, strategy="channel", group_size=None), "compressed-tensors"),
    ],
    ids=str,
)
def test_readers_of_quantised_weights(configure, weights, name):
    """What vLLM reads it reads; of GPTQ the rest is ours."""
    for backend in ("freekv", None):
        config = configure(LLAMA | {"quantization_config": weights}, attention_backend=backend)
        assert config.model_config.quantization == name


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (compressed(num_bits=3), "weights of 3 bits in groups of 32 inputs are not served on this"),
        (compressed(num_bits=8, group_size=16), "weights of 8 bits in groups of 16 inputs are not"),
        (compressed(group_size=16), "weights of 4 bits in groups of 16 inputs are not"),
        (GPTQ | {"group_size": 40}, "weights of 4 bits in groups of 40 inputs are not"),
    ],
    ids=str,
)
def test_quantised_weights_that_nothing_serves(configure, monkeypatch, weights, message):
    """A CPU with AVX2, where vLLM accepts them and has no product."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    model = LLAMA | {"quantization_config": weights}
    with pytest.raises(ValueError, match=f"{message} .*--quantization kvr_int8 or kvr_int4"):
        configure(model)
    configure(model, attention_backend=None)  # stock vLLM is not changed


def test_weights_that_are_quantised_already(configure):
    """VLLM refuses to read a checkpoint as another kind of weights."""
    for weights in (GPTQ, GPTQ | {"desc_act": True}, compressed()):
        with pytest.raises(ValueError, match="does not match the quantization method"):
            configure(LLAMA | {"quantization_config": weights}, quantization="kvr_int8")
    configure(LLAMA | {"quantization_config": GPTQ | {"sym": False}}, quantization="gptq")


def test_files_of_gguf(configure):
    """vLLM takes the option, and has no loader for it."""
    with pytest.raises(ValueError, match=r"reads no GGUF files; .*kvr_int8"):
        configure(LLAMA, load_format="gguf")


@pytest.mark.parametrize("method", ["kvr_int8", "kvr_int4"])
def test_experts_are_not_rounded(configure, method):
    """With or without retrieval; a model without experts is."""
    for backend in ("freekv", None):
        assert configure(LLAMA, quantization=method, attention_backend=backend).quant_config
        with pytest.raises(ValueError, match=f"{method} is not served for mixtures of experts"):
            configure(
                LLAMA | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]},
                quantization=method,
                attention_backend=backend,
            )
