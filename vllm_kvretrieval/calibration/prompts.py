"""How much a layer's output changes when KV heads select for chunks of a prompt."""

from collections.abc import Sequence
from itertools import chain, product
from math import isfinite
from typing import Any, NamedTuple

import torch

from vllm_kvretrieval.calibration.model import CalibrationError, Measurement

PAGE, CHUNK, WINDOW, QUERIES = 32, 128, 256, 8
"""Tokens of a page, of a chunk and before it; queries of a chunk that select: those of prompts
that retrieve, by default."""
EVERY = 4
"""One chunk in so many is measured."""
OUTPUTS = ("o_proj", "out_proj", "dense")
"""Names of the projection behind attention, in the modules of transformers."""


class Change(NamedTuple):
    """What the chunks of a text add up to, of one KV head.

    Attributes:
        square: Sum over tokens of the squared change of the layer's output, as a part of the
            squared norm of the layer's input.
        tokens: How many these are.
    """

    square: float = 0.0
    tokens: int = 0


class PromptChanges(Measurement):
    """Runs a model over a text, exactly, and compares each head's output with a selecting one's.

    A head that selects attends to the first page, to the pages that got most of the attention of
    some of a chunk's queries, to a window before the chunk, and to the chunk itself. Selection is
    by exact attention: no index takes part. What a model does with attention's output before or
    after its projection (a gate, or a norm) is left out.

    Args:
        model: Path or name on a hub.
        select: Numbers of pages that a head selects.
        dtype: The dtype to compute in.

    Attributes:
        changes: By layer, one per KV head and number of pages.
    """

    def __init__(
        self, model: str, select: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(model, dtype)
        self.select = select
        self.changes: dict[int, list[list[Change]]] = {}
        self._inputs: dict[int, torch.Tensor] = {}  # squared norms, by the attention module
        self._first = 0
        for name, module in self.model.named_modules():
            if hasattr(module, "layer_idx") and self._projection(module) is not None:
                layer = self.model.get_submodule(name.rpartition(".")[0])
                layer.register_forward_pre_hook(self._noting(id(module)), with_kwargs=True)

    def measure(self, tokens: torch.Tensor) -> None:
        """Read a text; chunks in its second half are added to those of earlier texts.

        Raises:
            CalibrationError: Attention cannot be taken apart in this model.
        """
        self._first = -(-len(tokens) // 2 // CHUNK) * CHUNK
        self.run(tokens, torch.empty(0, dtype=torch.int64), _Nothing())
        if not self.changes:
            raise CalibrationError(
                f"{self.name}: no layer has attention with one of these projections behind it: "
                f"{', '.join(OUTPUTS)}"
            )
        found = chain.from_iterable(chain.from_iterable(self.changes.values()))
        if not all(isfinite(change.square) for change in found):
            raise CalibrationError(f"{self.name} overflows in this dtype; use --dtype float32")

    @staticmethod
    def _projection(module: Any) -> Any:
        found = (getattr(module, name, None) for name in OUTPUTS)
        return next((layer for layer in found if layer is not None), None)

    def _noting(self, module: int) -> Any:
        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._inputs[module] = hidden[0].float().square().sum(-1)

        return note

    def _attended(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        scale: float,
    ) -> None:
        if id(module) not in self._inputs:
            return
        before = key.shape[1] - query.shape[1]
        for begin in range(0, query.shape[1] - CHUNK + 1, CHUNK):
            later = before + begin - self._first
            if later < 0 or later % (EVERY * CHUNK):
                continue
            new, end = slice(begin, begin + CHUNK), before + begin + CHUNK
            of_chunk = query[:, new], key[:, :end], value[:, :end]
            self._compare(module, *of_chunk, output[new], new, scale)

    def _compare(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        exact: torch.Tensor,
        new: slice,
        scale: float,
    ) -> None:
        """Add one chunk, [heads, n, head_size] and so on, at a place of the step."""
        heads, end = len(key), key.shape[1]
        grouped = query.unflatten(0, (heads, -1))
        weights = self._projection(module).weight.unflatten(1, (len(query), -1))
        inputs = self._inputs[id(module)][new]
        nothing = [[Change() for _ in self.select] for _ in range(heads)]
        sums = self.changes.setdefault(module.layer_idx, nothing)
        counted = inputs > 0  # some tokens have no embedding, such as padding
        for head, number in product(range(heads), range(len(self.select))):
            seen = attended(grouped[head], key[head], self.select[number], scale)
            masked = causal(CHUNK, end)[:, seen]
            output = torch.nn.functional.scaled_dot_product_attention(
                grouped[head], key[head, seen], value[head, seen], attn_mask=masked, scale=scale
            )
            own = slice(head * len(output), (head + 1) * len(output))
            change = output.transpose(0, 1) - exact[:, own]
            moved = torch.einsum("ngd,xgd->nx", change, weights[:, own]).float().square().sum(-1)
            parts = (moved[counted] / inputs[counted]).detach()
            square, tokens = sums[head][number]
            sums[head][number] = Change(square + float(parts.sum()), tokens + len(parts))


class _Nothing:
    """An observer of no queries."""

    def begin(self) -> None:
        pass

    def observe(self, *_: Any) -> None:
        pass


def causal(new: int, end: int) -> torch.Tensor:
    """bool [new, end]; the tokens that the last ones of a context see."""
    return torch.ones(new, end, dtype=torch.bool).tril(end - new)


def attended(query: torch.Tensor, key: torch.Tensor, select: int, scale: float) -> torch.Tensor:
    """int64 [n]; the tokens that a chunk attends to where its KV head selects.

    Args:
        query: [group, new, head_size].
        key: [end, head_size]; the chunk's own at the end.
        select: Pages that it selects.
        scale: Softmax scale.
    """
    new, end = query.shape[1], len(key)
    before = max(end - new - WINDOW, 0) // PAGE
    places = torch.arange(1, QUERIES + 1) * new // QUERIES - 1
    logits = torch.einsum("gnd,td->gnt", query[:, places].float(), key.float()) * scale
    logits.masked_fill_(~causal(new, end)[places], -torch.inf)
    shares = logits.softmax(-1)[..., : before * PAGE].unflatten(-1, (before, PAGE)).sum(-1)
    pooled = shares.mean((0, 1))[1:]
    pages = 1 + pooled.topk(min(select, len(pooled))).indices.sort().values
    tokens = torch.arange(end)
    listed = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    return torch.cat([tokens[:PAGE], listed, tokens[max(before, 1) * PAGE :]])
