#!/usr/bin/env bash
# Everything that needs a GPU, in calls of less than ten minutes each (docs/gpu.md):
#   bash tools/gpu/run.sh kernels     tests of the kernels, one decode layer, ceilings, sparse decode
#   bash tools/gpu/run.sh engine      whole engines: right, then fast; KV cache on the device
#   bash tools/gpu/run.sh host        whole engines; KV cache in host memory
# Parts of these: baseline (stock vLLM's prefill; the end of engine), sanitizer.
# Needs no network. Where .gpu/bundle is there (make gpu-bundle), vLLM comes from it. Results go to
# $OUT, by default benchmarks/results; a step that fails does not keep the next from running. A call
# ends after $CALL_SECONDS, by default 580: what comes last gets the time that is left, if these are
# $LEAST_SECONDS, by default 10.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
SITE=${TMPDIR:-/tmp}/kvretrieval-site
BUNDLE=.gpu/bundle
CALL_SECONDS=${CALL_SECONDS:-580}
LEAST_SECONDS=${LEAST_SECONDS:-10}

export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$SITE:$PWD
export TRITON_CACHE_DIR=$SITE/triton VLLM_CACHE_ROOT=$SITE/vllm-cache
# The bundle leaves these libraries out, and there is no network to look for anything.
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_NO_USAGE_STATS=1
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
# Containers mount the driver's libraries there without always saying so.
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64

done_steps=() failed=()
step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 left=$((CALL_SECONDS - SECONDS)) began=$SECONDS status=0
  shift 2
  if ((left < LEAST_SECONDS)); then
    failed+=("$name: no time left")
    return
  fi
  ((limit < left)) || limit=$left
  echo "== $name (at most $limit s)"
  # Interrupted, a program ends the engines that it has started; they are in groups of their own.
  timeout --signal=INT --kill-after=20 "$limit" "$@" || status=$?
  if ((status == 124 || status == 137)); then
    failed+=("$name: stopped after $limit s")
  elif ((status)); then
    failed+=("$name: exit status $status")
  fi
  done_steps+=("$name: $((SECONDS - began)) s")
}
measure() { # SECONDS MODULE RESULT OPTIONS...
  step "$3" "$1" "$PYTHON" -m "benchmarks.gpu.$2" --output "$OUT/gpu_$3.json" "${@:4}"
}
check() { # NAME SECONDS TESTS...
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "$PYTHON" -m pytest -q -p no:cacheprovider --durations=5 "$@"
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
  check tests 150 tests/gpu --ignore tests/gpu/test_engine.py
  measure 170 decode_layer decode_layer
  sanitizer
  measure 90 ceilings ceilings
  measure 120 sparse_decode sparse_decode
}

# The smallest cases of the ops that merge, count or hand out by atomics: races, then addresses.
sanitizer() {
  local tool
  if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer is not here: left out"
    return
  fi
  for tool in racecheck memcheck; do
    step "$tool" 40 compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
      "$PYTHON" -m pytest -q -x -p no:cacheprovider tests/gpu/test_slots.py \
      -k "test_sparse_decode and 4-4-64-dtype0 or test_resolve and 9-6"
  done
}

engine() {
  check toy_eager 110 tests/gpu/test_engine.py -k eager
  VLLM_GPU_SYNC_CHECK=error check toy_graphs 110 tests/gpu/test_engine.py \
    -k "graphs or test_selections and eager"
  measure 330 engine_decode engine_decode --engine stock --engine device
  baseline
}

baseline() {
  measure 520 engine_decode stock_vllm --engine stock --prefill
}

host() {
  check toy_host 90 tests/gpu/test_engine.py -k host
  measure 220 engine_decode engine_home --engine device --engine host --batch 1 --batch 2 \
    --home-gib 36
  measure 170 engine_decode engine_equal_memory --engine stock --engine host --context 131072 \
    --batch 1 --batch 8 --cache-gib 17 --home-gib 100 --uncompiled
  measure 110 engine_decode engine_million --engine host --context 1000000 --batch 1 \
    --model benchmarks/gpu/qwen2.5-7b-1m --uncompiled
}

for name in "$@"; do
  case $name in kernels | sanitizer | engine | baseline | host) ;; *) set -- && break ;; esac
done
if [[ $# -eq 0 ]]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
  exit 2
fi
prepare
for name in "$@"; do "$name"; done
printf '\n== summary\n'
"$PYTHON" -m benchmarks.gpu.goals "$OUT"
printf '%s\n' "${done_steps[@]}"
if ((${#failed[@]})); then
  printf 'FAILED %s\n' "${failed[@]}"
  exit 1
fi
