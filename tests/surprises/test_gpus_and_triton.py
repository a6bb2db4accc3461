"""GPUs and Triton."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from benchmarks.common import ROOT
from tests.surprises.rows import surprise


@surprise(
    "v1/worker/gpu/cudagraph_utils.py",
    expected="every number of requests up to `--max-num-seqs` decodes by a full CUDA graph",
    happens="not those beyond the largest capture size that is at most `--max-num-seqs`: of 20, "
    "with "
    "sizes of 16 and 24, 17 to 20 requests have none",
    remedy="set `--max-num-seqs` to a capture size, such as 16 or 24",
)
def test_graphs_end_before_the_most_requests(monkeypatch):
    monkeypatch.setattr(
        cudagraph_utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=1, is_last_rank=1)
    )
    pool = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "current_platform", pool)
    monkeypatch.setattr(cudagraph_utils, "is_breakable_cudagraph_enabled", lambda: False)
    sizes = [1, 2, 4, 8, 16, 24, 32]
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=20),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=32
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
    )
    manager = cudagraph_utils.CudaGraphManager(
        config, torch.device("cpu"), CUDAGraphMode.FULL_DECODE_ONLY, 1
    )
    served = [count for count in range(1, 21) if manager._candidates.get((count, 0))]
    assert served == [*range(1, 17)]


@surprise(
    "runtime/interpreter.py",
    package="triton",
    expected="the interpreter computes what a GPU does",
    happens="`tl.sum` over bfloat16 adds raw bits; a cast to float8 gives 480 for 464, 256 for "
    "infinity and 384 for NaN",
    remedy="sum in float32, and clamp before the cast",
)
def test_the_interpreter():
    """Triton interprets in a process of its own."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tests.surprises.interpreted"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["sum"] != 4.0
    assert told["float8"][:3] == [480.0, 256.0, 384.0]
