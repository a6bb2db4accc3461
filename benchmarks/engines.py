"""Whole vLLM engines in child processes, of which one at a time is awake.

Two active vLLM processes on the same cores slow each other down several-fold, yet starting
an engine anew for every measurement would throw its prefix cache away. So every engine lives
in a process group of its own that is frozen (SIGSTOP) while another one is measured:

    with EngineProcess(spec_a, log_a) as a, EngineProcess(spec_b, log_b) as b:
        a.pause()
        b.generate(prompts, max_tokens=16)
        b.pause()
        a.resume()
        a.generate(prompts, max_tokens=16)

An engine is idle whenever it is frozen, so none of vLLM's time limits runs meanwhile.
The group stays in the parent's session: should the parent be killed outright, the kernel
sends SIGHUP and SIGCONT to the orphaned, stopped group, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from vllm_kvretrieval.upstream.defaults import all_cores

POLL_S = 1.0
SHUTDOWN_S = 15.0
SETTLE_S = 0.05
LOG_TAIL_LINES = 40

LONG_STEPS = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600"}
"""Environment of an engine: a chunk of a long prompt may exceed vLLM's five minutes."""

AVX2 = {
    "PYTHONPATH": str(ROOT / "benchmarks" / "avx2"),
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}
"""Environment of an engine as on a machine without AVX-512: vLLM's library and what it compiles,
oneDNN, PyTorch, and our kernels."""

Progress = Callable[[float], None]


class EngineError(RuntimeError):
    """An engine process died or could not do what it was asked to."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine: a name, `vllm.LLM`'s arguments, and the environment it needs."""

    name: str
    llm: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """The times of one batch as the engine's caller sees them, in seconds.

    first_token: per request, from handing in the batch to its first token.
    steps: lengths of the engine steps in which every request of the batch decoded one token.
    tokens: per request.
    """

    first_token: list[float]
    steps: list[float]
    tokens: list[list[int]]


@dataclass(frozen=True)
class Answers:
    """The tokens of a batch, and the time that they took.

    tokens: per request.
    counted: how many of them came behind the step in which the last request got its first.
    seconds: the time of these.
    steps: how many steps they took.
    """

    tokens: list[list[int]]
    counted: int
    seconds: float
    steps: int


class EngineProcess:
    """An `LLM` in a process group of its own; use it as a context manager.

    Its output is appended to `log`. Raises `EngineError`, with the end of the log, where the engine
    fails.
    """

    def __init__(self, spec: EngineSpec, log: Path, progress: Progress | None = None) -> None:
        self.name = spec.name
        self._log = log
        self._progress = progress
        self._connection, far_end = Pipe()
        log.parent.mkdir(parents=True, exist_ok=True)
        paths = spec.env.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")
        path = os.pathsep.join(filter(None, paths))
        with log.open("a") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({far_end.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | all_cores() | spec.env | {"PYTHONPATH": path},
                pass_fds=[far_end.fileno()],
                preexec_fn=os.setpgrp,
            )
        far_end.close()
        try:
            self.info: dict[str, Any] = self._call("start", spec)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pause(self) -> None:
        """Freeze the whole engine; it takes no processor time until `resume`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen engine run again; harmless where it is not frozen."""
        os.killpg(self._process.pid, signal.SIGCONT)
        time.sleep(SETTLE_S)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        extra_args: dict[str, Any] | None = None,
        fresh: bool = False,
    ) -> Timing:
        """Decode exactly `max_tokens` tokens for each of `prompts`, handed in at once, greedily.

        fresh: whether all of the prompts is computed, whatever the prefix cache has.
        """
        return self._call("generate", prompts, max_tokens, extra_args, fresh)

    def answer(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        extra_args: dict[str, Any] | None = None,
        temperature: float = 0.0,
    ) -> Answers:
        """Generate exactly `max_tokens` tokens for each of `prompts`, handed in at once, as many at
        a step as it may be."""
        return self._call("answer", prompts, max_tokens, extra_args, temperature)

    def collective_rpc(self, method: str, *args: Any) -> Any:
        """Call `method` of the first worker (see `LLM.collective_rpc`)."""
        return self._call("collective_rpc", method, args)

    def close(self) -> None:
        """End the engine, frozen or not, and every process that it started."""
        with contextlib.suppress(OSError, ValueError):
            self.resume()
            self._connection.send(None)
        deadline = time.monotonic() + SHUTDOWN_S
        while self._group_lives() and time.monotonic() < deadline:
            time.sleep(SETTLE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _group_lives(self) -> bool:
        """Whether any process of the engine still runs."""
        self._process.poll()
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _call(self, method: str, *args: Any) -> Any:
        with contextlib.suppress(OSError):  # a dead child is reported below
            self._connection.send((method, args))
        return self._receive()

    def _receive(self) -> Any:
        """The child's next answer; calls `progress` with the seconds waited so far."""
        start = time.monotonic()
        while not self._connection.poll(POLL_S):
            if self._progress is not None:
                self._progress(time.monotonic() - start)
            if self._process.poll() is not None:
                break
        try:
            ok, value = self._connection.recv()
        except (EOFError, OSError):
            ok, value = False, "its process ended unexpectedly"
        if not ok:
            tail = _tail(self._log)
            raise EngineError(f"engine {self.name}: {value}\nThe end of {self._log}:\n{tail}")
        return value


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-LOG_TAIL_LINES:])


