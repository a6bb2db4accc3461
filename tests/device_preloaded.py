"""What the server of tests/device_server.py does before it forks: it prepares, and imports."""

import importlib

from tests import device_engine, interpreter

interpreter.prepare()
device_engine.prepare()

for name in (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.llama",
    "tests.device_specification",
    "tests.device_worker",
    "tests.engine",
):
    importlib.import_module(name)
