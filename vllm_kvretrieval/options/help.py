"""The table of options as text: for ``vllm serve --help``, and as tables in Markdown."""

from collections.abc import Collection, Mapping

from vllm_kvretrieval.options.of_requests import REQUEST
from vllm_kvretrieval.options.option import Option
from vllm_kvretrieval.options.table import OPTIONS
from vllm_kvretrieval.retrieval.families import ScoredMethod, family_with, having
from vllm_kvretrieval.retrieval.presets import OWN


def help_texts() -> dict[str, str]:
    """A line of plain text for each option of an engine, by its name."""
    return {name: _plain(name, known) for name, known in OPTIONS.items()}


def _plain(name: str, known: Option) -> str:
    facts = [known.kind.text, f"default: {known.default}", *_limits(name, known)]
    return f"{known.meaning} ({'; '.join(facts)})".replace("`", "")


def markdown(table: Mapping[str, Option], names: Collection[str] = (), links: bool = True) -> str:
    """A table of options in Markdown.

    Args:
        table: The options.
        names: The options that are shown, in this order; none: all.
        links: Whether to link to where docs/options.md says more.
    """
    lines = ["| option | meaning | values | default |", "| --- | --- | --- | --- |"]
    for name in names or table:
        known = table[name]
        more = f" ([more]({known.more}))" if links and known.more else ""
        limits = "".join(f"; {limit}" for limit in _limits(name, known, table is REQUEST))
        cells = f"`{name}`", f"{known.meaning}{limits}{more}", known.kind.text, known.default
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _limits(name: str, known: Option, of_request: bool = False) -> list[str]:
    """Where an option has an effect, unless it always has one."""
    families = having(name, of_request)
    by_name = {name: family_with(preset.schedule) for name, preset in OWN.items()}
    served = [f"`{name}`" for name, family in by_name.items() if family in families]
    others = [f"`{name}`" for name, family in by_name.items() if family not in families]
    limits = []
    if families == (ScoredMethod,):
        limits.append(f"only for {ScoredMethod.methods}")
    elif others:
        few = f"only for {', '.join(served)}", f"not for {', '.join(others)}"
        limits.append(few[len(served) > len(others)])
    if known.needs:
        limits.append(f"only with `{known.needs}`")
    if known.slow_home:
        limits.append("only if `home` is not `device`")
    if known.on_gpu:
        limits.append("only on a CPU")
    return limits
