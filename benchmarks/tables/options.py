"""Tables of the options of an engine and of a request."""

from benchmarks.tables.markdown import Options, Results
from vllm_kvretrieval.options.help import markdown
from vllm_kvretrieval.options.of_requests import REQUEST
from vllm_kvretrieval.options.table import OPTIONS


def engine(_: Results, options: Options) -> str:
    """Options of an engine; ``names=budget,home``: those alone, without links."""
    names = [name for name in options.get("names", "").split(",") if name]
    return markdown(OPTIONS, names, links=not names)


def request(_: Results, options: Options) -> str:
    """Options of a request."""
    return markdown(REQUEST)
