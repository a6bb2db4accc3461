"""Processes of workers of tests/device_engine.py; nothing of vLLM's is imported before they are."""

from multiprocessing.context import SpawnContext, SpawnProcess

from tests import device_engine


class _Process(SpawnProcess):
    def __reduce__(self):
        # What it is to do, and with what, is unpickled after the call.
        return _prepared, (), self.__dict__


def _prepared():
    device_engine.prepare()
    return _Process.__new__(_Process)


class Context(SpawnContext):
    """Starts processes which emulate a device."""

    Process = _Process
