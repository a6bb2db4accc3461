"""The engines that are compared, and how each is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.engines import AVX2, LONG_STEPS
from benchmarks.models import kv_bytes_per_token, yarn_overrides
from benchmarks.peers import environment
from vllm_kvretrieval.upstream.defaults import all_cores, forked_on_all_cores

BUDGET = 1024
SLACK = 256
"""Tokens that an engine has room for beside the longest context."""
OWN, BESIDE = "kvretrieval", ("full", "freekv")
STOCK = "vLLM"


@dataclass(frozen=True)
class Sizes:
    """What an engine is started for.

    Args:
        checkpoint: The model, and its rotation to long contexts.
        short: The same weights without that rotation.
        context: Tokens of the longest context.
        saved: Folder of saved contexts.
        avx2: Whether engines are to run as on a CPU with AVX2 only.
    """

    checkpoint: Path
    short: Path
    context: int
    saved: Path
    avx2: bool

    @property
    def room(self) -> int:
        """Tokens that an engine has room for."""
        return self.context + SLACK


@dataclass(frozen=True)
class Starting:
    """How a driver is started: see `benchmarks.peers.process.Peer`."""

    command: list[str]
    arguments: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """An engine with its weights and options, in one process.

    Args:
        make: Says how it is started; ``alone`` with nothing that only other lanes need.
        lanes: Names of what is measured in it, and the methods that its requests name.
        widens: Whether a saved context can be made a longer one.
        saves: Whether it saves contexts by a call; None: by a store of its own; False: it has no
            such thing.
        longest: Tokens of its longest context, where its format of the model has a limit.
        limit: Why there is a limit.
        holds: Whether it can be held to AVX2.
        decodes: Whether tokens behind the first one are of interest: others of the same engine
            have the same.
    """

    make: Callable[[Sizes, bool], Starting]
    lanes: Mapping[str, str | None]
    widens: bool = False
    saves: bool | None = False
    longest: int | None = None
    limit: str = ""
    holds: bool = True
    decodes: bool = True


def _driver(name: str, arguments: dict[str, Any], sizes: Sizes, env: dict[str, str]) -> Starting:
    threads = len(os.sched_getaffinity(0))
    command = [str(environment.python()), "-m", f"benchmarks.peers.{name}"]
    given = {"context": sizes.room, "threads": threads} | arguments
    return Starting(command, given, env)


def _vllm(stock: bool, quantization: str | None = None) -> Callable[[Sizes, bool], Starting]:
    def make(sizes: Sizes, alone: bool) -> Starting:
        config = AutoConfig.from_pretrained(sizes.checkpoint)
        llm: dict[str, Any] = {
            "model": str(sizes.checkpoint),
            "hf_overrides": yarn_overrides(config, sizes.room),
            "max_model_len": sizes.room,
            "max_num_seqs": 1,
            "kv_cache_memory_bytes": (sizes.room + SLACK) * kv_bytes_per_token(config),
        }
        if not stock:
            options: dict[str, Any] = {"budget": BUDGET}
            if not alone:
                options["also"] = [*BESIDE]
            llm |= {"attention_backend": OWN.upper()}
            llm |= {"additional_config": {"kv_retrieval": options}}
        if quantization:
            llm["quantization"] = quantization
        env = all_cores() | {"VLLM_PLUGINS": ""} if stock else forked_on_all_cores()
        return vllm(sizes, llm, env)

    return make


def vllm(sizes: Sizes, llm: dict[str, Any], env: dict[str, str]) -> Starting:
    """A start of vLLM with these options."""
    command = [sys.executable, "-m", "benchmarks.peers.vllm_engine"]
    env = LONG_STEPS | env | (AVX2 if sizes.avx2 else {})
    return Starting(command, {"context": sizes.room, "threads": 0, "llm": llm}, env)


def stored(starting: Starting, store: Path) -> Starting:
    """A start of ours with a store, for a restart."""
    llm = dict(starting.arguments["llm"])
    options = llm["additional_config"]["kv_retrieval"] | {"home": "disk", "store": str(store)}
    llm["additional_config"] = {"kv_retrieval": options}
    llm["kv_cache_memory_bytes"] += 256 << 20
    return replace(starting, arguments={**starting.arguments, "llm": llm})


def _llama_cpp(kind: str, flash_attention: bool) -> Callable[[Sizes, bool], Starting]:
    def make(sizes: Sizes, alone: bool) -> Starting:
        given = {
            "model": str(environment.gguf(sizes.checkpoint, kind)),
            "flash_attention": flash_attention,
            "saved": str(sizes.saved),
        }
        return _driver("llama_cpp", given, sizes, {})

    return make


def _openvino(kind: str, sparse: bool) -> Callable[[Sizes, bool], Starting]:
    def make(sizes: Sizes, alone: bool) -> Starting:
        given = {"model": str(environment.gguf(sizes.checkpoint, kind)), "sparse": sparse}
        env = {"ONEDNN_MAX_CPU_ISA": "AVX2"} if sizes.avx2 else {}
        return _driver("openvino_genai", given, sizes, env)

    return make


def _ort(sizes: Sizes, alone: bool) -> Starting:
    return _driver("ort_genai", {"model": str(environment.onnx(sizes.checkpoint))}, sizes, {})


def _mistral(sizes: Sizes, alone: bool) -> Starting:
    threads = {"RAYON_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    given = {"model": str(environment.gguf(sizes.short, "q8_0"))}
    return _driver("mistral_rs", given, sizes, threads)


def _own(suffix: str) -> dict[str, str | None]:
    return {f"{OWN}{suffix}": None} | {f"{name}{suffix}": name for name in BESIDE}


KINDS: Mapping[str, Kind] = {
    "ours": Kind(_vllm(False), _own(""), saves=None),
    "ours-int8": Kind(_vllm(False, "kvr_int8"), _own(", int8"), saves=None),
    "vllm": Kind(_vllm(True), {STOCK: None}),
    "llama-q8_0-nofa": Kind(
        _llama_cpp("q8_0", False), {"llama.cpp q8_0, no fa": None}, widens=True, saves=True
    ),
    "llama-q8_0": Kind(
        _llama_cpp("q8_0", True), {"llama.cpp q8_0, fa": None}, widens=True, saves=True
    ),
    "llama-f16-nofa": Kind(
        _llama_cpp("f16", False), {"llama.cpp f16, no fa": None}, widens=True, saves=True
    ),
    "llama-f16": Kind(
        _llama_cpp("f16", True), {"llama.cpp f16, fa": None}, widens=True, saves=True
    ),
    "openvino": Kind(_openvino("f16", False), {"OpenVINO f16": None}),
    "openvino-q8_0": Kind(_openvino("q8_0", False), {"OpenVINO q8_0": None}),
    "openvino-xattention": Kind(
        _openvino("f16", True), {"OpenVINO f16, XAttention": None}, decodes=False
    ),
    "ort": Kind(_ort, {"ORT int4": None}, holds=False),
    "mistral": Kind(
        _mistral,
        {"mistral.rs q8_0": None},
        longest=8191,  # tokens of an answer come on top
        limit="no YaRN from GGUF",
        holds=False,
    ),
}
"""By the names that the command line takes."""

_LEFT_OUT = ("llama-f16-nofa", "llama-f16", "openvino-q8_0")
DEFAULT = tuple(name for name in KINDS if name not in _LEFT_OUT)
"""Those that are measured if nothing is said."""
