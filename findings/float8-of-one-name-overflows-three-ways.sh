#!/usr/bin/env bash
# float8 of one name overflows in three ways: torch, ml_dtypes and ONNX Runtime, and e4m3fnuz unlike e4m3fn
#
# A value beyond the largest of float8_e4m3fn (448) becomes 448 in torch 2.13 on a CPU, infinity
# included; in ml_dtypes (NumPy's and JAX's float8 of that name) and in ONNX Runtime with saturate=0 it
# becomes NaN; with saturate=1 it is 448. Within torch the formats differ as well: e4m3fnuz, whose
# largest value is 240, turns what is too large into NaN. So weights or KV-cache scales that are
# converted by one library and checked by another (is there a NaN? is there a 448?) pass or fail by
# the library, not by the data.
#
# Expected: one rule for a format, at least within a library.
#
# Packages: torch==2.13.0 ml_dtypes==0.6.0 onnx==1.23.2 onnxruntime==1.32.0
# Seen: 2026-11-28, Python 3.11, Linux x86-64. Exit code 0: still so; 1: changed.
# FINDING_PYTHON=/path/to/python uses an environment that already has the packages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${FINDING_PYTHON:-}" ]; then
  python3 -m venv "$folder/env"
  "$folder/env/bin/python" -m pip install -q torch==2.13.0 ml_dtypes==0.6.0 onnx==1.23.2 onnxruntime==1.32.0
  FINDING_PYTHON=$folder/env/bin/python
fi
cd "$folder"
"$FINDING_PYTHON" - <<'END_OF_PROGRAM'
import ml_dtypes
import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper

VALUES = np.array([464, 500, 1e6, np.inf], np.float32)


def by_onnx(saturate):
    """The values cast by ONNX Runtime, there and back."""
    nodes = [
        helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E4M3FN, saturate=saturate),
        helper.make_node("Cast", ["y"], ["z"], to=TensorProto.FLOAT),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [len(VALUES)]) for name in "xz"]
    graph = helper.make_graph(nodes, "cast", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": VALUES})[0]


largest, nan = [448.0] * 4, [448.0] + [float("nan")] * 3
results = {
    "torch e4m3fn": (torch.from_numpy(VALUES).to(torch.float8_e4m3fn).float().numpy(), largest),
    "torch e4m3fnuz": (torch.from_numpy(VALUES).to(torch.float8_e4m3fnuz).float().numpy(), [float("nan")] * 4),
    "ml_dtypes e4m3fn": (VALUES.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), nan),
    "ONNX Runtime, saturate=1": (by_onnx(1), largest),
    "ONNX Runtime, saturate=0": (by_onnx(0), nan),
}
print("of", VALUES.tolist())
for name, (seen, _) in results.items():
    print(f"  {name}: {seen.tolist()}")
raise SystemExit(not all(np.array_equal(seen, wanted, equal_nan=True) for seen, wanted in results.values()))
END_OF_PROGRAM
