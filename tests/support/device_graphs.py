"""CUDA graphs as far as a CPU can have them: what is captured runs again over what it captured.

A graph replays kernels over the memory and with the numbers of the time when it was captured. A
closure over the metadata of that time, called again, does the same: it sees what has been written
to the buffers since, and nothing else that is new.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

from vllm_kvretrieval.engine.cuda.graphs import HalfOf, RetrievalGraphs
from vllm_kvretrieval.engine.cuda.requests import Attended


@dataclass
class Replay:
    """What stands in for a graph.

    Attributes:
        forward: The model's, over the inputs and the metadata of the capture.
        count: How often it has been replayed.
    """

    forward: Callable[[CUDAGraphMode], None]
    count: int = 0

    def replay(self):
        self.count += 1
        self.forward(CUDAGraphMode.NONE)


class _Captures(CudaGraphManager):
    def capture(self, create_forward_fn, progress_bar_desc=""):
        for descriptors in self._capture_descs.values():
            for descriptor in descriptors:
                create_forward_fn(descriptor, warmup=True)(CUDAGraphMode.NONE)
                forward = create_forward_fn(descriptor, warmup=False)
                forward(CUDAGraphMode.NONE)
                self.graphs[descriptor] = Replay(forward)
        self._graphs_captured = True


class ReplayManager(RetrievalGraphs, _Captures):
    """The package's, with replays for graphs.

    Attributes:
        replays: Whether steps that have a graph are replays; else all are eager.
        builders: Of the metadata of the layers that retrieve.
        taken: Of each replay, what its graph is for; and whether any row of the step attended to a
            selection, and every row, as the device found out.
    """

    replays = True
    builders: Sequence[Any] = ()

    def dispatch(self, *args, **kwargs):
        self._graphs_captured = self.replays and bool(self.graphs)
        return super().dispatch(*args, **kwargs)

    def run_fullgraph(self, desc):
        before = {shape: graph.count for shape, graph in self.graphs.items()}
        output = super().run_fullgraph(desc)
        (shape,) = (of for of, graph in self.graphs.items() if graph.count > before[of])
        rows = len(self.running.batch.seats)
        found = [bool(c) for b in self.builders for c in b._written[0, :rows] >= 0]
        kind = shape.attended if isinstance(shape, HalfOf) else Attended.BOTH
        self.taken.append((kind.value, any(found), all(found)))
        return output
