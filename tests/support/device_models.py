"""Small models of several kinds. Their weights are random, and make attention sharp."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl as images
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

from tests.support.engine import Request

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 48,
    "head_dim": 64,
}
"""Where the second layer attends to a sliding window."""
IMAGE = 500
"""The token in whose place an image comes."""
ROTATED_IN_TORCH = {"custom_ops": ["-rotary_embedding"]}
"""Settings of vLLM's compilation, for the model with convolutions.

Its queries are [tokens, heads, size]. vLLM's kernel for the CPU, unlike those for GPUs, takes every
head of these for a token: it rotates by wrong positions, and those of other memory.
"""


def sharpened(model: Any, *names: str) -> Any:
    """A model whose weights with these ends of names are four times as large.

    Those that queries grow with make attention sharp, and those of its output make it weigh more.
    Without that, retrieval changes log-probs by little more than rounding does.
    """
    for name, weight in model.named_parameters():
        if name.endswith(names):
            weight.data *= 4
    return model


def states(path: Path) -> Any:
    """Granite 4 H: the second layer is a state space (Mamba 2)."""
    config = GraniteMoeHybridConfig(
        num_hidden_layers=3,
        layer_types=["attention", "mamba", "attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=512,
        position_embedding_type="rope",
        mamba_n_heads=8,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_head=64,
        mamba_chunk_size=64,
        **SHAPE,
    )
    return GraniteMoeHybridForCausalLM(config)


def convolutions(path: Path | None = None, before: int = 1, repeated: int = 1) -> Any:
    """LFM2: some layers of full attention, and then pairs of a convolution and one of these."""
    kinds = ["full_attention"] * before + ["conv", "full_attention"] * repeated
    config = Lfm2Config(
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        block_dim=SHAPE["hidden_size"],  # what vLLM reads of older configurations
        conv_dim=SHAPE["hidden_size"],
        **SHAPE,
    )
    return sharpened(Lfm2ForCausalLM(config), "q_layernorm.weight", "self_attn.out_proj.weight")


def windows(path: Path) -> Any:
    """Gemma 3: the second layer attends to a sliding window."""
    config = Gemma3TextConfig(
        query_pre_attn_scalar=4,  # for sharp attention
        tie_word_embeddings=False,
        **LAYERS,
        **SHAPE,
    )
    return Gemma3ForCausalLM(config)


def capped(path: Path) -> Any:
    """Gemma 2: many scores are larger than their cap."""
    config = Gemma2Config(
        attn_logit_softcapping=20.0,
        final_logit_softcapping=None,
        query_pre_attn_scalar=1,
        attn_implementation="eager",
        **LAYERS,
        **SHAPE,
    )
    model = Gemma2ForCausalLM(config)
    model.model.embed_tokens.weight.data *= 0.3  # else the last token is repeated, whatever it sees
    for name, weight in model.named_parameters():  # so that attention weighs more
        if name.endswith(("post_attention_layernorm.weight", "model.norm.weight")):
            weight.data += 3  # to which these add one
    return model


def sinks(path: Path) -> Any:
    """gpt-oss."""
    return gpt_oss(layers=3, window=48)


def gpt_oss(layers: int, window: int) -> Any:
    """gpt-oss, whose even layers attend to a sliding window: learned sinks take much of the
    attention."""
    config = GptOssConfig(
        num_hidden_layers=layers,
        head_dim=64,
        sliding_window=window,
        num_local_experts=4,
        num_experts_per_tok=2,
        attn_implementation="eager",
        **SHAPE,
    )
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, 3.0, 3.0)
    return sharpened(model, "q_proj.weight")


def vision(path: Path) -> Any:
    """PaddleOCR-VL, made as Qwen2-VL is: an image's tokens have positions in three dimensions."""
    config = PaddleOCRVLConfig(
        text_config={
            "num_hidden_layers": 2,
            "head_dim": 64,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 12, 12],
            },
            **SHAPE,
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        image_token_id=IMAGE,
        video_token_id=501,
        vision_start_token_id=502,
        vision_end_token_id=503,
        tie_word_embeddings=False,
    )
    words = {f"t{token}": token for token in range(512) if token != IMAGE} | {"<image>": IMAGE}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PaddleOCRVLProcessor(
        image_processor=images.PaddleOCRVLImageProcessorPil(
            size={"shortest_edge": 56 * 56, "longest_edge": 56 * 112}
        ),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            unk_token="t0",
            eos_token="t1",
            pad_token="t2",
            extra_special_tokens={"image_token": "<image>"},
        ),
    ).save_pretrained(path)
    model = PaddleOCRVLForConditionalGeneration(config)
    sharpened(model.model.language_model, "q_proj.weight")
    return model


def make(kind: Any, path: Path) -> Any:
    """A model of one of these kinds, saved at ``path``, and in float32 here."""
    torch.manual_seed(0)
    model = kind(path).eval()
    model.save_pretrained(path)
    return model


@torch.inference_mode()
def logprobs(model: Any, path: Path, request: Request, tokens: list[int]) -> list[float]:
    """The log-probs that transformers gives to the tokens of an answer, with full attention."""
    ids, given = torch.tensor([request.prompt + tokens]), {}
    if request.images:
        processor = PaddleOCRVLProcessor.from_pretrained(path)
        given = dict(processor.image_processor(request.images, return_tensors="pt"))
        count = int(given["image_grid_thw"].prod()) // 4
        place = request.prompt.index(IMAGE)
        ids = torch.cat((ids[:, :place], torch.full((1, count), IMAGE), ids[:, place + 1 :]), 1)
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    scores = model(input_ids=ids, **given).logits[0].log_softmax(-1)
    before = len(ids[0]) - len(tokens) - 1
    return [float(scores[before + i, token]) for i, token in enumerate(tokens)]
