"""The table of metrics."""

from benchmarks.tables.markdown import Options, Results
from vllm_kvretrieval.engine.metrics import COUNTERS, GAUGES, OF_FRONT_END, metric_name


def metrics(_: Results, options: Options) -> str:
    """Every metric of retrieval in vLLM's Prometheus endpoint, and what it counts."""
    rows = [(f"{metric_name(name)}_total", text) for name, text in COUNTERS.items()]
    rows += [(metric_name(name), text) for name, text in (GAUGES | OF_FRONT_END).items()]
    lines = [f"| `{name}` | {text} |" for name, text in rows]
    return "\n".join(["| metric | what it counts |", "| --- | --- |", *lines])
