"""How the layers of a group attend in one step; built by `metadata`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from vllm_kvretrieval.kernels import PromptLists, TokenLists
from vllm_kvretrieval.methods import Chunks, DecodePlan

if TYPE_CHECKING:
    from vllm_kvretrieval.attention.cpu.drafts import DraftedPages


@dataclass
class Whole:
    """Rows that attend to whole contexts, as vLLM has it.

    Requests that ask for exact attention, contexts within the budget, and exact prompts of which a
    step computes a single token. Where our own kernel attends, they may have drafts.

    Attributes:
        places: int64 [rows]; the requests' places in the batch.
        index: int64 [queries]; their tokens in the batch, None where each has one, and they are all
            that lead the batch with one.
        by: Where vLLM's kernel attends, its metadata for them alone; where ours does, all pages of
            their contexts.
    """

    places: np.ndarray
    index: torch.Tensor | None
    by: CPUAttentionMetadata | TokenLists


@dataclass
class Prefill:
    """Requests that read their prompts.

    Attributes:
        start: The first token of the requests in the batch.
        by: Where vLLM's kernel attends, its metadata for them alone; where ours does, their lists.
            Tokens are counted from ``start``.
        staged: The pages to copy into the staging buffer, which is then read, as
            :class:`StagedContext` has them; None where the cache itself is, or what is selected.
        chunks: Where prompts select what they attend to, their chunks. Lists of pages take the
            place of ``by``; tokens are laid out in the staging buffer, and ``by`` is of these.
    """

    start: int
    by: CPUAttentionMetadata | PromptLists
    staged: torch.Tensor | None = None
    chunks: Chunks[Any] | None = None

    @property
    def in_place(self) -> bool:
        """Whether the prompts attend to whole contexts where these are."""
        return self.staged is None and self.chunks is None

    @property
    def in_cache(self) -> bool:
        """Whether the KV cache itself is read, all of it or pages of it."""
        return self.staged is None and self.gathered is None

    @property
    def gathered(self) -> TokenLists | None:
        """Tokens that are laid out in the staging buffer, which is then read; None: none are."""
        lists = None if self.chunks is None else self.chunks.lists
        return lists if isinstance(lists, TokenLists) else None

    @property
    def starts(self) -> torch.Tensor:
        """int32 [n + 1]; the first token of each request, or chunk, counted from ``start``."""
        return self.by.starts if isinstance(self.by, PromptLists) else self.by.query_start_loc

    @property
    def tokens(self) -> slice:
        """The rows' tokens in the batch."""
        return slice(self.start, self.start + int(self.starts[-1]))


@dataclass
class Full:
    """How a batch attends to whole contexts by our own kernels.

    Attributes:
        rows: The requests that decode, or of which the step computes a single token; None: there
            are none.
        prompts: The others.
    """

    rows: Whole | None
    prompts: list[Prefill]


@dataclass
class Split:
    """A step whose requests do not all take vLLM's own path.

    Attributes:
        prompts: int64 [n]; places of the requests that read their prompts. The others have a single
            token each. Where contexts are not read in place, requests with a single token that
            neither choose nor fit in slots count as prompts, too.
        decode: The rows that attend to pages of their own choice, by method.
        whole: The other rows with a single token.
        prefill: The requests that read their prompts, in turns.
    """

    prompts: np.ndarray
    decode: list[DecodePlan]
    whole: Whole | None
    prefill: list[Prefill]


class Pages(NamedTuple):
    """Pages of some requests' contexts that something else than the model has filled.

    Attributes:
        ids: int32 [n]; each page once.
        lengths: int32 [n]; tokens in each.
    """

    ids: torch.Tensor
    lengths: torch.Tensor


@dataclass
class Observed:
    """Rows of one token that attend to whole contexts, and whose requests ask what they attend to.

    Attributes:
        index: int64 [rows]; their places in the batch.
        seats: int32 [rows].
        block_table: int32 [rows, >= pages].
        seq_lens: int32 [rows].
        lists: All pages of their contexts.
    """

    index: torch.Tensor
    seats: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    lists: TokenLists


@dataclass
class RetrievalMetadata(CPUAttentionMetadata):
    """vLLM's metadata of the whole batch, for dense layers and contexts within budget.

    Attributes:
        full: How dense layers attend, and retrieval layers whose contexts are within budget; None:
            by vLLM's kernel.
        split: How retrieval layers attend otherwise; None where they attend as dense layers do.
        alone: The plan of all rows of the step, where retrieval layers have nothing to do but what
            it says; None: they have.
        reads: What layers make ready; see :meth:`LayerStorage.contexts`.
        loaded: Pages whose indexes are to be built from their keys.
        drafted: Pages whose records are to be built, of indexes whose records grow.
        seen: What methods note of the step, by their numbers.
        observed: Rows whose attention to whole contexts is noted; None: there are none.
    """

    full: Full | None = None
    split: Split | None = None
    alone: DecodePlan | None = None
    reads: Any = None
    loaded: Pages | None = None
    drafted: "DraftedPages | None" = None
    seen: dict[int, Any] = field(default_factory=dict)
    observed: Observed | None = None
