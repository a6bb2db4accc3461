"""Several workers of an engine of tests/device_engine.py, each in a process of its own.

Executor, queues and groups of processes (gloo) are vLLM's.
"""

from unittest import mock

from vllm.v1.executor import multiproc_executor

from tests.device_processes import Context


class DeviceExecutor(multiproc_executor.MultiprocExecutor):
    """vLLM's, whose workers are emulated like those of a single process."""

    def _init_executor(self):
        with mock.patch.object(multiproc_executor, "get_mp_context", Context):
            super()._init_executor()
