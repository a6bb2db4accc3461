"""How much a layer's output changes when KV heads select for chunks of a prompt."""

from collections.abc import Sequence
from itertools import chain, product
from math import isfinite
from typing import Any, NamedTuple

import torch

from vllm_kvretrieval.observed_model import ObservationError, ObservedModel, Seen

PAGE, CHUNK, WINDOW, QUERIES = 32, 128, 256, 8
"""Tokens of a page, of a chunk and before it; queries of a chunk that select: those of prompts
that retrieve, by default."""
EVERY = 4
"""One chunk in so many is measured: one in each step of prefill."""
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


class PromptChanges:
    """Lets a model read texts, and compares each head's output with a selecting one's.

    A head that selects attends to the first page, to the pages that got most of the attention of
    some of a chunk's queries, to a window before the chunk, and to the chunk itself. Selection is
    by exact attention: no index takes part. What a model does with attention's output before or
    after its projection (a gate, or a norm) is left out.

    Args:
        model: The model, which reads with full attention.
        select: Numbers of pages that a head selects.

    Attributes:
        changes: By layer, one per KV head and number of pages.
    """

    def __init__(self, model: ObservedModel, select: Sequence[int]) -> None:
        self._model, self.select = model, select
        self.changes: dict[int, list[list[Change]]] = {}
        # Squared norms of a chunk's tokens, by the attention module.
        self._inputs: dict[int, torch.Tensor] = {}
        network = model.model
        for name, module in network.named_modules():
            if hasattr(module, "layer_idx") and self._projection(module) is not None:
                layer = network.get_submodule(name.rpartition(".")[0])
                layer.register_forward_pre_hook(self._noting(id(module)), with_kwargs=True)

    def measure(self, tokens: torch.Tensor) -> None:
        """Read a text; chunks in its second half are added to those of earlier texts.

        Raises:
            ObservationError: Attention cannot be taken apart in this model.
        """
        first = -(-len(tokens) // 2 // CHUNK) * CHUNK
        begins = torch.arange(first, len(tokens) - CHUNK + 1, EVERY * CHUNK)
        places = (begins[:, None] + torch.arange(CHUNK)).flatten()
        self._model.read(tokens, places, self._observe)
        if not self.changes:
            raise ObservationError(
                f"{self._model.name}: no layer has attention with one of these projections behind "
                f"it: {', '.join(OUTPUTS)}"
            )
        found = chain.from_iterable(chain.from_iterable(self.changes.values()))
        if not all(isfinite(change.square) for change in found):
            raise ObservationError(
                f"{self._model.name} overflows in this dtype; use --dtype float32"
            )

    @staticmethod
    def _projection(module: Any) -> Any:
        found = (getattr(module, name, None) for name in OUTPUTS)
        return next((layer for layer in found if layer is not None), None)

    def _noting(self, module: int) -> Any:
        def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._inputs[module] = hidden[0].float().square().sum(-1)

        return note

    def _observe(self, seen: Seen) -> None:
        """Add one chunk of one layer."""
        if (inputs := self._inputs.get(id(seen.module))) is None:
            return
        scale, end = seen.scale, int(seen.context[-1])
        query, exact, heads = seen.query, seen.output, len(seen.key)
        inputs = inputs[seen.context - 1 - seen.key.shape[1]]
        key, value = seen.key[:, :end], seen.value[:, :end]
        grouped = query.unflatten(0, (heads, -1))
        weights = self._projection(seen.module).weight.unflatten(1, (len(query), -1))
        nothing = [[Change() for _ in self.select] for _ in range(heads)]
        sums = self.changes.setdefault(seen.layer, nothing)
        counted = inputs > 0  # some tokens have no embedding, such as padding
        for head, number in product(range(heads), range(len(self.select))):
            listed = attended(grouped[head], key[head], self.select[number], scale)
            masked = causal(CHUNK, end)[:, listed]
            output = torch.nn.functional.scaled_dot_product_attention(
                grouped[head], key[head, listed], value[head, listed], attn_mask=masked, scale=scale
            )
            own = slice(head * len(output), (head + 1) * len(output))
            change = output.transpose(0, 1) - exact[:, own]
            moved = torch.einsum("ngd,xgd->nx", change, weights[:, own]).float().square().sum(-1)
            parts = (moved[counted] / inputs[counted]).detach()
            square, tokens = sums[head][number]
            sums[head][number] = Change(square + float(parts.sum()), tokens + len(parts))


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
