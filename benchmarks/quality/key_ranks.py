"""How much of a layer's keys low-rank factors hold, before and after rotary embedding.

    python -m benchmarks.quality key-ranks --tokens 4096 --queries 32

ShadowKV keeps factors of a prompt's keys in place of the keys, of all KV heads of a layer together
and before rotary embedding (arXiv 2410.21465, section 3). A plug-in for vLLM sees keys after it.
Here a model reads a novel in transformers, and the keys of each layer are approximated by their
best factors of some ranks, before and after. ``energy`` is the share of the sum of squares that
stays, ``moved`` the share of a query's attention that the approximation moves to other tokens: half
the sum of the differences of the softmax. Both are means, over layers, and over query heads and
queries. The paper's rank is 160 of 1024 channels (8 KV heads of 128), 5/32 of the width.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama.modeling_llama import rotate_half

from benchmarks.quality import novel
from benchmarks.tables import quality
from vllm_kvretrieval.calibration.model import CHUNK, CalibrationError, Measurement
from vllm_kvretrieval.calibration.rotations import alike

SHARES = {"1/16": 1 / 16, "5/32": 5 / 32, "1/4": 1 / 4, "1/2": 1 / 2, "3/4": 3 / 4}
"""Ranks, as shares of the width of a layer's keys."""

STAGES = ("before", "after")


class Rotation:
    """The rotary embedding of a model, at the positions of a text.

    Raises:
        CalibrationError: The model has none, or one for each kind of layers.
    """

    def __init__(self, measurement: Measurement, tokens: int) -> None:
        embedding: Any = getattr(measurement.model, "rotary_emb", None)
        if not isinstance(getattr(embedding, "rope_type", None), str):
            raise CalibrationError(
                f"{measurement.name} has not one rotary embedding for all layers; use a model such "
                "as SmolLM2"
            )
        with alike(measurement.model, tokens):
            found = embedding(torch.zeros(1), torch.arange(tokens)[None])
        self.scale: float = embedding.attention_scaling
        self.cos, self.sin = (x[0] for x in found)

    def apply(self, keys: torch.Tensor) -> torch.Tensor:
        """Rotate keys, [kv_heads, tokens, head_size]."""
        return self._turned(keys, 1)

    def undo(self, keys: torch.Tensor) -> torch.Tensor:
        """Give keys back as they were before they were rotated."""
        return self._turned(keys, -1)

    def _turned(self, keys: torch.Tensor, way: int) -> torch.Tensor:
        """Keys turned by their angles, or back. Some models turn the first channels alone."""
        turned, rest = keys.tensor_split([self.cos.shape[-1]], -1)
        turned = turned * self.cos + way * rotate_half(turned) * self.sin
        # Cosine and sine bring a factor, which is taken from what it was brought to.
        return torch.cat((turned / self.scale**2 if way < 0 else turned, rest), -1)


class Factors:
    """Factors of keys of all KV heads of a layer together, [kv_heads, tokens, head_size]."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.heads = len(keys)
        self.matrix = keys.transpose(0, 1).flatten(1).double()
        squares, self.directions = torch.linalg.eigh(self.matrix.T @ self.matrix)
        self.energies = squares.flip(0).clamp(min=0).cumsum(0) / squares.sum()

    def energy(self, rank: int) -> float:
        """The share of the sum of squares that factors of a rank hold."""
        return float(self.energies[rank - 1])

    def keys(self, rank: int) -> torch.Tensor:
        """The keys that they make, as they were given."""
        kept = self.directions[:, -rank:]
        made = (self.matrix @ kept @ kept.T).float()
        return made.unflatten(1, (self.heads, -1)).transpose(0, 1)


class KeyRanks:
    """Sums, per stage and rank, what factors of each layer's keys hold.

    Args:
        rotation: That of the model.

    Attributes:
        width: Channels of all KV heads of a layer.
        energy, moved: float64 [stages, ranks]; summed over layers.
        layers: Layers so far.
    """

    def __init__(self, rotation: Rotation) -> None:
        self.rotation = rotation
        self.width = self.layers = 0
        self.energy, self.moved = torch.zeros(2, len(STAGES), len(SHARES), dtype=torch.float64)

    @property
    def ranks(self) -> list[int]:
        """The ranks, rising."""
        return [round(share * self.width) for share in SHARES.values()]

    def begin(self) -> None:
        """See :class:`vllm_kvretrieval.calibration.model.Observer`."""

    def observe(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        context: torch.Tensor,
        scale: float,
    ) -> None:
        """See :class:`vllm_kvretrieval.calibration.model.Observer`."""
        self.layers += 1
        self.width = key.shape[0] * key.shape[2]
        exact = attention(query, key, context, scale)
        factors = Factors(self.rotation.undo(key)), Factors(key)
        for stage, of_stage in enumerate(factors):
            for number, rank in enumerate(self.ranks):
                made = of_stage.keys(rank)
                made = made if stage else self.rotation.apply(made)
                difference = attention(query, made, context, scale) - exact
                self.moved[stage, number] += difference.abs().sum(-1).mean() / 2
                self.energy[stage, number] += of_stage.energy(rank)


def attention(
    query: torch.Tensor, key: torch.Tensor, context: torch.Tensor, scale: float
) -> torch.Tensor:
    """The softmax of queries [heads, n, d] over keys [kv_heads, tokens, d], [kv_heads, group, n,
    tokens]; each query sees as many tokens as its context has."""
    scores = torch.einsum("hgnd,htd->hgnt", query.unflatten(0, (len(key), -1)), key) * scale
    later = torch.arange(key.shape[1]) >= context[:, None]
    return scores.masked_fill_(later, float("-inf")).softmax(-1)


def measure(model: Path, tokens: int, queries: int) -> list[dict[str, Any]]:
    """A row per rank, of one model.

    Raises:
        CalibrationError: The model or the text cannot be measured.
    """
    measurement = Measurement(str(model))
    found = KeyRanks(Rotation(measurement, tokens))
    novel.read(measurement, tokens, queries, found)
    return [
        {
            "model": model.name,
            "width": found.width,
            "share": share,
            "rank": rank,
            "layers": found.layers,
            **{
                stage: {
                    "energy": float(found.energy[place, number] / found.layers),
                    "moved": float(found.moved[place, number] / found.layers),
                }
                for place, stage in enumerate(STAGES)
            },
        }
        for number, (share, rank) in enumerate(zip(SHARES, found.ranks, strict=True))
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    novel.add_arguments(parser, 4096, "key-ranks.json")


def run(args: argparse.Namespace) -> int:
    """Measure, print and store."""
    return novel.run(args, 2 * CHUNK, measure, quality.key_ranks)
