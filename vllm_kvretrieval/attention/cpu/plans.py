"""How the layers of a group attend in one step; built by `metadata`."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from vllm_kvretrieval.attention.cpu.blocks import Blocks
from vllm_kvretrieval.attention.cpu.chunks import Chunks
from vllm_kvretrieval.attention.cpu.keeping import KeptRows, Watch
from vllm_kvretrieval.attention.cpu.observation import Observed
from vllm_kvretrieval.kernels import ContextSelector, DecodeRows, PromptLists, TokenLists


class Pages(NamedTuple):
    """Pages of some requests' contexts.

    Attributes:
        ids: int32 [n]; each page once.
        lengths: int32 [n]; tokens in each.
    """

    ids: torch.Tensor
    lengths: torch.Tensor


@dataclass
class DecodePlan:
    """How rows of one method decode whose contexts exceed their budgets.

    Attributes:
        method: Its number among the engine's methods.
        rows: The requests, each of which decodes one token.
        index: int64 [rows]; their places in the batch, None where they are the first ones in it.
        lists: What each (row, KV head) attends to; its entries are the rows' ``lists``.
        schedule: Where vLLM's kernel attends, how; None: ours does.
        weights: float32 [rows, n]; where filter layers select, those of their n latest queries.
        listed: Whose selection the lists hold, of filter layers.
        kept: Of a method that drops tokens, what these rows keep.
    """

    method: int
    rows: DecodeRows
    index: torch.Tensor | None
    lists: TokenLists
    schedule: "Schedule | None"
    weights: torch.Tensor | None = None
    listed: ContextSelector | None = None
    kept: KeptRows | None = None


class Schedule(NamedTuple):
    """For vLLM's kernel, to which every (row, KV head) is a sequence of its own.

    Attributes:
        seq_lens: int32 [rows * kv_heads]; tokens that each attends to, in every layer.
        query_start_loc: int32 [rows * kv_heads + 1]; 0, 1, 2, ...
        scheduler_metadata: vLLM's own.
    """

    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    scheduler_metadata: torch.Tensor


@dataclass
class Whole:
    """Rows of one token that attend to whole contexts, as vLLM has it.

    Requests that ask for exact attention, contexts within the budget, and prompts whose last chunk
    is a single token.

    Attributes:
        index: int64 [rows]; their places in the batch, None where they are the first ones in it.
        by: Where vLLM's kernel attends, its metadata for them alone; where ours does, all pages of
            their contexts.
    """

    index: torch.Tensor | None
    by: CPUAttentionMetadata | TokenLists


@dataclass
class Prefill:
    """Requests that read their prompts.

    Attributes:
        start: Their first token in the batch.
        by: Where vLLM's kernel attends, its metadata for them alone; where ours does, their lists.
            Tokens are counted from ``start``.
        staged: The pages to copy into the staging buffer, which is then read, as
            :class:`StagedContext` has them; None where the cache itself is.
        chunks: Where filters select for prompts, what to copy there instead; ``by`` is of these.
        blocks: Where prompts select pages themselves, what selects; ``by`` are its lists.
    """

    start: int
    by: CPUAttentionMetadata | PromptLists
    staged: torch.Tensor | None
    chunks: Chunks | None = None
    blocks: Blocks | None = None

    @property
    def in_place(self) -> bool:
        """Whether the prompts attend to whole contexts where these are."""
        return self.staged is None and self.chunks is None and self.blocks is None

    @property
    def tokens(self) -> slice:
        """Their tokens in the batch."""
        starts = self.by.starts if isinstance(self.by, PromptLists) else self.by.query_start_loc
        return slice(self.start, self.start + int(starts[-1]))


@dataclass
class Full:
    """How a batch attends to whole contexts by our own kernels.

    Attributes:
        rows: All pages of the requests with a single token, which lead the batch; None: there are
            none.
        prompts: The requests after them; None: there are none.
    """

    rows: TokenLists | None
    prompts: Prefill | None


@dataclass
class Split:
    """A step whose requests do not all take vLLM's own path.

    Attributes:
        rows: Requests with a single token; they lead the batch. Where contexts are not read in
            place, those of them that neither choose nor fit in slots are prefill, too.
        decode: Those of them that attend to pages of their own choice, by method.
        whole: The others.
        prefill: The requests after them, in turns.
    """

    rows: int
    decode: list[DecodePlan]
    whole: Whole | None
    prefill: list[Prefill]


@dataclass
class RetrievalMetadata(CPUAttentionMetadata):
    """vLLM's metadata of the whole batch, for dense layers and contexts within budget.

    Attributes:
        full: How dense layers attend, and retrieval layers whose contexts are within budget; None:
            by vLLM's kernel.
        split: How retrieval layers attend otherwise; None where they attend as dense layers do.
        reads: What layers make ready; see :meth:`LayerStorage.contexts`.
        loaded: Pages whose indexes are to be built from their keys.
        observed: Queries that filter layers keep, where they select by more than the last.
        watches: Queries by whose attention tokens are kept.
    """

    full: Full | None = None
    split: Split | None = None
    reads: Any = None
    loaded: Pages | None = None
    observed: Observed | None = None
    watches: list[Watch] = field(default_factory=list)
