#!/usr/bin/env bash
# transformers 5.19: with longrope or dynamic scaling, a prompt that is read in chunks gets another answer
#
# generate(prefill_chunk_size=N) reads a prompt piece by piece into one KV cache, and is meant to save
# memory, no more. The rotations of longrope (Phi-3 and its like) and of dynamic scaling depend on the
# length so far, and are chosen again for each piece. Keys of pieces within the original length have
# been rotated by the short factors (the unscaled base), those of later pieces by the long ones, and
# the queries after them meet both. The logits of the last token differ by as much as logits do. A
# chat that grows beyond the original length, with its cache kept, is in the same state. YaRN does not
# depend on the length, and agrees up to rounding.
#
# Expected: the answer of a prompt that is read at once.
#
# Packages: transformers==5.19.0 torch==2.13.0
# Seen: 2026-11-28, Python 3.11, Linux x86-64. Exit code 0: still so; 1: changed.
# FINDING_PYTHON=/path/to/python uses an environment that already has the packages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${FINDING_PYTHON:-}" ]; then
  python3 -m venv "$folder/env"
  "$folder/env/bin/python" -m pip install -q transformers==5.19.0 torch==2.13.0
  FINDING_PYTHON=$folder/env/bin/python
fi
cd "$folder"
"$FINDING_PYTHON" - <<'END_OF_PROGRAM'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ORIGINAL, PROMPT, CHUNK = 128, 200, 100
KINDS = {
    "longrope": dict(original_max_position_embeddings=ORIGINAL, short_factor=[1.0] * 8, long_factor=[4.0] * 8),
    "dynamic": dict(),
    "yarn": dict(original_max_position_embeddings=ORIGINAL),
}
tokens = torch.randint(3, 250, (1, PROMPT), generator=torch.Generator().manual_seed(0))
same = {}
for kind, more in KINDS.items():
    torch.manual_seed(0)
    rope = dict(rope_type=kind, rope_theta=1e4, factor=4.0, **more)
    longest = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.2, max_position_embeddings=longest, rope_parameters=rope,
        )
    ).eval()
    with torch.inference_mode():
        whole = model(tokens).logits[0, -1]
        cache = model(tokens[:, :CHUNK], use_cache=True).past_key_values
        parts = model(tokens[:, CHUNK:], past_key_values=cache).logits[0, -1]
        once, pieces = (
            model.generate(tokens, max_new_tokens=8, do_sample=False, prefill_chunk_size=size)[0, PROMPT:].tolist()
            for size in (None, CHUNK)
        )
    same[kind] = once == pieces
    print(f"{kind}: logits up to {whole.abs().max():.2f} differ by {(whole - parts).abs().max():.6f}")
    print(f"  at once {once}\n  in chunks of {CHUNK} {pieces}")
raise SystemExit(same != {"longrope": False, "dynamic": False, "yarn": True})
END_OF_PROGRAM
