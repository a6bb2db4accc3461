"""CUDA graphs of decode steps: for how many rows, and those with one half of attention only.

A layer that retrieves has two halves: vLLM's attention over whole contexts, and our own over
selections. Where no row of a step needs a half, its launches in every layer are for nothing. So for
steps of up to :data:`MOST_ROWS` rows there are two more graphs, with one half each.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from vllm_kvretrieval.engine.cuda.requests import Attended, RunningRequests

MOST_ROWS = 64
"""Rows of the largest steps that have more graphs: what these save is the same for any number of
rows, and each takes memory, and time to capture."""


@dataclass(frozen=True)
class HalfOf(BatchExecutionDescriptor):
    """vLLM's description of a step's shape, of steps whose rows all attend to the same."""

    attended: Attended = Attended.BOTH

    @classmethod
    def the(cls, shape: BatchExecutionDescriptor, attended: Attended) -> Self:
        """Steps of a shape."""
        return cls(**{f.name: getattr(shape, f.name) for f in fields(shape)}, attended=attended)


class _Captures(CudaGraphManager):
    """Between vLLM's two classes: what is captured knows which rows it is for."""

    running: RunningRequests

    def capture(self, create_forward_fn: Callable[..., Any], *args: Any, **options: Any) -> None:
        def create(shape: BatchExecutionDescriptor, warmup: bool) -> Any:
            # A warm-up has no requests: without both halves, nothing may write its output.
            half = isinstance(shape, HalfOf) and not warmup
            self.running.assumed = shape.attended if half else Attended.BOTH
            try:
                return create_forward_fn(shape, warmup=warmup)  # makes the layers' metadata
            finally:
                self.running.assumed = None

        super().capture(create, *args, **options)


class RetrievalGraphs(ModelCudaGraphManager, _Captures):
    """vLLM's graphs, and those with one half of attention.

    vLLM chooses a graph by a step's shape, before it is known what the rows attend to. When the
    graph is replayed, that is known.
    """

    @classmethod
    def of(cls, manager: Any, running: RunningRequests) -> Self:
        """Take the place of vLLM's own manager, before it captures.

        Args:
            manager: It.
            running: The requests, whose steps are replayed.
        """
        graphs = cls.__new__(cls)
        graphs.__dict__.update(vars(manager))
        graphs.running = running
        return graphs

    def add_halves(self) -> None:
        """Have graphs with one half captured, too, after those of their shapes."""
        shapes: list[BatchExecutionDescriptor] = []
        for shape in self._capture_descs.get(CUDAGraphMode.FULL, ()):
            shapes.append(shape)
            if (shape.num_reqs or 0) <= MOST_ROWS:
                halves = Attended.SELECTIONS, Attended.WHOLE
                shapes += [HalfOf.the(shape, attended) for attended in halves]
        if shapes:
            self._capture_descs[CUDAGraphMode.FULL] = shapes

    def dispatch(
        self, num_reqs: int, num_tokens: int, *args: Any, **options: Any
    ) -> BatchExecutionDescriptor:
        """See ``CudaGraphManager.dispatch``. The last token of a prompt may be alone in a step like
        one that is decoded. Layers that watch prompts, or index loaded pages, see no replay."""
        found = super().dispatch(num_reqs, num_tokens, *args, **options)
        special = self.running.watches_prompts or len(self.running.loaded_pages)
        if found.cg_mode != CUDAGraphMode.FULL or not special:
            return found
        return BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            num_active_loras=found.num_active_loras,
        )

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        """See ``ModelCudaGraphManager.run_fullgraph``; with one half of attention if that does."""
        if self.running.needs_eager:
            raise RuntimeError("vLLM replays a step that brings whole contexts to the device")
        half = HalfOf.the(desc, self.running.attended())
        return super().run_fullgraph(half if half in self.graphs else desc)


def limit_graphs(manager: Any, seats: int) -> None:
    """Let graphs of decode steps be captured for no more requests than run at once.

    vLLM has chosen their sizes by ``max_num_seqs``. The last size is the first that takes them all.

    Args:
        manager: vLLM's ``CudaGraphManager``, before it captures.
        seats: Most requests.
    """
    sizes = manager.compilation_config.cudagraph_capture_sizes or ()
    of_rows = [-(-size // manager.decode_query_len) for size in sizes]
    rows = min((count for count in of_rows if count >= seats), default=seats)
    if rows < manager.max_num_reqs:
        manager.max_num_reqs = rows
        manager._candidates, manager._capture_descs = {}, {}
        manager._init_candidates()
