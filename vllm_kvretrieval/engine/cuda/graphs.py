"""CUDA graphs of decode steps: for how many rows, and those without a dense half.

Where all rows of a step attend to selections, vLLM's attention over whole contexts has nothing to
do, and its launches in every layer are for nothing. So for steps of up to :data:`MOST_ROWS` rows
there is a second graph, without them.
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

from vllm_kvretrieval.engine.cuda.requests import RunningRequests

MOST_ROWS = 64
"""Rows of the largest steps that have a second graph: what it saves is the same for any number of
rows, and each graph takes memory, and time to capture."""


@dataclass(frozen=True)
class SelectionsOnly(BatchExecutionDescriptor):
    """vLLM's description of a step's shape, of a step all of whose rows attend to selections."""

    @classmethod
    def of(cls, shape: BatchExecutionDescriptor) -> Self:
        """Such a step of a shape."""
        return cls(**{field.name: getattr(shape, field.name) for field in fields(shape)})


class _Captures(CudaGraphManager):
    """Between vLLM's two classes: what is captured knows which rows it is for."""

    running: RunningRequests

    def capture(self, create_forward_fn: Callable[..., Any], *args: Any, **options: Any) -> None:
        def create(shape: BatchExecutionDescriptor, warmup: bool) -> Any:
            # A warm-up has no requests: without a dense half, nothing would write its output.
            self.running.assumes_selections = isinstance(shape, SelectionsOnly) and not warmup
            try:
                return create_forward_fn(shape, warmup=warmup)  # makes the layers' metadata
            finally:
                self.running.assumes_selections = False

        super().capture(create, *args, **options)


class RetrievalGraphs(ModelCudaGraphManager, _Captures):
    """vLLM's graphs, and those of steps all of whose rows attend to selections.

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
        vars(graphs).update(vars(manager))
        graphs.running = running
        return graphs

    def add_selections_only(self) -> None:
        """Have graphs without a dense half captured, too, each after that of its shape."""
        shapes = self._capture_descs.get(CUDAGraphMode.FULL, [])
        both = [
            [shape, SelectionsOnly.of(shape)] if (shape.num_reqs or 0) <= MOST_ROWS else [shape]
            for shape in shapes
        ]
        if both:
            self._capture_descs[CUDAGraphMode.FULL] = [shape for pair in both for shape in pair]

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        """See ``ModelCudaGraphManager.run_fullgraph``; without a dense half where it can be."""
        if self.running.selections_only():
            without = SelectionsOnly.of(desc)
            desc = without if without in self.graphs else desc
        return super().run_fullgraph(desc)


def limit_graphs(manager: Any, seats: int) -> None:
    """Let graphs of decode steps be captured for no more requests than run at once.

    vLLM has chosen their sizes by ``max_num_seqs``. The last size is the first that takes them all.

    Args:
        manager: vLLM's ``CudaGraphManager``, before it captures.
        seats: Most requests.
    """
    sizes = manager.compilation_config.cudagraph_capture_sizes or ()
    rows = min((size for size in sizes if size >= seats), default=seats)
    if rows < manager.max_num_reqs:
        manager.max_num_reqs = rows
        manager._candidates, manager._capture_descs = {}, {}
        manager._init_candidates()
