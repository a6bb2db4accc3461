#!/usr/bin/env bash
# torch 2.13: float8_e8m0fnu makes 4 of -4 and 2^-127 of 0; ml_dtypes makes NaN of both
#
# e8m0 holds the scales of MX formats (MXFP4, MXFP8): powers of two, without a sign and without zero.
# torch's conversion drops the sign of a negative value and gives zero the smallest scale, without a
# word; ml_dtypes gives NaN for both. A scale that went wrong on the way (a sign, a zero that stood
# for "empty") is found at once by the one and becomes ordinary data by the other.
#
# Expected: NaN, which the format has for values that it does not.
#
# Packages: torch==2.13.0 ml_dtypes==0.6.0 numpy
# Seen: 2026-11-28, Python 3.11, Linux x86-64. Exit code 0: still so; 1: changed.
# FINDING_PYTHON=/path/to/python uses an environment that already has the packages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${FINDING_PYTHON:-}" ]; then
  python3 -m venv "$folder/env"
  "$folder/env/bin/python" -m pip install -q torch==2.13.0 ml_dtypes==0.6.0 numpy
  FINDING_PYTHON=$folder/env/bin/python
fi
cd "$folder"
"$FINDING_PYTHON" - <<'END_OF_PROGRAM'
import ml_dtypes
import numpy as np
import torch

VALUES = np.array([-4, -0.5, 0, 3, 4], np.float32)
torchs = torch.from_numpy(VALUES).to(torch.float8_e8m0fnu).float().numpy()
others = VALUES.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
for name, seen in (("of", VALUES), ("torch", torchs), ("ml_dtypes", others)):
    print(f"{name:10}", seen.tolist())
nan = float("nan")
still = np.array_equal(torchs, np.float32([4, 0.5, 2.0**-127, 4, 4]))
raise SystemExit(not (still and np.array_equal(others, np.float32([nan, nan, nan, 4, 4]), equal_nan=True)))
END_OF_PROGRAM
