"""Checks of a running server: what it serves, with which options, and what it has counted."""

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from vllm_kvretrieval.doctor.findings import Finding, advice, error

PREFIX = "vllm:kv_retrieval_"
FREE = "home_free_bytes"
INFO = f"{PREFIX}info"
CACHE = "vllm:cache_config_info"
TIMEOUT_S = 30.0
THIS_MACHINE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
"""Hosts that are asked without the proxy of the environment, which would ask itself."""
GIB = 1 << 30
MANY_MISSES = 0.2
"""Share of misses beyond which a server spends much of its time waiting for the disk."""
SHARES = {
    "read": (
        "units_attended_total",
        "units_in_context_total",
        "decode steps read {} of the KV cache, where contexts were beyond their budgets",
    ),
    "corrected": (
        "heads_corrected_total",
        "heads_decoded_total",
        "{} of KV heads selected anew, since their former selection did not fit",
    ),
    "prompts": (
        "prompt_pairs_skipped_total",
        "prompt_pairs_total",
        "prompts skipped {} of their attention",
    ),
    "slots": ("slots_used", "slots", "{} of the slots of recall caches are used"),
}
"""Findings by names: two metrics, of which one is a share of the other, and the words for it."""
STORE = ("tokens_restored", "tokens_hit", "blocks_damaged")
ALIKE = "start replicas alike: a router may send a conversation to any of them"
PROBE = {"kv_retrieval_budget": "none"}
"""Options of a request that a server with retrieval refuses, and one without does not know."""


class Client:
    """A server by HTTP.

    Args:
        url: The server's address, such as ``http://127.0.0.1:8000``; a path ``/v1`` is left off.
        key: The API key that it asks for, if any.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(
        self, path: str, body: Mapping[str, Any] | None = None, timeout: float = TIMEOUT_S
    ) -> tuple[int, str]:
        """Status and text of an answer, which has to begin within so many seconds.

        Raises:
            urllib.error.URLError: There is none, or none by HTTP.
            ValueError: The address is none.
        """
        data = None if body is None else json.dumps(body).encode()
        local = check_address(self.url) in THIS_MACHINE
        request = urllib.request.Request(self.url + path, data, self._headers)
        direct = [urllib.request.ProxyHandler({})] if local else []
        try:
            with urllib.request.build_opener(*direct).open(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read().decode(errors="replace")
        except (http.client.HTTPException, ConnectionError, TimeoutError) as e:
            raise urllib.error.URLError(str(e) or type(e).__name__) from None


def check_address(url: str) -> str:
    """The host of an address of a server.

    Raises:
        ValueError: It is none.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        known = parts.scheme in ("http", "https") and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known or not parts.hostname or re.search(r"\s", url):
        raise ValueError(f"{url!r} is no address of a server, such as http://127.0.0.1:8000")
    return parts.hostname


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


class Server(NamedTuple):
    """What was found out about a server.

    Attributes:
        url: The server's address.
        findings: An error among them where it does not answer, or does not retrieve.
        facts: What replicas should have in common, by names; empty where it does not answer.
    """

    url: str
    findings: list[Finding]
    facts: dict[str, str]


def check_server(client: Client) -> Server:
    """Look at a server: what it serves, with which options, and what it has counted."""

    def failed(text: str, remedy: str) -> Server:
        return Server(client.url, [error("server", f"{client.url} {text}", remedy)], {})

    try:
        health, _ = client.ask("/health")
        status, models = client.ask("/v1/models")
        _, metrics = client.ask("/metrics")
        _, version = client.ask("/version")
    except (OSError, ValueError) as e:
        remedy = "start it, or mend the URL; what is to be served stands behind --serve"
        return failed(f"does not answer ({e})", remedy)
    if status == 401:
        return failed("wants an API key", "name it with --api-key")
    if health != 200 or status != 200:
        answers = f"answers {health} to /health and {status} to /v1/models"
        return failed(answers, "look at its log")
    try:
        served = json.loads(models)["data"]
        name, longest = served[0]["id"], served[0].get("max_model_len")
        vllm, found = json.loads(version)["version"], samples(metrics)
    except (ValueError, LookupError, TypeError, AttributeError):
        return failed("is no vLLM server", "mend the URL")
    text = f"{client.url} serves {name}, contexts of up to {longest} tokens, by vLLM {vllm}"
    facts = {"model": str(name), "max_model_len": str(longest), "vLLM": str(vllm)}
    findings = [
        Finding("server", text),
        _check_retrieval(client, name),
        *_check_options(found),
        *_shares(found),
    ]
    return Server(client.url, findings, facts | _common(found))


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


