"""Several workers of an engine of tests/support/device_engine.py, each in a process of its own.

Executor, queues and groups of processes (gloo) are vLLM's.
"""

import functools
import multiprocessing
from unittest import mock

from vllm.v1.executor import multiproc_executor

forked = functools.partial(multiprocessing.get_context, "fork")


class DeviceExecutor(multiproc_executor.MultiprocExecutor):
    """vLLM's. Its workers are forked by the engine's process, which emulates a device."""

    def _init_executor(self):
        with mock.patch.object(multiproc_executor, "get_mp_context", forked):
            super()._init_executor()
