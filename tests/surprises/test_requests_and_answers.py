"""Requests and answers."""

import asyncio
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm import platforms
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.chat_utils import load_chat_template
from vllm.utils import cpu_triton_utils
from vllm.v1.engine.detokenizer import check_stop_strings
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.sampler import Sampler

from tests.support import programs
from tests.surprises.rows import surprise


def finished(name, cached):
    """The outcome of a prompt of 300 tokens, of which some were cached."""
    answer = CompletionOutput(0, "a", [5], None, None, finish_reason="length")
    return RequestOutput(name, "p", [1] * 300, None, [answer], True, num_cached_tokens=cached)


@surprise(
    "entrypoints/openai/completion/serving.py",
    expected="`usage` of a request with several prompts adds up the tokens that were cached",
    happens="prompts and answers are added up; `cached_tokens` is that of the last prompt",
    remedy="one prompt a request, or the metrics",
)
def test_usage_counts_the_last_prompt():
    serving = SimpleNamespace(
        _raise_if_error=lambda *_: None,
        enable_prompt_tokens_details=True,
        enable_force_include_usage=False,
        enable_per_request_metrics=False,
        return_tokens_as_token_ids=False,
        system_fingerprint=None,
    )
    told = OpenAIServingCompletion.request_output_to_completion_response(
        serving,
        [finished("a", 256), finished("b", 0)],
        CompletionRequest(model="m", prompt=["p", "p"], max_tokens=1),
        "a", 0, "m", None, SimpleNamespace(),
    ).usage  # fmt: skip
    assert told.prompt_tokens == 600
    assert told.prompt_tokens_details.cached_tokens == 0


@surprise(
    "v1/engine/detokenizer.py",
    expected="of several stop strings the first one of the list is reported",
    happens="the one that is complete first",
    remedy="expect either in `stop_reason`",
)
def test_the_stop_that_ends_first():
    assert check_stop_strings("a\n\n", 3, ["\n\n", "\n"], False) == ("\n", 1)


@surprise(
    "v1/sample/sampler.py",
    expected="`logprob_token_ids` concerns its own request",
    happens="in steps of the V1 runner its neighbours that ask for `logprobs` lose their best "
    "tokens: "
    "they get the sampled one, and the padding of the other's list",
    remedy="do not mix the two on one server",
)
def test_token_ids_concern_the_neighbours(monkeypatch):
    logits = torch.arange(16.0).repeat(2, 1)
    asked = SimpleNamespace(max_num_logprobs=3, logprob_token_ids={0: [1]})
    ranks = "vllm.v1.sample.sampler.batched_count_greater_than"  # compiled, and of no use here
    monkeypatch.setattr(ranks, lambda logprobs, values: torch.zeros(2, dtype=torch.long))
    sampler = Sampler()
    sampler.apply_logits_processors = lambda logits, *_: logits
    sampler.sample = lambda logits, _: (logits.argmax(-1), None)
    made = sampler(logits, asked).logprobs_tensors
    assert made.logprob_token_ids[1].tolist() == [15, 0]
    assert made.logprobs[1, 1] == -float("inf")


@surprise(
    "entrypoints/anthropic/serving.py",
    expected="a client learns by `/v1/messages/count_tokens` that a chat is too long",
    happens="it gets the 400 of a request that is too long; `/tokenize` counts",
    remedy="count by `/tokenize`",
)
def test_a_chat_that_is_too_long_is_not_counted():
    refused = ErrorResponse(error=ErrorInfo(message="too long", type="BadRequestError", code=400))

    async def render(_):
        return refused

    serving = mock.Mock(render_chat_request=render)
    serving.disabled_thinking_effort_resolver.resolve_for = mock.AsyncMock()
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    count = AnthropicServingMessages.count_tokens(serving, AnthropicCountTokensRequest(**body))
    assert asyncio.run(count) is refused


@surprise(
    "renderers exceptions.py",
    expected="a `--chat-template` that is not there is a ValueError, as other options are",
    happens="it is an error of vLLM's own, which `except ValueError` does not catch; a name with a "
    "brace in it is taken for the template itself",
    remedy="catch both; look at `/tokenize` to see what a template makes",
)
def test_a_chat_template_that_is_not_there():
    with pytest.raises(VLLMValidationError) as refused:
        load_chat_template("none.jinja")
    assert not isinstance(refused.value, ValueError)
    assert load_chat_template("none{}.jinja") == "none{}.jinja"


DRAFTS = """
import numpy as np
from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

propose = _find_longest_matched_ngram_and_propose_tokens.py_func
print(*propose(np.array([1, 2, 7, 7, 1, 2, 8, 8, 1, 2]), 2, 2, 100, 2))
"""


@surprise(
    "v1/spec_decode/ngram_proposer.py",
    expected="drafts by n-grams continue the latest text that fits",
    happens="of matches of one length the earliest of the context",
    remedy="expect fewer accepted drafts in long chats",
)
def test_drafts_follow_the_earliest_match():
    # In a process of its own: beside numba, which it imports, no engine of this vLLM starts.
    ended = programs.run(DRAFTS)
    assert ended.stdout.split() == ["7", "7"], ended.stderr


@surprise(
    "utils/cpu_triton_utils.py v1/sample/rejection_sampler.py",
    expected="on CPUs drafts of requests that sample are verified by their temperature, `top_k` "
    "and `top_p`",
    happens="by numbers that nobody has written: those of the requests go into a copy",
    remedy="the plug-in repeats them itself; stock vLLM: no drafts beside temperatures above 0",
)
def test_temperatures_of_drafts_are_not_written():
    platforms.current_platform.import_kernels()
    for dtype in (torch.float32, torch.int32, torch.int64):
        written = torch.full((3,), -1, dtype=dtype)
        of_requests = torch.tensor([5, 6], dtype=dtype)
        cpu_triton_utils._expand_kernel_impl(written, of_requests, torch.tensor([1, 3]), 0, 0)
        assert written.tolist() == ([5, 6, 6] if dtype == torch.int64 else [-1] * 3)


@surprise(
    "v1/sample/ops/topk_topp_sampler.py v1/worker/gpu_model_runner.py",
    expected="with speculative decoding on CPUs `top_k` is an option like others",
    happens="without `top_p` beside it the first step without drafts ends the engine",
    remedy="the plug-in leaves such steps out; stock vLLM: `top_p` below 1 beside every `top_k`",
)
def test_top_k_of_no_drafts():
    with pytest.raises(RuntimeError, match="Expected reduction dim"):
        apply_top_k_top_p_pytorch(
            torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None, allow_cpu_sync=True
        )