def _common(found: Samples) -> dict[str, str]:
    """Options, and the block size, of all engines of a server."""
    values: dict[str, set[str]] = {}
    for labels in found.get(INFO, {}):
        for key, value in labels:
            if key not in ("model_name", "engine"):
                values.setdefault("vllm-kvretrieval" if key == "version" else key, set()).add(value)
    for labels in found.get(CACHE, {}):
        values.setdefault("block size", set()).add(str(dict(labels).get("block_size")))
    return {key: " and ".join(sorted(each)) for key, each in values.items()}


def _shares(found: Samples) -> Iterator[Finding]:
    """What a server has counted since its start, over all of its engines, as shares."""
    sums = {name: sum(values.values()) for name, values in found.items()}

    def ours(name: str) -> float:
        return sums.get(PREFIX + name, 0)

    for name, (part, whole, text) in SHARES.items():
        if ours(whole) and PREFIX + part in sums:
            yield Finding(name, text.format(f"{ours(part) / ours(whole):.0%}"))
    if not ours("units_in_context_total"):
        yield Finding("read", "no decode step has had a context beyond its budget yet")
    if ours("units_looked_up_total"):
        yield _check_misses(ours("units_missed_total") / ours("units_looked_up_total"))
    if queries := sums.get("vllm:prefix_cache_queries_total"):
        hits = sums.get("vllm:prefix_cache_hits_total", 0) / queries
        yield Finding("prefixes", f"{hits:.0%} of prompts' tokens were in the prefix cache")
    if preempted := sums.get("vllm:num_preemptions_total"):
        yield advice(
            "preemptions",
            f"requests were interrupted {preempted:,.0f} times, and read again",
            "more --kv-cache-memory-bytes or home_bytes, or fewer --max-num-seqs",
        )
    yield from _check_store(sums)
    if free := found.get(PREFIX + FREE):
        yield Finding("disk", f"{min(free.values()) / GIB:.1f} GiB free for the home or the store")


def _check_misses(share: float) -> Finding:
    text = f"{share:.0%} of what steps looked up had to be read from the home"
    if share <= MANY_MISSES:
        return Finding("recall", text)
    remedy = "give the server more fast memory (--kv-cache-memory-bytes), or a smaller budget"
    return advice("recall", text, remedy)


def _check_store(sums: Mapping[str, float]) -> Iterator[Finding]:
    """What a store has found, in good order or not."""
    store = {name: sums.get(f"{PREFIX}store_{name}_total", 0) for name in STORE}
    if restored := store["tokens_restored"]:
        text = f"{restored:,.0f} tokens were there at the start, requests found"
        yield Finding("store", f"{text} {store['tokens_hit']:,.0f} of earlier runs")
    if damaged := store["blocks_damaged"]:
        yield advice(
            "store",
            f"{damaged:,.0f} blocks were not as they were written",
            "they are computed again; look at the system's log (dmesg), and move the store",
        )


def compare(servers: Sequence[Server]) -> Iterator[Finding]:
    """What replicas that answer differ in, though a router takes one for the other."""
    known = [server for server in servers if server.facts]
    if len(known) < 2:
        return
    alike = True
    for key in dict.fromkeys(key for server in known for key in server.facts):
        values: dict[str, list[str]] = {}
        for server in known:
            values.setdefault(server.facts.get(key, "unknown"), []).append(server.url)
        if len(values) > 1:
            alike = False
            places = "; ".join(
                f"{value or 'none'} at {', '.join(at)}" for value, at in values.items()
            )
            yield advice("replicas", f"{key} differs: {places}", ALIKE)
    if alike:
        text = "servers have the same model, options, block size and versions"
        yield Finding("replicas", f"{len(known)} {text}")
