"""A request of a bare engine."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams


@dataclass
class Running:
    """A request.

    Attributes:
        name: Its id.
        options: Those of ``kv_retrieval``.
        prompt: Tokens.
        generates: Tokens.
        code: What its values say.
        tokens: Of its context that are known: prompt, and what it has generated.
        computed: Of these that are in the cache.
        blocks: vLLM's, in the order of the context.
    """

    name: str
    options: dict[str, Any]
    prompt: int
    generates: int
    code: float
    tokens: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def announced(self) -> Any:
        """How vLLM's scheduler announces it, or that it resumes, to a V2 runner."""
        return SimpleNamespace(
            req_id=self.name,
            sampling_params=SamplingParams(extra_args={"kv_retrieval": self.options}),
            prompt_len=self.prompt,
            prefill_token_ids=range(self.tokens),
        )

    @property
    def done(self) -> bool:
        return self.computed >= self.prompt + self.generates
