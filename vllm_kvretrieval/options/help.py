"""The table of options as text: for ``vllm serve --help``, and as tables in Markdown."""

from collections.abc import Collection, Mapping

from vllm_kvretrieval.options.option import Option
from vllm_kvretrieval.options.table import OPTIONS
from vllm_kvretrieval.retrieval.family import SCORED, family_with
from vllm_kvretrieval.retrieval.presets import OWN
from vllm_kvretrieval.retrieval.schedule import SCHEDULES


def help_texts() -> dict[str, str]:
    """A line of plain text for each option of an engine, by its name."""
    return {name: _plain(known) for name, known in OPTIONS.items()}


def _plain(known: Option) -> str:
    facts = [known.kind.text, f"default: {known.default}", *_limits(known)]
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
        limits = "".join(f"; {limit}" for limit in _limits(known))
        cells = f"`{name}`", f"{known.meaning}{limits}{more}", known.kind.text, known.default
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _limits(known: Option) -> list[str]:
    """Where an option has an effect, unless it always has one."""
    families = {name: family_with(SCHEDULES[preset.schedule]) for name, preset in OWN.items()}
    having = [f"`{name}`" for name, family in families.items() if family in known.families]
    others = [f"`{name}`" for name, family in families.items() if family not in known.families]
    limits = []
    if known.families == (SCORED,):
        limits.append(f"only for {SCORED.methods}")
    elif others:
        few = f"only for {', '.join(having)}", f"not for {', '.join(others)}"
        limits.append(few[len(having) > len(others)])
    if known.needs:
        limits.append(f"only with `{known.needs}`")
    if known.slow_home:
        limits.append("only if `home` is not `device`")
    if known.on_gpu:
        limits.append("only on a CPU")
    return limits
