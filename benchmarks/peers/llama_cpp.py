"""Driver of llama.cpp, by the server in xllamacpp, over HTTP as its users have it."""

from __future__ import annotations

import http.client
import json
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import xllamacpp

from benchmarks.peers import protocol, slot_file

LINE = b"data: "
PATIENCE_S = 3600


class LlamaCpp:
    """One slot, which holds the context of the last request.

    Args:
        model: A GGUF file.
        context: Tokens that the slot has room for. llama.cpp rounds them up to 256.
        threads: Of generation and of prompts.
        flash_attention: Whether its flash attention is used, as by default on CPUs.
        saved: Folder of saved slots.
    """

    def __init__(
        self, model: str, context: int, threads: int, flash_attention: bool, saved: str
    ) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx, params.n_parallel = context, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        kinds = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = (
            kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash_attention
            else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.fit_params = params.ui = False
        params.cache_ram_mib = 0  # no copies of contexts beside the slot
        params.endpoint_slots = True
        params.slot_save_path = f"{saved}/"
        params.timeout_read = params.timeout_write = PATIENCE_S
        self._saved = Path(saved)
        self._server = xllamacpp.Server(params)
        self._address = self._server.listening_address.split("//")[1]
        self.versions = {"xllamacpp": metadata.version("xllamacpp")}

    def generate(self, tokens: list[int], count: int) -> dict[str, Any]:
        """See `protocol.Engine`."""
        body = {
            "prompt": tokens,
            "n_predict": count,
            "temperature": 0,
            "cache_prompt": True,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
            "id_slot": 0,
        }
        begin, times, found = time.perf_counter(), list[float](), list[int]()
        for line in self._post("/completion", body):
            if line.startswith(LINE) and (new := json.loads(line[len(LINE) :]).get("tokens")):
                times.append(time.perf_counter())
                found += new
        if len(found) != count:
            raise RuntimeError(f"{len(found)} tokens came of {count}")
        return {
            "first_token_s": times[0] - begin,
            "steps_s": protocol.steps(times),
            "tokens": found,
        }

    def save(self, name: str) -> None:
        """Write the slot to a file of that name."""
        self._slot("save", name)

    def restore(self, name: str) -> None:
        """Read the slot from the file of that name."""
        self._slot("restore", name)

    def widen(self, name: str, tokens: list[int], to: str) -> None:
        """Make of a saved slot one of longer text, whose keys and values are those of the saved
        one, over and over: as many bytes as a real one, which would take minutes to compute."""
        (self._saved / to).write_bytes(slot_file.widened((self._saved / name).read_bytes(), tokens))

    def _slot(self, action: str, name: str) -> None:
        answer = json.loads(self._post(f"/slots/0?action={action}", {"filename": name}).read())
        if "error" in answer:
            raise RuntimeError(f"{action}: {answer['error']}")

    def _post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._address, timeout=PATIENCE_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{path}: {answer.status} {answer.read().decode()}")
        return answer


if __name__ == "__main__":
    protocol.serve(LlamaCpp)
