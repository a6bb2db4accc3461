"""Disaggregated prefill by NIXL over TCP: stock vLLM reads prompts, and retrieval decodes.

NIXL is no part of the environment, because its wheels are large: ``pip install nixl nixl-cu12``.
"""

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.inputs import TokensPrompt

from tests.engine import Answer, Request, alone, assert_same, engine, prompt, random_llama

pytest.importorskip("nixl", reason="NIXL is not installed")
pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 28,
}
RETRIEVAL: dict[str, Any] = {"budget": 128, "sink": 32, "window": 32, "also": ["quest"]}
DOCUMENT = prompt(1200)


def transfer(role: str, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role=role,
        kv_buffer_device="cpu",
        kv_connector_extra_config=extra,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_llama(tmp_path_factory.mktemp("model"), 4, 4)


@pytest.fixture(scope="module")
def environment():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("UCX_TLS", "tcp")
        environment.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        yield environment


@pytest.fixture(scope="module")
def prefill(model, environment):
    """Stock vLLM, which sends what it has read."""
    environment.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5717")
    sends = transfer("kv_producer")
    with engine(model, block_size=32, kv_transfer_config=sends, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def decode(model, environment, prefill):
    environment.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5727")
    receives = transfer("kv_consumer", enforce_handshake_compat=False)
    with engine(
        model,
        attention_backend="kvretrieval",
        additional_config={"kv_retrieval": RETRIEVAL},
        kv_transfer_config=receives,
        worker_extension_cls="tests.home_worker.HomeWorker",
        **OPTIONS,
    ) as llm:
        yield llm


def read(llm, tokens):
    """Let the prompt be read; where its keys and values are to be fetched."""
    asked = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, extra_args=asked)
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=tokens)], params, use_tqdm=False)
    return output.kv_transfer_params


def fetch(llm, tokens, where, count, options):
    """Generate from a prompt that another instance has read: the output and its log-probs."""
    asked = {"kv_transfer_params": where, "kv_retrieval": options}
    params = SamplingParams(
        max_tokens=count,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        extra_args=asked,
    )
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=tokens)], params, use_tqdm=False)
    return output


@pytest.mark.parametrize(
    "options",
    [{"exact": True}, {"correction_threshold": 1.0}, {"method": "quest"}],
    ids=["exact", "kvretrieval", "quest"],
)
def test_what_another_instance_has_read_is_retrieved_from(prefill, decode, options):
    local = alone(decode, Request(DOCUMENT, 12, options))
    decode.reset_prefix_cache()
    decode.collective_rpc("record_loads")
    output = fetch(decode, DOCUMENT, read(prefill, DOCUMENT), 12, options)
    assert output.num_cached_tokens >= 1184
    (indexed,) = decode.collective_rpc("loaded_pages")
    assert indexed >= 1184 // 32, "the index of what came is built here"
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    logprobs = [
        places[token].logprob for places, token in zip(completion.logprobs, tokens, strict=True)
    ]
    assert_same(Answer(tokens, logprobs), local, tolerance=1e-4)
