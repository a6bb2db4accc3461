"""Random numbers of requests that have a seed, on CPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from vllm_kvretrieval.compat import is_v2


@contextmanager
def prompts_without_seeds(runner: Any) -> Iterator[None]:
    """Let tokens be sampled while requests that still read their prompt have no seed.

    VLLM's V1 runner samples for such a request, too, drops the token, and takes the request's
    random numbers back, which it cannot on a CPU: the engine ends. Here they are not drawn.

    Args:
        runner: A model runner whose step has been computed.
    """
    if is_v2(runner):
        yield
        return
    batch = runner.input_batch
    (reading,) = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])
    kept = {row: batch.generators.pop(row) for row in reading.tolist() if row in batch.generators}
    yield
    batch.generators.update(kept)
