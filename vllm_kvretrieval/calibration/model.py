"""Running a model over a text in transformers, and showing its queries and keys."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from vllm_kvretrieval.calibration.rotations import alike
from vllm_kvretrieval.retrieval.model_files import check_model

ATTENTION = "kv_retrieval_calibration"
CHUNK = 512
"""Tokens of a step of prefill."""


class CalibrationError(ValueError):
    """The model or the text cannot be measured; the message says why, and the remedy."""


class Observer(Protocol):
    """Receives the queries at some places of a text."""

    def begin(self) -> None:
        """Start with new queries, of the first layer again."""
        ...

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        context: torch.Tensor,
        scale: float,
    ) -> None:
        """Receive one layer's queries.

        Args:
            layer: The layer's number; layers come in rising order.
            query: [heads, n, head_size].
            key: [kv_heads, most tokens of a context, head_size].
            context: int64 [n]; tokens that each query attends to, its own included.
            scale: Softmax scale.
        """
        ...


class Measurement:
    """Runs a model over a text and shows its queries and keys, layer by layer, to an observer.

    The queries at a few places of the text, each over all tokens up to its own, are those that
    decode steps there would have. Only the attention of a few of them is in memory at a time.

    Args:
        model: Path or name on a hub.
        dtype: The dtype to compute in.

    Attributes:
        config: Configuration of the text model.
        layers: Layers with plain full attention, as seen while running.

    Raises:
        CalibrationError: The model cannot be loaded, or transformers cannot show its attention.
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
            raise CalibrationError(f"{model} cannot be loaded: {error}") from None
        self.model = loaded.eval()
        self.config = loaded.config.get_text_config()
        self.layers: list[int] = []
        self._observe: Callable[..., None] = lambda *args: None

    def tokens_of(self, text: str, count: int | None = None) -> torch.Tensor:
        """int64 [count]; the text's first tokens, or all of them.

        Raises:
            CalibrationError: The text is shorter, or the model does not take such contexts.
        """
        tokens = self.tokenizer(text, verbose=False, return_tensors="pt")["input_ids"][0]
        wanted = len(tokens) if count is None else count
        if wanted > (limit := self.longest(wanted)):
            whole = "" if count is not None else f", and the text has {wanted}"
            raise CalibrationError(
                f"{self.name} takes contexts of up to {limit} tokens{whole}: use --tokens {limit} "
                "or less"
            )
        if len(tokens) < wanted:
            raise CalibrationError(
                f"the text has {len(tokens)} tokens, and {count} are to be read: give a longer "
                "one, or use --tokens"
            )
        return tokens[:wanted]

    def longest(self, otherwise: int) -> int:
        """Tokens of the longest context that the model says it takes."""
        return int(getattr(self.config, "max_position_embeddings", otherwise))

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, observer: Observer) -> None:
        """Read the text, showing progress.

        Args:
            tokens: int64 [n]; the text.
            positions: int64 [m]; the places of the queries, rising.
            observer: Gets the queries.

        Raises:
            CalibrationError: No layer with full attention has been seen.
        """
        cache = None
        self.layers = []
        bar = tqdm(total=len(tokens), unit="token", desc="reading")
        with torch.inference_mode(), alike(self.model, len(tokens)), bar:
            for start in range(0, len(tokens), CHUNK):
                part = tokens[start : start + CHUNK]
                inside = (positions >= start) & (positions < start + len(part))
                observer.begin()
                self._observe = self._shown_to(observer, positions[inside], start)
                outputs = self.model(
                    input_ids=part[None], past_key_values=cache, use_cache=True, return_dict=True
                )
                cache = outputs.past_key_values
                bar.update(len(part))
        if not self.layers:
            raise CalibrationError(
                f"{self.name} has no layer with full attention that transformers shows"
            )

    def _shown_to(
        self, observer: Observer, positions: torch.Tensor, start: int
    ) -> Callable[..., None]:
        """Takes in a layer's queries at some positions of a chunk that begins at ``start``."""

        def observe(layer: int, query: torch.Tensor, key: torch.Tensor, scale: float) -> None:
            if key.shape[1] != start + query.shape[1]:
                raise CalibrationError(
                    f"layer {layer} of {self.name} does not attend to its whole context"
                )
            if layer not in self.layers:
                self.layers.append(layer)
            if len(positions):
                observer.observe(layer, query[:, positions - start], key, positions + 1, scale)

        return observe

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
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            self._observe(module.layer_idx, query[0], key[0], scale)
            self._attended(module, query[0], key[0], value[0], output[0], scale)
        return output, None

    def _attended(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        scale: float,
    ) -> None:
        """Take in the attention of a layer with full attention, output [tokens, heads, d]."""
