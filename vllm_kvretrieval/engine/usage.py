"""Counts of what requests attend to and recall, and the log of them."""

from typing import NamedTuple

from vllm.logger import init_logger

logger = init_logger("vllm.kvretrieval.requests")


class Counts(NamedTuple):
    """The counts of one request, or of all. Units are (page, KV head) pairs, per layer.

    A method that selects single tokens attends to tokens in place of pages; ``attended`` then
    counts them in pages, and ``looked_up``, ``missed`` and ``recalled`` count tokens of KV heads.

    Attributes:
        corrected: KV heads that selected anew before attention.
        looked_up: Units of sparse steps, including sink and window, that were looked up in recall
            caches.
        missed: The units among these that were read from home while the step waited.
        recalled: Units read from home, ahead or not.
        steps: Decode steps.
        sparse_steps: Decode steps that attended to a part of the context.
        pages: Pages of the contexts of sparse steps, added up.
        attended: Units that sparse steps attended to, with or without a recall cache.
        prompt: Pairs of tokens that exact prefill would attend to, in layers that prefill sparsely;
            the later token of a pair belongs to the prompt. 0 if there are no such layers.
        prompt_attended: The pairs among these that were attended to.
    """

    corrected: int = 0
    looked_up: int = 0
    missed: int = 0
    recalled: int = 0
    steps: int = 0
    sparse_steps: int = 0
    pages: int = 0
    attended: int = 0
    prompt: int = 0
    prompt_attended: int = 0


def log_usage(req_id: str, context: int, counts: Counts, retrieval_heads: int) -> None:
    """Log the figures of a request that has ended.

    Args:
        req_id: The id of the request.
        context: Tokens of its context.
        counts: The request's counts.
        retrieval_heads: KV heads times retrieval layers.
    """
    sparse_heads = max(counts.sparse_steps * retrieval_heads, 1)
    attended = counts.attended / max(retrieval_heads, 1)  # pages
    logger.debug(
        "kv_retrieval request_id=%s context=%d decode_steps=%d sparse_steps=%d "
        "pages_attended=%d pages_total=%d kv_read_share=%.4f corrected_share=%.4f "
        "recall_hit_rate=%.4f units_recalled=%d prefill_read_share=%.4f",
        req_id,
        context,
        counts.steps,
        counts.sparse_steps,
        counts.attended // sparse_heads,
        counts.pages // max(counts.sparse_steps, 1),
        attended / counts.pages if counts.pages else 1.0,
        counts.corrected / sparse_heads,
        1 - counts.missed / counts.looked_up if counts.looked_up else 1.0,
        counts.recalled,
        counts.prompt_attended / counts.prompt if counts.prompt else 1.0,
    )
