"""RULER's samples, from its published generator, which is fetched when it is first needed.

The generator is a PyPI package with its data (Paul Graham's essays, SQuAD, HotpotQA). It is
unpacked with what it imports beneath ``build``, beside the environment, and run there as a program.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from benchmarks.build import files_fingerprint
from benchmarks.common import ROOT
from benchmarks.quality.tasks.store import fingerprint

PACKAGE = "nvidia-long-context-eval==26.3"
"""RULER as its authors package it; what `TASKS` says of tokens and scores is this version's."""

TEMPLATE = "base"
"""RULER's prompt template: the task and the beginning of its answer, without chat mark-up. The
package's own program knows no other, and sends it as it is (its RULER-completions)."""

_IMPORTED = (
    "joblib==1.5.2",
    "nltk==3.9.2",
    "scipy==1.17.1",
    "tenacity==9.2.1",
    "wonderwords==3.0.1",
    "llama-index-core==0.12.52",  # for NLTK's sentence model, which NLTK itself only downloads
)
_SENTENCE_MODEL = "llama_index/core/_static/nltk_cache"
_PROGRAM = "long_context_eval/data/prepare.py"

CACHE = ROOT / "build" / "ruler"

TIME_LIMIT_S = 900
"""A task takes less than a minute; where its prompt cannot be made to fit, RULER tries for ever."""


class GeneratorError(RuntimeError):
    """There are no samples; the message says why and what to do."""


@dataclass(frozen=True)
class RulerSample:
    """One request of a task."""

    prompt: tuple[int, ...]
    """Token ids."""

    references: tuple[str, ...]
    """The strings that the answer should contain."""


class Generator:
    """Makes the samples of one model's tokenizer and keeps them."""

    def __init__(self, model: Path, context: int) -> None:
        """
        Args:
            model: directory of the checkpoint; its tokenizer measures the prompts.
            context: RULER's ``max_seq_length``, tokens of a prompt and its answer at most.
        """
        self._model = model
        self._context = context
        self._home = CACHE / fingerprint([PACKAGE, _IMPORTED])
        tokenizer = files_fingerprint(list(model.glob("tokenizer*")))
        self._samples = self._home / "samples" / f"{model.name}-{tokenizer}" / str(context)

    def has(self, task: str, count: int) -> bool:
        """Tell whether so many samples of a task are kept."""
        path = self._path(task)
        return path.exists() and len(path.read_text().splitlines()) >= count

    def make(self, task: str, count: int) -> None:
        """Generate samples of a task. The first ones are the same whatever their number.

        Raises:
            GeneratorError: the generator cannot be fetched or fails.
        """
        packages = _packages(self._home)
        self._samples.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._samples) as scratch:
            # The program puts its arguments into a shell's command as they are.
            model, out = shlex.quote(str(self._model.resolve())), shlex.quote(scratch)
            command = [sys.executable, str(packages / _PROGRAM), "--benchmark", "synthetic"]
            command += ["--task", task, "--num_samples", str(count), "--save_dir", out]
            command += ["--tokenizer_type", "hf", "--tokenizer_path", model]
            command += ["--max_seq_length", str(self._context), "--model_template_type", TEMPLATE]
            said = _run(command, task, packages)
            made = Path(scratch) / task / "validation.jsonl"
            if not made.exists():  # whatever the exit status says
                raise GeneratorError(f"RULER's generator made no {task}; it said:\n{said[-2000:]}")
            made.replace(self._path(task))

    def read(self, task: str, count: int, tokenizer: PreTrainedTokenizerBase) -> list[RulerSample]:
        """Return the first samples of a task that `make` has kept, in tokens."""
        return read_samples(self._path(task), count, tokenizer)

    def _path(self, task: str) -> Path:
        return self._samples / f"{task}.jsonl"


def read_samples(path: Path, count: int, tokenizer: PreTrainedTokenizerBase) -> list[RulerSample]:
    """Return the first samples of a file that RULER's generator wrote, in tokens.

    Raises:
        ValueError: the file holds fewer, or something else.
    """
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    if len(lines) < count:
        raise ValueError(f"{path} holds {len(lines)} samples, not {count}; remove it and try again")
    samples = []
    for line in lines:
        try:
            entry = json.loads(line)
            prompt, references = entry["input"], entry["outputs"]
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{path} is not RULER's ({error!r}); remove it and retry") from None
        samples.append(RulerSample(tuple(tokenizer(prompt).input_ids), tuple(references)))
    return samples


def _packages(home: Path) -> Path:
    """The directory of the generator and what it imports, fetched where it is not there."""
    packages = home / "packages"
    if packages.exists():
        return packages
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        target = Path(scratch) / "packages"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # Wheels only: nothing is run to install them.
        command += ["--no-deps", "--only-binary=:all:", "--target", str(target)]
        if subprocess.run([*command, PACKAGE, *_IMPORTED]).returncode:
            raise GeneratorError(f"pip could not fetch {PACKAGE}; its message is above")
        target.replace(packages)
    return packages


def _run(command: list[str], task: str, packages: Path) -> str:
    """Run the generator's program; returns all that it said."""
    paths = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "NLTK_DATA": str(packages / _SENTENCE_MODEL),
        # It starts `python` once more.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise GeneratorError(
            f"RULER's generator did not finish {task} in {TIME_LIMIT_S} s: take a longer --context"
        ) from None
    return done.stdout
