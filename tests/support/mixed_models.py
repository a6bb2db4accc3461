"""Small models whose layers are of several kinds, with random weights that make attention sharp."""

from typing import Any

from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)

from tests.support import device_models, torchvision
from tests.support.device_models import SHAPE, sharpened

FOUR = SHAPE | {"num_key_value_heads": 4, "eos_token_id": 511}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def gemma3() -> Any:
    """Gemma 3: five layers of six have a window."""
    config = Gemma3TextConfig(
        num_hidden_layers=12,
        layer_types=[*[SLIDING] * 5, FULL] * 2,
        sliding_window=128,
        head_dim=64,
        query_pre_attn_scalar=4,
        tie_word_embeddings=False,
        **SHAPE,
    )
    return Gemma3ForCausalLM(config)


def gemma3n() -> Any:
    """Gemma 3n: its last layers read the keys and values of earlier ones."""
    config = Gemma3nTextConfig(
        num_hidden_layers=6,
        layer_types=[SLIDING, FULL] * 3,
        sliding_window=128,
        head_dim=64,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=512,
        altup_num_inputs=2,
        laurel_rank=16,
        pad_token_id=None,  # whose embedding of zeros vLLM divides by its length
        **SHAPE,
    )
    model = Gemma3nForCausalLM(config)
    model.model.embed_tokens.weight.data *= 0.3  # else the last token is repeated, whatever it sees
    return model


def gemma4(shared: int = 0) -> Any:
    """Gemma 4: heads of layers with full attention are twice as large as those of windows.

    Args:
        shared: Layers at the end that read the keys and values of earlier ones, as in E2B and E4B.
    """
    config = Gemma4TextConfig(
        num_hidden_layers=4 + shared,
        layer_types=[SLIDING, FULL] * (2 + shared // 2),
        sliding_window=128,
        head_dim=64,
        global_head_dim=128,
        num_kv_shared_layers=shared,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=512,
        tie_word_embeddings=False,
        **SHAPE,
    )
    return sharpened(Gemma4ForCausalLM(config), "q_norm.weight")


def gemma4_shared() -> Any:
    """Gemma 4 E2B: its last layers read the keys and values of earlier ones."""
    return gemma4(shared=4)


def gpt_oss() -> Any:
    """gpt-oss: every second layer has a window, and all have learned sinks."""
    return device_models.gpt_oss(layers=4, window=128)


def llama4() -> Any:
    """Llama 4: every second layer attends to chunks of the context; none has experts."""
    config = Llama4TextConfig(
        num_hidden_layers=4,
        head_dim=64,
        intermediate_size_mlp=512,
        interleave_moe_layer_step=9,
        no_rope_layer_interval=2,
        attention_chunk_size=256,
        **SHAPE,
    )
    return Llama4ForCausalLM(config)


def lfm2() -> Any:
    """LFM2: every second layer is a convolution."""
    return device_models.convolutions(before=0, repeated=3)


def granite() -> Any:
    """Granite 4 H: every second layer is a state space (Mamba 2)."""
    config = GraniteMoeHybridConfig(
        num_hidden_layers=4,
        layer_types=["mamba", "attention"] * 2,
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


def nemotron() -> Any:
    """Nemotron-H: state spaces, attention and feed-forward networks are layers of their own."""
    config = NemotronHConfig(
        layers_block_type=["mamba", "attention", "mlp"] * 2,
        head_dim=64,
        mamba_num_heads=8,
        mamba_head_dim=64,
        n_groups=1,
        ssm_state_size=16,
        chunk_size=64,
        **SHAPE,
    )
    return NemotronHForCausalLM(config)


def falcon_h1() -> Any:
    """Falcon-H1: every layer has full attention beside a state space (Mamba 2)."""
    states = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 64}
    config = FalconH1Config(num_hidden_layers=4, head_dim=64, **states, **FOUR)
    return FalconH1ForCausalLM(config)


def zamba2() -> Any:
    """Zamba2: state spaces, half of them behind full attention in the same layer."""
    kinds = ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba", "hybrid", "mamba"]
    config = Zamba2Config(
        num_hidden_layers=8,
        layers_block_type=kinds,
        num_mem_blocks=2,
        use_mem_rope=True,
        **FOUR,
    )
    return Zamba2ForCausalLM(config)


def qwen3_next() -> Any:
    """Qwen3-Next: every second layer is a gated delta net."""
    config = Qwen3NextConfig(
        num_hidden_layers=4,
        layer_types=[LINEAR, FULL] * 2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        **SHAPE,
    )
    return sharpened(Qwen3NextForCausalLM(config), "q_norm.weight")


def qwen3_5() -> Any:
    """Qwen3.5: every second layer is a gated delta net. vLLM loads it with torchvision only."""
    torchvision.permit()
    config = Qwen3_5TextConfig(
        num_hidden_layers=4,
        layer_types=[LINEAR, FULL] * 2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        **SHAPE,
    )
    return sharpened(Qwen3_5ForCausalLM(config), "q_norm.weight")
