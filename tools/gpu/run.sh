#!/usr/bin/env bash
# Everything that needs a GPU, in steps that fit into calls of ten minutes (docs/gpu.md):
#   bash tools/gpu/run.sh kernels     tests, ceilings, sparse decode attention
#   bash tools/gpu/run.sh baseline    stock vLLM with Llama-3.1-8B's shapes
# Needs no network. Where .gpu/bundle is there (make gpu-bundle), vLLM comes from it. Results go to
# $OUT, by default benchmarks/results; a step that fails does not keep the next from running.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
SITE=${TMPDIR:-/tmp}/kvretrieval-site
BUNDLE=.gpu/bundle

export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$SITE:$PWD
export TRITON_CACHE_DIR=$SITE/triton VLLM_CACHE_ROOT=$SITE/vllm-cache
# The bundle leaves these libraries out, and there is no network to look for anything.
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_NO_USAGE_STATS=1
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
# Containers mount the driver's libraries there without always saying so.
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64

failed=()
step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  echo "== $name (at most $limit s)"
  timeout "$limit" "$@" || failed+=("$name: exit status $?")
}

prepare() {
  mkdir -p "$OUT" "$SITE"
  if [[ -d $BUNDLE && ! -d $SITE/vllm ]]; then
    step unpack 60 "$PYTHON" tools/gpu/bundle.py unpack "$BUNDLE" "$SITE"
  fi
  step install 40 "$PYTHON" -m pip install -q --disable-pip-version-check --no-index --no-deps \
    --no-build-isolation --upgrade --target "$SITE" .
}

kernels() {
  step tests 180 "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu
  step ceilings 130 "$PYTHON" -m benchmarks.gpu.ceilings --output "$OUT/gpu_ceilings.json"
  step sparse_decode 170 "$PYTHON" -m benchmarks.gpu.sparse_decode \
    --output "$OUT/gpu_sparse_decode.json"
}

baseline() {
  step stock_vllm 520 "$PYTHON" -m benchmarks.gpu.stock_vllm --output "$OUT/gpu_stock_vllm.json"
}

for name in "$@"; do
  case $name in kernels | baseline) ;; *) set -- && break ;; esac
done
if [[ $# -eq 0 ]]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
  exit 2
fi
prepare
for name in "$@"; do "$name"; done
if ((${#failed[@]})); then
  printf 'FAILED %s\n' "${failed[@]}"
  exit 1
fi
