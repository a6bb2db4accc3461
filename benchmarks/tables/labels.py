"""Words for the tasks and variants of result files."""

TASKS = {
    "alike-smollm2-4k": "alike headings",
    "copy-qwen-4k": "copy, Qwen2.5-Coder-0.5B, 4K",
    "copy-smollm2-2k": "copy, SmolLM2-135M, 2K",
    "generation-smollm2-4k": "512 tokens each",
    "novel-smollm2-4k": "novel, SmolLM2-135M, 4K",
    "turns-smollm2-4k": "passages",
    "passkey-gemma3-4k": "pass key, Gemma 3 270M, 4K",
    "passkey-gemma3-16k": "pass key, Gemma 3 270M, 16K",
    "passkey-qwen-4k": "pass key, Qwen2.5-Coder-0.5B, 4K",
    "passkey-qwen-8k": "pass key, Qwen2.5-Coder-0.5B, 8K",
    "lookup-qwen-4k": "key-value lookup, Qwen2.5-Coder-0.5B, 4K",
}
"""Tasks of `benchmarks.quality accuracy`: text, model, tokens of context."""

VARIANTS = {
    "full": "full attention",
    "oracle": "best pages by all keys (oracle)",
    "kvretrieval": "**kvretrieval**",
    "every_step": "freekv, selecting at every step",
    "sink_window": "first and last tokens alone",
    "control": "first and last tokens alone",
    "kvretrieval_rerank": "kvretrieval, `rerank: 2`",
    "mean": "`mean`",
    "mean_std": "`mean_std`",
    "mean_std_half": "`mean_std`, half a deviation",
    "bounding": "`bounding`",
    "representative": "`representative`",
    "one_bit": "`one_bit`",
    "low_rank_4": "`low_rank`, rank 4",
    "low_rank_8": "`low_rank`, rank 8",
    "shadowkv_scores": "the same, `outliers: 0`",
    "pooling_relative": "`relative`",
    "pooling_max": "`max`",
    "pooling_sum": "`sum`",
    "codec_k8v4": "kvretrieval, `k8v4`",
    "codec_k4v4": "kvretrieval, `k4v4`",
    "codec_k2v2": "kvretrieval, `k2v2`",
    "entropykv_uniform": "entropykv, all layers alike",
    "entropykv_32": "entropykv, 32 queries",
    "entropykv_32_uniform": "entropykv, 32 queries, all layers alike",
    "threshold_0.8": "freekv, threshold 0.8",
    "threshold_0.7": "freekv, threshold 0.7",
    "reuse": "freekv, no correction",
    "page_16": "freekv, `page_size: 16`",
    "kvretrieval_page_16": "kvretrieval, `page_size: 16`",
    "paired": "the same, `summary_size: 32`",
    "paired_rest": "the same, `remainder: 0.003`",
    "oracle_page_16": "best pages of 16 by all keys (oracle)",
}
"""Variants of `benchmarks.quality`; others are named as they are."""

INDEXES = {
    "one_bit_tokens": "`one_bit`, single tokens (`fier`)",
    "low_rank_4": "`low_rank`, rank 4",
    "low_rank_8": "`low_rank`, rank 8",
    "low_rank": "**`low_rank`**, rank 12 (`kvretrieval`)",
    "low_rank_rerank": "`low_rank`, two candidates per page scored again",
}
"""Indexes of `benchmarks.ops planning`; others are named as they are."""
