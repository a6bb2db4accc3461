"""The method that results from a preset and the options of a method."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError
from vllm_kvretrieval.options.option import refuse_without_effect
from vllm_kvretrieval.options.table import OF_METHOD, OPTIONS, checked
from vllm_kvretrieval.retrieval.families import Method, apart, family_with
from vllm_kvretrieval.retrieval.presets import presets
from vllm_kvretrieval.values import reject_unknown, require_name


def make_method(name: str, preset: str, options: Mapping[str, Any], page_size: int) -> Method:
    """Make a method.

    Args:
        name: What requests call it.
        preset: The name of the preset, whose values hold where options say nothing.
        options: The options as the user wrote them; None counts as not given.
        page_size: Tokens per page.

    Raises:
        RetrievalConfigError: An option is not known, or they cannot go together; says why.
    """
    base = presets()[require_name("preset", preset, presets())]
    reject_unknown(options, OF_METHOD, name)
    own = {key: getattr(base, key, None) for key in OF_METHOD}
    base = replace(base, **{key: checked(key, v) for key, v in own.items() if v is not None})
    given = {key: value for key, value in options.items() if value is not None}
    schedule = checked("schedule", given.get("schedule", base.schedule))
    family = family_with(schedule)
    if why := apart(family, family_with(base.schedule)):
        raise RetrievalConfigError(
            f"schedule={schedule!r} cannot be combined with {preset}: {why} take other options. "
            "Leave it out, or use --attention-backend with a method that has it."
        )
    refuse_without_effect(given, family, name, OPTIONS)
    given = {key: checked(key, value) for key, value in given.items()}
    return family.make(name, base, schedule, given, page_size)
