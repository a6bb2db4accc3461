"""Tasks: prompts whose continuation shows whether attention found the tokens that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerBase

from benchmarks import texts
from vllm_kvretrieval.calibration.samples import Sample, TokenText


def novel_text(tokenizer: PreTrainedTokenizerBase) -> TokenText:
    """Return the novel in a model's tokens."""
    return TokenText(tokenizer, texts.paragraphs())


Builder = Callable[[TokenText, int, int], list[Sample]]
"""Makes a task's samples from the text, the context in tokens and the number of samples."""


Check = Literal["passkey", "found", "oracle", "covering", "control", "speculation"]
"""A criterion that a task's figures have to meet (see ``criteria.py``)."""


@dataclass(frozen=True)
class Task:
    """One line of the benchmark: what is asked, of which model, at which context."""

    what: str
    """Kind of task, such as ``passkey``."""

    label: str
    """The model's short name."""

    model: Path
    """Directory of its checkpoint."""

    context: int
    """Nominal context in tokens; prompt, question and answer of a needle task fit into it."""

    samples: int
    """Number of samples by default."""

    build: Builder
    """Makes the samples."""

    checks: tuple[Check, ...] = ()
    """Criteria; ``covering`` also adds a run whose budget covers the context."""

    @property
    def name(self) -> str:
        """Name on the command line and in results, such as ``passkey-qwen-4k``."""
        return f"{self.what}-{self.label}-{self.context // 1024}k"
