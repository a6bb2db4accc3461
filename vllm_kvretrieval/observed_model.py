"""A model that reads a text in transformers, on the CPU, and shows what its layers compute.

What is measured of a model without an engine, and explained of a prompt, is a function of
:class:`Seen`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vllm_kvretrieval.retrieval.model_files import check_model

ATTENTION = "kv_retrieval_observed"
CHUNK = 512
"""Tokens of a step of prefill."""
AT_ONCE = 16
"""Queries whose attention is in memory at a time: float32 [heads, 16, context] of one layer."""

BY_LENGTH = "longrope"
"""A kind of rotations whose factors transformers chooses by the end of a chunk, and vLLM once."""


class ObservationError(ValueError):
    """The model or the text cannot be observed; the message says why, and the remedy."""


@dataclass(frozen=True)
class Seen:
    """What a layer computes at some places of a chunk of a text.

    Attributes:
        layer: Its number.
        query: [heads, n, head_size]; those of the places.
        key, value: [kv_heads, tokens, head_size]; those of the text up to the end of the chunk.
        context: int64 [n]; tokens that each query attends to, its own included.
        scale: Softmax scale.
        output: [n, heads, head_size]; the attention of the places, before its projection.
        module: The layer's attention in transformers.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    context: torch.Tensor
    scale: float
    output: torch.Tensor
    module: Any = None

    def attention(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields contexts of some queries, and what :func:`attend` gives for these."""
        parts = self.query.split(AT_ONCE, 1), self.context.split(AT_ONCE)
        for query, context in zip(*parts, strict=True):
            yield context, attend(query, self.key[:, : int(context.max())], context, self.scale)


def attend(
    query: torch.Tensor, key: torch.Tensor, context: torch.Tensor, scale: float
) -> torch.Tensor:
    """float32 [heads, n, tokens]; softmax attention; arguments as in :class:`Seen`."""
    grouped = query.float().unflatten(0, (len(key), -1))
    scores = torch.einsum("hgnd,htd->hgnt", grouped, key.float()).flatten(0, 1) * scale
    future = torch.arange(key.shape[1]) >= context[:, None]
    return scores.masked_fill_(future, -torch.inf).softmax(-1)


@contextmanager
def alike(model: nn.Module, tokens: int) -> Iterator[None]:
    """Rotate all chunks of a text by the factors of its length, as vLLM rotates a context.

    transformers would rotate the first chunks of a long text by the short factors, and the chunks
    behind by the long ones, so that keys of one context are not comparable.

    Args:
        model: The model in transformers.
        tokens: Tokens of the text.
    """
    chosen: list[Any] = [m for m in model.modules() if getattr(m, "rope_type", None) == BY_LENGTH]
    for embedding in chosen:
        embedding(torch.zeros(1), torch.tensor([[tokens - 1]]))
        embedding.rope_type = "default"
    try:
        yield
    finally:
        for embedding in chosen:
            embedding.rope_type = BY_LENGTH


class ObservedModel:
    """Reads texts, and shows its layers with plain full attention to an observer.

    The queries at a few places of a text, each over all tokens up to its own, are those that
    decode steps there would have.

    Args:
        model: Path or name on a hub.
        dtype: The dtype to compute in.

    Attributes:
        config: Configuration of the text model.
        layers: Layers with plain full attention, as seen in the last text.

    Raises:
        ObservationError: The model cannot be loaded, or transformers cannot show its attention.
        RetrievalConfigError: Its directory is not there.
    """

    def __init__(self, model: str, dtype: torch.dtype = torch.float32) -> None:
        self.name = model
        check_model(model)
        AttentionInterface.register(ATTENTION, self._attention)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model)
            loaded = AutoModel.from_pretrained(model, dtype=dtype, attn_implementation=ATTENTION)
        except (OSError, ValueError) as error:
            raise ObservationError(f"{model} cannot be loaded: {error}") from None
        self.model = loaded.eval()
        self.config = loaded.config.get_text_config()
        self.layers: list[int] = []
        self._observe: Callable[[Seen], None] = lambda _: None
        self._places, self._start = torch.empty(0, dtype=torch.int64), 0

    def tokens_of(self, text: str, count: int | None = None) -> torch.Tensor:
        """int64 [count]; the text's first tokens, or all of them.

        Raises:
            ObservationError: The text is shorter, or the model does not take such contexts.
        """
        tokens = self.tokenizer(text, verbose=False, return_tensors="pt")["input_ids"][0]
        wanted = len(tokens) if count is None else count
        if wanted > (limit := self.longest(wanted)):
            whole = "" if count is not None else f", and the text has {wanted}"
            raise ObservationError(
                f"{self.name} takes contexts of up to {limit} tokens{whole}: use --tokens {limit} "
                "or less"
            )
        if len(tokens) < wanted:
            raise ObservationError(
                f"the text has {len(tokens)} tokens, and {count} are to be read: give a longer "
                "one, or use --tokens"
            )
        return tokens[:wanted]

    def longest(self, otherwise: int) -> int:
        """Tokens of the longest context that the model says it takes."""
        return int(getattr(self.config, "max_position_embeddings", otherwise))

    def read(
        self, tokens: torch.Tensor, places: torch.Tensor, observe: Callable[[Seen], None]
    ) -> None:
        """Read a text in chunks, and show progress.

        Args:
            tokens: int64 [n]; the text.
            places: int64 [m]; positions of the queries to be observed, rising.
            observe: Called, for each chunk with such places, once per layer, in rising order.

        Raises:
            ObservationError: No layer with full attention has been seen.
        """
        cache = None
        self.layers, self._observe = [], observe
        bar = tqdm(total=len(tokens), unit="token", desc="reading")
        with torch.inference_mode(), alike(self.model, len(tokens)), bar:
            for start in range(0, len(tokens), CHUNK):
                part = tokens[start : start + CHUNK]
                inside = (places >= start) & (places < start + len(part))
                self._places, self._start = places[inside] - start, start
                outputs = self.model(
                    input_ids=part[None], past_key_values=cache, use_cache=True, return_dict=True
                )
                cache = outputs.past_key_values
                bar.update(len(part))
        if not self.layers:
            raise ObservationError(
                f"{self.name} has no layer with full attention that transformers shows"
            )

    def _attention(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention as transformers calls it in every layer; [1, heads, tokens, head_size] each."""
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        if sliding_window is None:
            layer, places, start = module.layer_idx, self._places, self._start
            if key.shape[2] != start + query.shape[2]:
                raise ObservationError(
                    f"layer {layer} of {self.name} does not attend to its whole context"
                )
            if layer not in self.layers:
                self.layers.append(layer)
            if len(places):
                scale = query.shape[-1] ** -0.5 if scaling is None else scaling
                context = start + places + 1
                asked, found = query[0][:, places], output[0][places]
                self._observe(Seen(layer, asked, key[0], value[0], context, scale, found, module))
        return output, None