def serve(handle: int) -> None:
    """The child's main function: answer calls from the parent until it says None or is gone.

    handle: file descriptor of this end of the connection.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection, engine = Connection(handle), Engine()
    try:
        while (call := connection.recv()) is not None:
            method, args = call
            connection.send((True, getattr(engine, method)(*args)))
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        connection.send((False, f"{type(error).__name__}: {error}"))
    finally:
        engine.close()


class Engine:
    """The child's side: one `LLM`, driven step by step as a server's loop does."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._serial = 0

    def start(self, spec: EngineSpec) -> dict[str, Any]:
        """Load the model; returns the settings of vLLM that measurements depend on."""
        from vllm import LLM

        self._llm = LLM(**spec.llm)
        config = self._llm.llm_engine.vllm_config
        return {
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "num_blocks": config.cache_config.num_gpu_blocks,
            "compilation_mode": str(config.compilation_config.mode),
            "dtype": str(config.model_config.dtype),
        }

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        extra_args: dict[str, Any] | None,
        fresh: bool,
    ) -> Timing:
        engine, first, steps = self._llm.llm_engine, dict[str, float](), list[float]()
        tokens = dict[str, list[int]]()
        start = previous = self._hand_in(
            prompts,
            temperature=0.0,
            max_tokens=max_tokens,
            extra_args=extra_args,
            skip_reading_prefix_cache=fresh,
        )
        while engine.has_unfinished_requests():
            all_decoding = len(first) == len(prompts)
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                first.setdefault(output.request_id, now - start)
                tokens.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
            if all_decoding and len(outputs) == len(prompts):
                steps.append(now - previous)
            previous = now
        names = sorted(first)
        return Timing([first[name] for name in names], steps, [tokens[name] for name in names])

    def answer(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        extra_args: dict[str, Any] | None,
        temperature: float,
    ) -> Answers:
        engine, tokens = self._llm.llm_engine, dict[str, list[int]]()
        begin, counted, steps = 0.0, 0, 0
        now = self._hand_in(
            prompts, temperature=temperature, seed=1, max_tokens=max_tokens, extra_args=extra_args
        )
        while engine.has_unfinished_requests():
            outputs = engine.step()
            steps += bool(outputs and begin)
            for output in outputs:
                new = output.outputs[0].token_ids
                tokens.setdefault(output.request_id, []).extend(new)
                counted += len(new) if begin else 0
            now = time.perf_counter()
            if not begin and len(tokens) == len(prompts):
                begin = now
        answers = [tokens[name] for name in sorted(tokens)]
        return Answers(answers, counted, now - begin, steps)

    def _hand_in(self, prompts: list[list[int]], **params: Any) -> float:
        """Hand prompts in at once: none gets a step of its own before the others arrive.

        Returns the time.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        sampling = SamplingParams(ignore_eos=True, output_kind=RequestOutputKind.DELTA, **params)
        self._serial += 1
        engine.engine_core.call_utility("pause_scheduler", "keep", False)
        now = time.perf_counter()
        for i, prompt in enumerate(prompts):
            name = f"{self._serial}-{i}"
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        engine.engine_core.call_utility("resume_scheduler")
        return now

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]

    def close(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
