"""Checkpoints, engines and texts for tests."""

import gc
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from vllm import LLM, RequestOutput, SamplingParams
from vllm.inputs import EmbedsPrompt, TokensPrompt
from vllm.lora.request import LoRARequest

from benchmarks.texts import excerpt
from tests.support import workers
from vllm_kvretrieval.retrieval.presets import preset_names
from vllm_kvretrieval.upstream.defaults import all_cores, slow_bfloat16

DTYPE = "float32" if slow_bfloat16() else "auto"
"""In which engines compute unless a test says otherwise: vLLM's kernels are fast in it."""

ROUNDING = 0.05 if slow_bfloat16() else 1e-4
"""Tolerance of log-probs. With AVX2 only, products of a token depend on the tokens beside it, so a
prompt that is read in other parts differs, and a rounding may decide which of two pages is read."""

MODELS = Path(__file__).resolve().parents[2] / "models"
SHUTDOWN_S = 30


def checkpoint(name: str) -> str:
    """Path of a checkpoint; fails the test where ``make models`` has not been run."""
    path = MODELS / name
    if not (path / "config.json").exists():
        pytest.fail(f"{path} is missing: run make models")
    return str(path)


def shortened(path: Path, name: str, layers: int) -> str:
    """The first layers of a checkpoint, with its own tokenizer and weights, saved at ``path``.

    For tests of what happens to requests: keys, queries and texts are real, and a step takes a
    fraction of the time. What comes out is no language.
    """
    whole = Path(checkpoint(name))
    config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": layers}
    path.mkdir(exist_ok=True)
    for file in (*whole.glob("*token*.json"), *whole.glob("*.jinja")):
        shutil.copy(file, path)
    (path / "config.json").write_text(json.dumps(config))
    with safe_open(whole / "model.safetensors", "pt") as weights:
        names = weights.keys()
        kept = [n for n in names if int((re.findall(r"layers\.(\d+)", n) or [0])[0]) < layers]
        save_file({n: weights.get_tensor(n) for n in kept}, path / "model.safetensors")
    return str(path)


def random_llama(path: Path, layers: int, kv_heads: int) -> str:
    """A small Llama, saved at ``path``. Its weights are large enough for attention to be sharp."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def model_of(make: Callable[..., str], *args: Any) -> Any:
    """The fixture of a module's model, which ``make`` saves."""

    @pytest.fixture(scope="module")
    def model(tmp_path_factory: pytest.TempPathFactory) -> str:
        return make(tmp_path_factory.mktemp("model"), *args)

    return model


