#!/usr/bin/env bash
# Everything that needs a GPU, in calls of less than ten minutes each (docs/gpu.md):
#   bash tools/gpu/run.sh day        before all else: what no CPU can show, whole engines, decoding as
#                                    a user starts it, beside stock vLLM
#   bash tools/gpu/run.sh kernels    tests of all kernels, one decode layer, ceilings, sparse decode
#   bash tools/gpu/run.sh engine     decoding in whole engines, preemption; KV cache on the device
#   bash tools/gpu/run.sh host       decoding in whole engines; KV cache in host memory
#   bash tools/gpu/run.sh million    a context of a million tokens in host memory
#   bash tools/gpu/run.sh baseline   stock vLLM's prefill
#   bash tools/gpu/run.sh sanitizer  the smallest cases under compute-sanitizer
# Parts of the first, to repair while a machine is there: smoke, toy, toy_host, user, stock.
# Needs no network. Where .gpu/bundle is there (make gpu-bundle), vLLM comes from it. Results go to
# $OUT, by default benchmarks/results, and what is printed to gpu_CALL.log there. A step that fails
# does not keep the next from running; the summary says its first error, and where to look. A call ends after $CALL_SECONDS, by default 550: a step gets
# the time that is left, and is left out where that is too little for it.
set -uo pipefail
ulimit -c 0
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit

PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
SITE=${TMPDIR:-/tmp}/kvretrieval-site
BUNDLE=.gpu/bundle
CALL_SECONDS=${CALL_SECONDS:-550}

export PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$SITE/pycache PYTHONPATH=$SITE:$PWD
export TRITON_CACHE_DIR=$SITE/triton VLLM_CACHE_ROOT=$SITE/vllm-cache
# The bundle leaves these libraries out, and there is no network to look for anything.
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_NO_USAGE_STATS=1
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
# A step whose kernel hangs is an error while there is time left to say so, and processes that are
# ended say where they were.
export VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=60 PYTHONFAULTHANDLER=1
# Containers mount the driver's libraries there without always saying so.
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64

# Where to look when a step of the first call fails.
declare -A REPAIRS=(
  [unpack]="make the bundle anew (make gpu-bundle), for this machine's Python, torch and Triton"
  [install]="see tools/packaging/backend.py: it must need no network, and no compiler"
  [smoke]="the first error in gpu_smoke.json is the cause; ops: vllm_kvretrieval/kernels/triton"
  [toy]="if smoke passes: attention/cuda, engine/cuda; if eager steps pass, what graphs hold"
  [toy_host]="if toy passes: attention/cuda/far.py, engine/cuda/tiers.py and host.py"
  [user]="if toy passes: seats, compilation, memory profile; gpu_day_engines.log says which"
  [stock]="not ours: the bundle, or this machine; without it there is nothing to compare with"
)
ERROR='^E   +[A-Za-z]|^FAILED |^[A-Za-z_.]*(Error|Exception|Exit)\b'

done_steps=() failed=() group=
fail() { # NAME REASON
  local error
  sleep 0.2 # what the step has said last is on its way to its log
  error=$(grep -m 1 -E "$ERROR" "$SITE/step.log" 2>/dev/null | cut -c 1-300)
  failed+=("$1: $2${error:+: $error}${REPAIRS[$1]:+ (${REPAIRS[$1]})}")
}
step() { # NAME SECONDS LEAST_SECONDS COMMAND...
  local name=$1 limit=$2 least=$3 left=$((CALL_SECONDS - SECONDS)) began=$SECONDS status=0
  shift 3
  if ((left < least)); then
    failed+=("$name: no time left")
    return
  fi
  ((limit < left)) || limit=$left
  echo "== $name (at most $limit s)"
  # Interrupted, a program ends the engines that it has started; they are in groups of their own. Of
  # the group that timeout makes of all its other processes nothing is left.
  timeout --signal=INT --kill-after=20 "$limit" "$@" > >(tee "$SITE/step.log") 2>&1 &
  group=$!
  wait "$group" || status=$?
  if ((status)) && kill -ABRT -- "-$group" 2>/dev/null; then sleep 1; fi
  kill -KILL -- "-$group" 2>/dev/null
  if ((status == 124 || status == 137)); then
    fail "$name" "stopped after $limit s"
  elif ((status)); then
    fail "$name" "exit status $status"
  fi
  done_steps+=("$name: $((SECONDS - began)) s")
}
measure() { # SECONDS LEAST_SECONDS MODULE RESULT OPTIONS...
  step "$4" "$1" "$2" "$PYTHON" -m "benchmarks.gpu.$3" --output "$OUT/gpu_$4.json" "${@:5}"
}
has() { "$PYTHON" -c "import $1" 2>/dev/null; }
check() { # NAME SECONDS LEAST_SECONDS TEST_SECONDS TESTS...
  local options=(-v --tb=short --maxfail=3 --durations=5 -p no:cacheprovider)
  if has pytest_timeout; then options+=("--timeout=$4" --timeout-method=thread); fi
  step "$1" "$2" "$3" "$PYTHON" -m pytest "${options[@]}" "${@:5}"
}
check_kernels() { # NAME SECONDS LEAST_SECONDS TESTS...; they compile most of the time
  local processes=()
  if has xdist; then processes=(-n 8); fi
  check "$1" "$2" "$3" 60 "${processes[@]}" "${@:4}"
}

