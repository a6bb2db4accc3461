"""Checks of a running server: what it serves, with which options, and what it has counted."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_kvretrieval.doctor.findings import Finding, advice, error

PREFIX = "vllm:kv_retrieval_"
INFO = f"{PREFIX}info"
CACHE = "vllm:cache_config_info"
TIMEOUT_S = 30.0
THIS_MACHINE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
"""Hosts that are asked without the proxy of the environment, which would ask itself."""
PROBE = {"kv_retrieval_budget": "none"}
"""Options of a request that a server with retrieval refuses, and one without does not know."""


class Client:
    """A server by HTTP.

    Args:
        url: Its address, such as ``http://127.0.0.1:8000``; a path ``/v1`` is left off.
        key: The API key that it asks for, if any.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """Status and text of an answer.

        Raises:
            OSError: There is none.
            ValueError: The address is none.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        if request.type not in ("http", "https"):
            raise ValueError(f"{self.url} is no address of a server")
        local = urllib.parse.urlsplit(self.url).hostname in THIS_MACHINE
        direct = [urllib.request.ProxyHandler({})] if local else []
        try:
            with urllib.request.build_opener(*direct).open(request, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read().decode(errors="replace")


Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]
"""Values of metrics, by name and labels."""


def samples(text: str) -> Samples:
    """What a Prometheus endpoint tells.

    Raises:
        ValueError: It is no text of Prometheus'.
    """
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def check_server(client: Client) -> Iterator[Finding]:
    """All findings about a server; an error where it does not answer, or does not retrieve."""
    try:
        health, _ = client.ask("/health")
        status, models = client.ask("/v1/models")
        _, metrics = client.ask("/metrics")
    except (OSError, ValueError) as e:
        yield error("server", f"{client.url} does not answer ({e})", "start it, or mend the URL")
        return
    if status == 401:
        yield error("server", f"{client.url} wants an API key", "name it with --api-key")
        return
    if health != 200 or status != 200:
        yield error(
            "server",
            f"{client.url} answers {health} to /health and {status} to /v1/models",
            "look at its log",
        )
        return
    try:
        served = json.loads(models)["data"]
        name, longest = served[0]["id"], served[0].get("max_model_len")
        found = samples(metrics)
    except (ValueError, LookupError, TypeError, AttributeError):
        yield error("server", f"{client.url} is no vLLM server", "mend the URL")
        return
    yield Finding("server", f"{client.url} serves {name}, contexts of up to {longest} tokens")
    yield _check_retrieval(client, name)
    yield from _check_options(found)
    yield from _counters(found)


def _check_retrieval(client: Client, model: str) -> Finding:
    """Whether the server knows options of retrieval; it refuses a request, or makes one token."""
    body = {"model": model, "prompt": "1", "max_tokens": 1, "vllm_xargs": PROBE}
    status, answer = client.ask("/v1/completions", body)
    if status == 400 and "kv_retrieval" in answer:
        return Finding("retrieval", "a bad option of a request gets a 400, as it should")
    return error(
        "retrieval",
        f"the server answers {status} to a bad option of retrieval, so it does not retrieve",
        "start it with --attention-backend kvretrieval, or another method, and look for "
        "vllm-kvretrieval in its log",
    )


def _check_options(found: Samples) -> Iterator[Finding]:
    """Options of retrieval, and the block size that routers have to be told."""
    for labels in found.get(INFO, {}):
        options = {key: value for key, value in labels if key not in ("model_name", "engine")}
        text = ", ".join(f"{key}={value}" for key, value in options.items())
        yield Finding("options", f"engine {dict(labels).get('engine', '0')}: {text}")
    for labels in found.get(CACHE, {}):
        cache = dict(labels)
        yield Finding(
            "block size",
            f"{cache.get('block_size')} tokens, {cache.get('num_gpu_blocks')} blocks; routers that "
            "hash prefixes are told this size",
        )


def _counters(found: Samples) -> Iterator[Finding]:
    """The sums of all engines, and what they say."""
    sums = {
        name.removeprefix(PREFIX): sum(values.values())
        for name, values in found.items()
        if name.startswith(PREFIX) and name != INFO and not name.endswith("_created")
    }
    for name, value in sums.items():
        yield Finding(name, f"{value:g}")
    looked_up = sums.get("units_looked_up_total", 0)
    missed = sums.get("units_missed_total", 0)
    if looked_up and missed / looked_up > MANY_MISSES:
        yield advice(
            "recall",
            f"{missed / looked_up:.0%} of what steps looked up had to be read from the disk",
            "give the server more fast memory (--kv-cache-memory-bytes), or a smaller budget",
        )


MANY_MISSES = 0.2
"""Share of misses beyond which a server spends much of its time waiting for the disk."""
