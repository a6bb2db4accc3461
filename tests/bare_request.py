"""A request of a bare engine."""

from dataclasses import dataclass, field
from typing import Any


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
    def done(self) -> bool:
        return self.computed >= self.prompt + self.generates
