"""The facts about an option, and the refusal of options that have no effect with a method."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.retrieval.families import Method, having
from vllm_kvretrieval.retrieval.files import as_written
from vllm_kvretrieval.values import Kind, shortened


@dataclass(frozen=True)
class Option:
    """The facts about one option. Texts are Markdown.

    Attributes:
        kind: The values that the option takes.
        meaning: What the option does, without a capital at the start or a full stop at the end.
        default: What an engine or a request has without the option.
        of_method: Whether each method has a value of its own. Otherwise the engine has one value.
        why: Why it has no effect with families that do not name it; empty: their ``trait`` is the
            reason.
        verdict: How a refusal says that it has no effect.
        neutral: A value that changes nothing, and is accepted with every method and device.
        needs: The name of another option that must be given, too; empty: none.
        rests_on: Options of a method that the value rests on: a variant of the server's method that
            names one of them goes without the server's value.
        slow_home: Whether the option has an effect only if ``home`` is not ``device``.
        on_gpu: What to do on a GPU, where the option is refused; empty: GPUs have it.
        more: A link from docs/options.md to further text; empty: none.
    """

    kind: Kind
    meaning: str
    default: str = "none"
    of_method: bool = False
    why: str = ""
    verdict: str = "has no effect with"
    neutral: Any = None
    needs: str = ""
    rests_on: tuple[str, ...] = ()
    slow_home: bool = False
    on_gpu: str = ""
    more: str = ""


def option(value: Any, kind: Kind, meaning: str, default: str = "", **facts: Any) -> Any:
    """A field of the table, which is a dataclass.

    Args:
        value: The default value of the field.
        kind, meaning, facts: See :class:`Option`.
        default: See :class:`Option`; empty: the default value itself.
    """
    shown = default or str(value).lower()
    return field(default=value, metadata={"option": Option(kind, meaning, shown, **facts)})


def of_method(kind: Kind, meaning: str, default: str, **facts: Any) -> Any:
    """An option that each method has a value of its own for; None: the method's."""
    return option(None, kind, meaning, default, of_method=True, **facts)


def refuse_without_effect(
    given: Mapping[str, Any],
    family: type[Method],
    name: str,
    table: Mapping[str, Option],
    of_request: bool = False,
) -> None:
    """Refuse options that have no effect with a method.

    Args:
        given: Values as the user wrote them, by the option's name.
        family: The family of the method.
        name: The name of the method, for messages.
        table: The facts about each option, by its name.
        of_request: Whether they are options of a request; else of an engine.

    Raises:
        RetrievalConfigError: An option has no effect; the message says why.
    """
    for key, value in given.items():
        known = table[key]
        neutral = isinstance(value, str | int | float) and value == known.neutral
        if family not in having(key, of_request) and not neutral:
            why = known.why or family.trait
            raise RetrievalConfigError(
                f"{key}={shortened(as_written(value))} {known.verdict} {name}, {why}; leave it out."
            )
