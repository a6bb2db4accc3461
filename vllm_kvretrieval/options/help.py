"""What each option of an engine is, for ``vllm serve --help``."""

from vllm_kvretrieval.options.engine import (
    DEFAULT_BLOCK,
    DEFAULT_CHUNK,
    DEFAULT_QUERIES,
    PAGE_SIZES,
)
from vllm_kvretrieval.retrieval.codec import CODECS
from vllm_kvretrieval.retrieval.heads import SHARE as RETRIEVAL_HEADS
from vllm_kvretrieval.retrieval.index import OWN as OWN_INDEXES
from vllm_kvretrieval.retrieval.keeping import ALL
from vllm_kvretrieval.retrieval.method import DEFAULT_THRESHOLD, ENTRY_TOKENS, OPTIONS, POOLINGS
from vllm_kvretrieval.retrieval.roles import OBSERVATIONS, WINDOW
from vllm_kvretrieval.retrieval.schedule import SCHEDULES

HELP = {
    "budget": "tokens of context that a KV head attends to in a decode step; a shorter context is "
    "attended to whole, exactly (default: 2048)",
    "budget_shares": "how layers and KV heads share what is selected: uniform, pyramid (less with "
    "depth), entropy (of methods that drop tokens), a number per layer that retrieves, or a list "
    "of them, one per KV head; or a JSON file of these (default: the method's, mostly uniform)",
    "sink": "tokens at the start of the context, always attended to (default: a page, or budget / "
    "16, as the method has it)",
    "window": "most recent tokens, always attended to; where these are raw in fast memory and the "
    "rest is not, also a size per request, in all layers of a worker, e.g. 8MiB (default: two "
    "pages, or budget / 16, as the method has it)",
    "page_size": "tokens per page, the unit of retrieval; smaller ones hold less that is unwanted, "
    f"and there are more to choose from, one of {PAGE_SIZES} (default: the method's, 32 for most)",
    "unit": "what is selected: page, or token (single tokens, by an index that scores them; the "
    "KV cache of retrieval layers is then laid out token by token) (default: the method's, page "
    "for most)",
    "summary_size": "tokens per entry of the page index, page_size or less; smaller ones tell "
    f"pages apart better, and cost memory and time in proportion, one of {ENTRY_TOKENS} (default: "
    "the page size)",
    "correction_threshold": "a KV head whose query has a lower cosine similarity to the previous "
    "step's selects anew before attention; 1 selects at every step, -1 never corrects "
    f"(default: {DEFAULT_THRESHOLD})",
    "index": "what is kept of a page's keys to select pages by, a name or {name: parameters}: "
    f"{', '.join(index.name for index in OWN_INDEXES)} (default: the method's)",
    "pooling": "how the scores of the query heads that share a KV head become one: "
    f"{', '.join(POOLINGS)} (default: the method's)",
    "schedule": "when pages are selected: "
    f"{', '.join(f'{name} ({s.meaning})' for name, s in SCHEDULES.items())} (default: the "
    "method's)",
    "rerank": "score so many candidates per page selected once more, by their keys; 0: none "
    "(default: the method's)",
    "also": "further methods that requests may name: presets, or names with options of a method "
    f"({', '.join(OPTIONS)}; preset: what they change); each index takes memory (default: none)",
    "filters": "layers that select tokens for the layers after them, as a list, or a file that "
    "vllm-kvretrieval calibrate wrote; for schedule shared_layers (default: what is known of the "
    "model)",
    "observation": "the queries by whose attention filters select: "
    f"{', '.join(OBSERVATIONS)}; all but last take {WINDOW} (default: last). Of methods that drop "
    f"tokens: how many of a prompt's last queries count, or {ALL} (default: the method's)",
    "heads": "which KV heads attend to whole contexts, for schedule by_head: a file that "
    "vllm-kvretrieval heads wrote, {file: path, share: of the KV heads}, or a list per layer that "
    "retrieves of 1 or 0 per KV head (default: what is known of the model, a share of "
    f"{RETRIEVAL_HEADS})",
    "prefill_budget": "tokens before a chunk of a prompt that it attends to: sink, window, and "
    "pages that some of its queries select, or tokens that a filter selects for the layers after "
    "it; prompts beyond are approximate then (default: none; prefill is exact)",
    "prefill_chunk": "with prefill_budget: tokens of a prompt that select at once (default: "
    f"{DEFAULT_BLOCK}), or for which a filter selects at once ({DEFAULT_CHUNK})",
    "prefill_queries": "with prefill_budget: how many queries of a chunk select pages for it "
    f"(default: {DEFAULT_QUERIES})",
    "dense_layers": "leading layers of the model that keep their own attention, of whatever kind "
    "it is (default: the method's, 1 for most)",
    "max_budget": "most that a request may ask for as its budget (default: budget: requests may "
    "only lower it)",
    "memory_fraction": "share of the KV cache that a request reads, dense layers included: its "
    "budget then follows from its prompt's length, up to max_budget (default: none; the budget is "
    "fixed)",
    "allow_exact": "whether requests may ask for full attention (default: true)",
    "reuse": "which keys and values requests share by the prefix cache: all (as far as their "
    "options allow), or exact (those that full attention has computed) (default: all)",
    "attention": "whose kernel attends to whole contexts (prompts, contexts within the budget, "
    "dense layers) on a CPU: vllm, bit by bit as vLLM alone; or own, exact to rounding (default: "
    "own where it is faster, see docs/options.md)",
    "home": "where the whole KV cache of the retrieval layers lives: device (vLLM's own memory), "
    "disk (a file; fast memory then holds recalled pages only), host (on GPUs), or auto (device if "
    "max_num_seqs requests of max_model_len fit there) (default: the method's)",
    "home_bytes": "size of a slow home, per worker, e.g. 64GiB (default: room for the requests of "
    "max_model_len that run at once, as far as fast memory and the disk, or the host, allow)",
    "home_path": "directory of the file of home=disk; one in memory (tmpfs) is taken only if it is "
    "named here (default: /var/tmp, or the directory for temporary files where there is none)",
    "codec": "how home=disk holds pages that are full: "
    f"{', '.join(f'{name} ({codec.meaning})' for name, codec in CODECS.items())} (default: the "
    "method's, raw for most)",
    "recall_cache_bytes": "fast memory for recalled pages or tokens, per worker, e.g. 2GiB "
    "(default: what vLLM would give to the KV cache, less dense layers and page index)",
}
"""What each option of an engine is, by its name."""
