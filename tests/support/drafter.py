"""A drafter whose drafts a test decides on, for vLLM's ``custom_class``."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from vllm_kvretrieval.drafting.pace import Cost

DRAFTER = "tests.support.drafter.Scripted"


def speculation(drafts: int) -> dict[str, Any]:
    """vLLM's ``speculative_config`` for this drafter."""
    return {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": drafts}


def reading_alone(worker: Any) -> Any:
    """What steps of a worker would take if reading contexts were all that they do."""
    costs = copy(worker.drafter._costs)
    costs._always, costs._whole = 0, Cost(0.0, 0.0)
    return costs


class Scripted:
    """Drafts texts that it is told, some tokens of which it spoils; at first it drafts nothing.

    Attributes:
        least: How many tokens it drafts at least.
        drafted: How many tokens it has drafted, and how many of those as the text has them.
    """

    least = 0

    def __init__(self, vllm_config: Any) -> None:
        self.most = vllm_config.num_speculative_tokens
        self.vocabulary = vllm_config.model_config.get_vocab_size()
        self.follow((), 0.0)

    def load_model(self, *_: Any) -> None:
        """Nothing is loaded; vLLM asks every drafter on a CPU."""

    def follow(
        self, texts: Sequence[Sequence[int]], right: float, lengths: int = 0, wrong: int = 0
    ) -> None:
        """Draft the rest of texts from now on.

        Args:
            texts: Token ids, prompts included. A context that is no beginning of any gets drafts
                without meaning.
            right: The chance that a token is drafted as the text has it.
            lengths: Decides at random how many tokens are drafted, and which of them are right.
            wrong: Decides at random what the others are.
        """
        self.texts, self.right = [np.array(text) for text in texts], right
        self._lengths, self._wrong = np.random.default_rng(lengths), np.random.default_rng(wrong)
        self.drafted = [0, 0]

    def propose(
        self, sampled: list[list[int]], counts: np.ndarray, ids: np.ndarray, **_: Any
    ) -> list[list[int]]:
        """Drafts behind the contexts of a batch; see ``NgramProposer.propose``."""
        return [
            self._draft(ids[row, : counts[row]]) if new and self.texts else []
            for row, new in enumerate(sampled)
        ]

    def _draft(self, context: np.ndarray) -> list[int]:
        count = int(self._lengths.integers(self.least, self.most + 1))
        right = self._lengths.random(self.most)[:count] < self.right
        drafts = self._wrong.integers(0, self.vocabulary, self.most)[:count]
        for text in self.texts:
            if len(text) > len(context) and (text[: len(context)] == context).all():
                rest = text[len(context) :][:count]
                same = right[: len(rest)]
                drafts[: len(rest)] = np.where(same, rest, (rest + 1 + drafts[: len(rest)] % 7))
                drafts %= self.vocabulary
                self.drafted[1] += int(same.sum())
                break
        self.drafted[0] += count
        return [int(token) for token in drafts]
