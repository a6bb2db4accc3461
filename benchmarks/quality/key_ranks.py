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
from vllm_kvretrieval.observed_model import (
    CHUNK,
    ObservationError,
    ObservedModel,
    Seen,
    alike,
    attend,
)

SHARES = {"1/16": 1 / 16, "5/32": 5 / 32, "1/4": 1 / 4, "1/2": 1 / 2, "3/4": 3 / 4}
"""Ranks, as shares of the width of a layer's keys."""

STAGES = ("before", "after")


class Rotation:
    """The rotary embedding of a model, at the positions of a text.

    Raises:
        ObservationError: The model has none, or one for each kind of layers.
    """

    def __init__(self, model: ObservedModel, tokens: int) -> None:
        embedding: Any = getattr(model.model, "rotary_emb", None)
        if not isinstance(getattr(embedding, "rope_type", None), str):
            raise ObservationError(
                f"{model.name} has not one rotary embedding for all layers; use a model such as "
                "SmolLM2"
            )
        with alike(model.model, tokens):
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

    def observe(self, seen: Seen) -> None:
        """Take in one layer's queries."""
        key, asked = seen.key, (seen.context, seen.scale)
        self.layers += 1
        self.width = key.shape[0] * key.shape[2]
        exact = attend(seen.query, key, *asked)
        factors = Factors(self.rotation.undo(key)), Factors(key)
        for stage, of_stage in enumerate(factors):
            for number, rank in enumerate(self.ranks):
                made = of_stage.keys(rank)
                made = made if stage else self.rotation.apply(made)
                difference = attend(seen.query, made, *asked) - exact
                self.moved[stage, number] += difference.abs().sum(-1).mean() / 2
                self.energy[stage, number] += of_stage.energy(rank)


def measure(model: Path, tokens: int, queries: int) -> list[dict[str, Any]]:
    """A row per rank, of one model.

    Raises:
        ObservationError: The model or the text cannot be measured.
    """
    observed = ObservedModel(str(model))
    found = KeyRanks(Rotation(observed, tokens))
    novel.read(observed, tokens, queries, found.observe)
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
