"""vLLM's scheduler where the KV cache has a slow home."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class RetrievalScheduler(Scheduler):
    """Fails the requests whose pages could not be read, instead of computing them again.

    Computing them again would read the same place on the same disk for ever.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recompute_kv_load_failures = False
