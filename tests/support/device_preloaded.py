"""What the server of support/device_server.py does before it forks: it prepares, and imports."""

import importlib

from tests.support import device_engine, interpreter

interpreter.prepare()
device_engine.prepare()

for name in (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.model_executor.models.llama",
    "tests.support.device_specification",
    "tests.support.device_worker",
    "tests.support.engine",
):
    importlib.import_module(name)