prepare() {
  mkdir -p "$SITE" "$OUT"
  if [[ -d $BUNDLE && ! -d $SITE/vllm ]]; then
    step unpack 60 1 "$PYTHON" tools/gpu/bundle.py unpack "$BUNDLE" "$SITE"
  fi
  step install 40 1 "$PYTHON" -m pip install -q --disable-pip-version-check --no-index --no-deps \
    --no-build-isolation --upgrade --target "$SITE" .
}

day() {
  rm -f "$OUT/gpu_day.json"
  smoke
  toy
  toy_host
  user
  stock
}

# What an interpreter cannot show, and the ops of freekv's step.
smoke() {
  measure 90 30 smoke smoke --seconds 70
}

kernels() {
  check_kernels slots 90 20 tests/gpu/test_slots.py
  check_kernels device 90 20 tests/gpu/test_device.py
  measure 150 60 decode_layer decode_layer
  measure 70 30 ceilings ceilings
  measure 80 30 sparse_decode sparse_decode
  check_kernels peers 30 20 tests/gpu/test_peers.py
}

# Without pytest's capture (-s): it would lose the last words of a worker that hangs.
toy() {
  check toy 110 70 100 -s tests/gpu/test_engine.py -k "(graphs or eager) and not preemption"
}

toy_host() {
  check toy_host 80 50 70 -s tests/gpu/test_engine.py -k "host and not preemption"
}

# As a user starts it, and then stock vLLM: nothing is said of seats, compilation and memory.
user() {
  as_user user 140 90 device
}

stock() {
  as_user stock 90 60 stock
}

as_user() { # NAME SECONDS LEAST_SECONDS ENGINE
  step "$1" "$2" "$3" "$PYTHON" -m benchmarks.gpu.engine_decode --output "$OUT/gpu_day.json" \
    --engine "$4" --defaults --add --context 2048 --context 32768 --context 131072 --batch 1
}

# The smallest cases of the ops that merge, count or hand out by atomics: races, then addresses.
sanitizer() {
  local tool
  if ! command -v compute-sanitizer >/dev/null; then
    echo "compute-sanitizer is not here: left out"
    return
  fi
  for tool in racecheck memcheck; do
    step "$tool" 120 30 compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
      "$PYTHON" -m pytest -v -x -p no:cacheprovider tests/gpu/test_slots.py \
      -k "test_sparse_decode and 4-4-64-dtype0 or test_resolve and 9-6"
  done
}

engine() {
  check preemption 150 60 100 -s tests/gpu/test_engine.py -k preemption
  measure 360 150 engine_decode engine_decode --engine stock --engine device
}

baseline() {
  measure 510 150 engine_decode stock_vllm --engine stock --prefill
}

host() {
  measure 250 100 engine_decode engine_home --engine device --engine host --batch 1 --batch 2 \
    --home-gib 36
  measure 260 100 engine_decode engine_equal_memory --engine stock --engine host \
    --context 131072 --batch 1 --batch 8 --cache-gib 17 --home-gib 100 --uncompiled
}

million() {
  measure 300 90 engine_decode engine_million --engine host --context 1000000 --batch 1 \
    --model benchmarks/gpu/qwen2.5-7b-1m --uncompiled
}

run() {
  local name
  trap 'kill -INT -- "-$group" 2>/dev/null; exit 130' INT TERM
  prepare
  for name in "$@"; do "$name"; done
  printf '\n== summary\n'
  "$PYTHON" -m benchmarks.gpu.goals "$OUT"
  printf '%s\n' "${done_steps[@]}"
  ((${#failed[@]} == 0)) || printf 'FAILED %s\n' "${failed[@]}"
  ((${#failed[@]} == 0))
}

CALLS=" day kernels engine host million baseline sanitizer smoke toy toy_host user stock "
for name in "$@"; do
  if [[ $CALLS != *" $name "* ]]; then set -- && break; fi
done
if [[ $# -eq 0 ]]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
  exit 2
fi
mkdir -p "$OUT"
calls=$*
run "$@" 2>&1 | tee "$OUT/gpu_${calls// /_}.log"
