"""A GGUF file of a checkpoint of the Llama architecture; run in the peers' environment.

python -m benchmarks.peers.gguf_model CHECKPOINT OUTPUT f16|q8_0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TYPES = {
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}


def tensors(path: Path) -> dict[str, Any]:
    """The weights of a file of safetensors in bfloat16, as float32."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    found = {}
    for name, about in header.items():
        if about["dtype"] != "BF16":
            raise ValueError(f"{name} has the type {about['dtype']}, not bfloat16")
        begin, end = about["data_offsets"]
        halves = data[begin:end].view(np.uint16).astype(np.uint32)
        found[name] = (halves << 16).view(np.float32).reshape(about["shape"])
    return found


def interleaved(weight: Any, heads: int) -> Any:
    """Rows of queries or keys in the order of llama.cpp's rotation: pairs lie side by side."""
    channels = weight.shape[0] // heads
    halves = weight.reshape(heads, 2, channels // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, vocabulary: int) -> None:
    """Write byte-level BPE as the checkpoint's ``tokenizer.json`` has it."""
    described = json.loads((checkpoint / "tokenizer.json").read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    ids = dict(described["model"]["vocab"])
    added = {entry["content"]: entry["id"] for entry in described["added_tokens"]}
    by_id = {number: token for token, number in (ids | added).items()}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(vocabulary)]
    special = set(added.values())
    types = [
        gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL
        for number in range(vocabulary)
    ]
    merges = described["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    for key, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        token = settings.get(key)
        content = token["content"] if isinstance(token, dict) else token
        if content in ids | added:
            add((ids | added)[content])
    writer.add_add_bos_token(False)
    template = checkpoint / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())


def convert(checkpoint: Path, output: Path, kind: str) -> None:
    """Write the checkpoint's weights and its rotation, YaRN included, to one file."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{checkpoint} is of the type {config['model_type']}, not llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layers, rope = config["num_hidden_layers"], config["rope_parameters"]
    stored, of_file = TYPES[kind]
    partial = output.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    writer.add_name(checkpoint.name)
    writer.add_file_type(of_file)
    writer.add_block_count(layers)
    # llama.cpp takes no more, and there are tokens behind the longest document.
    writer.add_context_length(2 * config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    add_tokenizer(writer, checkpoint, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, weight in tensors(checkpoint / "model.safetensors").items():
        target = names.get_name(name, try_suffixes=(".weight",))
        if target is None:
            raise ValueError(f"llama.cpp has no name for {name}")
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, heads if "q_proj" in name else kv_heads)
        if weight.ndim == 1:
            writer.add_tensor(target, weight)
        else:
            packed = gguf.quants.quantize(weight, stored)
            writer.add_tensor(target, packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(output)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