def random_mixture(path: Path) -> str:
    """A small mixture of experts with random weights, and a tokenizer, saved at ``path``."""
    torch.manual_seed(0)
    whole = Path(checkpoint("SmolLM2-135M-Instruct"))
    config = MixtralConfig(
        vocab_size=json.loads((whole / "config.json").read_text())["vocab_size"],
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_local_experts=4,
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    MixtralForCausalLM(config).save_pretrained(path)
    for file in (*whole.glob("*token*.json"), *whole.glob("*.jinja")):
        shutil.copy(file, path)
    return str(path)


def processes() -> list[psutil.Process]:
    """All processes below this one, but for Python's resource tracker and the server of workers,
    which stay.
    """
    return [p for p in psutil.Process().children(recursive=True) if not _stays(p)]


def _stays(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it may end meanwhile
        tracks = "multiprocessing.resource_tracker" in " ".join(process.cmdline())
        return tracks or workers.is_server(process.pid)
    return False


@contextmanager
def engine(model: str, **options: Any) -> Iterator[LLM]:
    """A vLLM engine whose processes are gone at the end, so that the next one has the machine.

    It computes on all cores, in float32 where bfloat16 is slow, its cache holds 1 GiB, and vLLM's
    kernel attends to whole contexts, so that answers are stock's bit by bit, unless ``options`` say
    otherwise; ``collective_rpc`` takes functions. The scheduler runs in this
    process and the worker in another, so that a step is a step, and what is handed in between two
    steps arrives between them.
    """
    before = set(processes())
    defaults = {
        "dtype": DTYPE,
        "kv_cache_memory_bytes": 1 << 30,
        "disable_log_stats": True,
        "distributed_executor_backend": "mp",
    }
    if options.get("attention_backend") in preset_names():
        additional = options.get("additional_config", {})
        retrieval = {"attention": "vllm"} | additional.get("kv_retrieval", {})
        options |= {"additional_config": additional | {"kv_retrieval": retrieval}}
    # The server of workers has imported vLLM's CPU worker, which patches torch.cuda.
    forked = nullcontext() if torch.cuda.is_available() else workers.forked()
    with pytest.MonkeyPatch.context() as environment, forked:
        environment.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        parallel = ("tensor_parallel_size", "pipeline_parallel_size")
        for name, value in all_cores(math.prod(options.get(p, 1) for p in parallel)).items():
            environment.setenv(name, value)
        environment.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        if options.get("enforce_eager"):  # one function of vLLM's sampler is compiled all the same
            environment.setenv("TORCHDYNAMO_DISABLE", "1")
        workers.freeze()
        environment.setattr("vllm.v1.engine.core.freeze_gc_heap", lambda: None)
        # Nor do engines here render chats, for which vLLM copies its tokenizer, once per thread.
        environment.setattr("vllm.renderers.hf.maybe_make_thread_pool", lambda *_: None)
        environment.setattr("vllm.renderers.base.BaseRenderer.warmup", lambda *_: None)
        llm = LLM(model=model, **defaults | options)
        try:
            yield llm
        finally:
            started = set(processes()) - before
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            _, left = psutil.wait_procs(started, timeout=SHUTDOWN_S)
            for process in left:
                process.kill()
    assert not left, f"still running after shutdown: {left}"


@dataclass
class Answer:
    """What one request got.

    Attributes:
        tokens: generated token ids.
        logprobs: logarithms of the tokens' probabilities.
        cached: prompt tokens that came from the prefix cache.
        steps: engine steps, as counted by :func:`drive`, at which a token came out.
        choices: log-probs at each place, by token: of the generated one, and of the likeliest ones
            that the request asks for.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0
    steps: list[int] = field(default_factory=list)
    choices: list[dict[int, float]] = field(default_factory=list)


@dataclass
class Request:
    """One request for :func:`drive`; greedy, and of a fixed number of tokens.

    Attributes:
        prompt: token ids.
        tokens: how many to generate.
        options: its ``kv_retrieval`` options; None for an engine without retrieval.
        arrives: step before which it is handed in.
        aborts: step before which it is aborted.
        cache: whether it may read the prefix cache.
        lora: the adapter that it asks for.
        images: for which there are places in its prompt.
        embeddings: of its prompt, ``[tokens, hidden]``, handed in instead of the ids.
        likeliest: of how many tokens at each place it gets the log-probs, beside its own.
    """

    prompt: list[int]
    tokens: int
    options: dict[str, Any] | None = None
    arrives: int = 0
    aborts: int | None = None
    cache: bool = False
    lora: LoRARequest | None = None
    images: Sequence[Any] = ()
    embeddings: torch.Tensor | None = None
    likeliest: int = 0

    def handed_in(self) -> TokensPrompt | EmbedsPrompt:
        """Its prompt, as vLLM takes it."""
        if self.embeddings is not None:
            return EmbedsPrompt(prompt_embeds=self.embeddings)
        prompt = TokensPrompt(prompt_token_ids=self.prompt)
        if self.images:
            prompt["multi_modal_data"] = {"image": list(self.images)}
        return prompt

    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=0,
            max_tokens=self.tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=self.likeliest,
            skip_reading_prefix_cache=not self.cache,
            extra_args=None if self.options is None else {"kv_retrieval": self.options},
        )


def drive(llm: LLM, requests: Sequence[Request]) -> list[Answer]:
    """Step the engine until all of ``requests`` are done; the answers in their order."""
    core = llm.llm_engine
    answers = [Answer() for _ in requests]
    ids: dict[int, str] = {}
    last = max(request.arrives for request in requests)
    step = 0
    while step <= last or core.has_unfinished_requests():
        for i, request in enumerate(requests):
            if request.arrives == step:
                ids[i] = core.add_request(
                    str(i), request.handed_in(), request.params(), lora_request=request.lora
                )
            if request.aborts == step:
                core.abort_request([ids[i]], internal=True)
        for output in core.step():
            assert isinstance(output, RequestOutput)
            answer, completion = answers[int(output.request_id)], output.outputs[0]
            assert completion.logprobs is not None
            new = completion.token_ids[len(answer.tokens) :]
            places = completion.logprobs[len(answer.tokens) :]
            answer.choices += [{t: one.logprob for t, one in place.items()} for place in places]
            answer.logprobs += [
                place[token].logprob for token, place in zip(new, places, strict=True)
            ]
            answer.tokens += new
            answer.steps += [step] * len(new)
            answer.cached = output.num_cached_tokens or 0
        step += 1
    return answers


def alone(llm: LLM, request: Request) -> Answer:
    """The answer to a request that has the engine for itself."""
    asked = Request(request.prompt, request.tokens, request.options, likeliest=request.likeliest)
    return drive(llm, [asked])[0]


def preemptions(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that the scheduler preempts from now on, by id; grows as it does."""
    preempted: list[str] = []
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def record(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", record)
    return preempted


def by(method: str, **options: Any) -> dict[str, Any]:
    """A request's options, by which a method answers it."""
    return {"method": method, **options}


def difference(one: Answer, other: Answer) -> float:
    """The largest one between the log-probs of two answers."""
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def assert_resumed(
    llm: LLM, request: Request, answer: Answer, expected: Answer, tolerance: float
) -> None:
    """An interrupted request goes on as one whose prompt is all that it had by then.

    Args:
        llm: The engine, with nothing to do.
        request: Which was preempted once, and had to wait.
        answer: What it got.
        expected: What it gets by itself.
        tolerance: Of log-probs.
    """
    pauses = [b - a for a, b in pairwise(answer.steps)]
    assert max(pauses) > 5
    done = pauses.index(max(pauses)) + 1
    assert answer.tokens[:done] == expected.tokens[:done]
    prompt = request.prompt + answer.tokens[:done]
    again = alone(llm, Request(prompt, request.tokens - done, request.options))
    assert answer.tokens[done:] == again.tokens
    assert answer.logprobs[done:] == pytest.approx(again.logprobs, abs=tolerance)


def assert_same(answer: Answer, expected: Answer, tolerance: float, tipped: int = 0) -> None:
    """Equal tokens, and log-probs of them that are equal to rounding.

    In as many steps as ``tipped`` a rounding may have decided between pages of equal worth.
    """
    assert answer.tokens == expected.tokens
    apart = [abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True)]
    assert sum(not difference <= tolerance for difference in apart) <= tipped, apart


def prompt(length: int, seed: int | None = None) -> list[int]:
    """Token ids without meaning, of a vocabulary of 512; without a seed, the length is the seed."""
    generator = torch.Generator().manual_seed(length if seed is None else seed)
    ids: list[int] = torch.randint(512, (length,), generator=generator).tolist()
    return ids


def likely(model: Any, asked: list[int], answer: Answer) -> Answer:
    """The likeliest token at each place of an answer, and the log-prob of the token there.

    Args:
        model: A causal model of transformers.
        asked: The prompt.
        answer: What followed.
    """
    ids, last = torch.tensor([asked + answer.tokens]), len(answer.tokens) + 1
    with torch.no_grad():
        logits = model(ids, logits_to_keep=last).logits[0, :-1]
    logprobs = logits.log_softmax(-1)
    places = torch.tensor(answer.tokens)[:, None]
    return Answer(logits.argmax(-1).tolist(), logprobs.gather(1, places)[:, 0].tolist())


def attended_share(llm: LLM, length: int, options: dict[str, Any]) -> float:
    """The share that a prompt's queries attend to of all before them, as the worker counts it."""

    def counts() -> Any:
        return llm.collective_rpc(lambda worker: worker.requests.counts())[0]

    before = counts()
    alone(llm, Request(novel(llm, length, 300), 2, options))
    pairs, attended = (b - a for a, b in zip(before[-2:], counts()[-2:], strict=True))
    assert pairs == length * (length + 1) // 2
    return float(attended / pairs)


def novel(llm: LLM, tokens: int, paragraph: int) -> list[int]:
    """Token ids of the novel from a paragraph on."""
    ids: list[int] = llm.get_tokenizer().encode(excerpt(6 * tokens, paragraph))
    return ids[:tokens]
