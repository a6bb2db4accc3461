"""Checks of options that users write."""

import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from vllm_kvretrieval.errors import RetrievalConfigError

MOST_DAYS = 36500
MOST_TOKENS = 2**31 - 1
"""Kernels count tokens in 32 bits."""
MOST = 2**63 - 1
"""The largest number of an option, bytes included."""
LIKE = 0.7
"""How like two names are, of which one may be the other misspelt; of difflib's ratio."""
LEAST_SHARE = 2.0**-126
"""Kernels have shares in 32 bits, where a smaller one may be 0."""


def check_digits(key: str, value: Any) -> None:
    """Refuse numbers with too many digits for Python to print, also in lists and mappings."""
    try:
        repr(value)
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise RetrievalConfigError(f"{key} has a number of more than {most} digits.") from None


def shortened(value: Any) -> str:
    """The text of a value for error messages, shortened if it is long."""
    text = repr(value)
    return text if len(text) < 200 else f"{text[:196]}..."


def meant(name: Any, known: Iterable[str]) -> str:
    """A question for the end of a message, if a known name is like the one that is written."""
    near = difflib.get_close_matches(str(name)[:64].lower(), known, 1, LIKE)
    return f" Did you mean {near[0]!r}?" if near else ""


def require_int(key: str, value: Any) -> int:
    """Check a number of tokens or layers."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RetrievalConfigError(
            f"{key}={shortened(value)} must be a whole number of tokens, e.g. 1024."
        )
    if abs(value) > MOST_TOKENS:
        raise RetrievalConfigError(f"{key}={shortened(value)} must be {MOST_TOKENS} at most.")
    return value


def require_number(key: str, value: Any) -> float:
    """Check a number between -1 and 1, such as a similarity."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not -1 <= value <= 1:  # NaN compares false
        raise RetrievalConfigError(
            f"{key}={shortened(value)} must be a number between -1 and 1, e.g. 0.8."
        )
    return float(value)


def require_part(key: str, value: Any) -> float:
    """Check a share that may be 0."""
    if not 0 <= require_number(key, value) < 1:
        raise RetrievalConfigError(f"{key}={value} must be from 0 on and less than 1, e.g. 0.003.")
    return float(value)


def require_layers(key: str, value: Any) -> int:
    """Check a number of layers."""
    if require_int(key, value) < 0:
        raise RetrievalConfigError(f"{key}={value} must be 0 or more; 1 is FreeKV's choice.")
    return int(value)


def require_share(key: str, value: Any) -> float:
    """Check a share above 0."""
    if require_number(key, value) < LEAST_SHARE:
        raise RetrievalConfigError(
            f"{key}={value} must be more than 0, and {LEAST_SHARE:.2g} at least, such as 0.3."
        )
    return float(value)


def require_days(key: str, value: Any) -> float:
    """Check an age in days."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= MOST_DAYS:  # NaN compares false
        raise RetrievalConfigError(
            f"{key}={shortened(value)} must be a number of days above 0, up to {MOST_DAYS}, e.g. "
            "30."
        )
    return float(value)


def require_path(key: str, value: Any) -> str:
    """Check the path of a directory, which need not exist."""
    if not isinstance(value, str) or not value:
        raise RetrievalConfigError(
            f"{key}={shortened(value)} is no directory; name one on the disk to be used."
        )
    return value


def require_bool(key: str, value: Any) -> bool:
    """Check a switch."""
    if value not in (True, False):  # over HTTP, JSON's true may arrive as 1
        raise RetrievalConfigError(f"{key}={shortened(value)} must be true or false.")
    return bool(value)


def require_name(key: str, value: Any, known: Collection[str]) -> str:
    """Check that a value is one of some names."""
    if not isinstance(value, str) or value not in known:
        raise RetrievalConfigError(
            f"{key}={shortened(value)} is unknown; use one of {', '.join(known)}."
            f"{meant(value, known)}"
        )
    return value


def parse_size(key: str, value: Any) -> int:
    """Bytes of a size such as ``64GiB``, ``64Gi``, ``64G`` or ``64GB``, or of a plain number.

    A letter alone means what it means to vLLM: powers of 1024 in upper case, of 1000 in lower case.
    With ``i`` behind it it is a power of 1024, with ``B`` of 1000, in either case.
    """
    text = str(value).strip() if type(value) in (int, str) else ""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?(B?)", text, re.IGNORECASE)
    number, letter, binary, byte = match.groups("") if match is not None else ("0", "", "", "")
    decimal = not binary and (byte or letter.islower())
    factor = (1000 if decimal else 1024) ** " kmgt".index(letter.lower() or " ")
    size = int(Decimal(number) * factor)
    if not 0 < size <= MOST:
        raise RetrievalConfigError(
            f"{key}={shortened(value)} must be a size such as 64GiB, 64G or 512M, or a number of "
            f"bytes, up to {MOST}."
        )
    return size


def reject_unknown(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse unknown keys."""
    for key in given:
        if key not in known:
            right = str(key).replace("-", "_")
            write = f"Write {right!r}. " if right in known else ""
            raise RetrievalConfigError(
                f"{where} has no option {shortened(key)} (value {shortened(given[key])}). {write}"
                f"Known: {', '.join(known)}.{'' if write else meant(key, known)}"
            )


def resembles(key: Any, name: str) -> bool:
    """Whether a key begins with a name of ours in any spelling, such as ``kvRetrieval.budget``."""
    return re.sub(r"[^a-z]", "", str(key).lower()).startswith(name.replace("_", ""))


def reject_misspelt(given: Mapping[Any, Any], name: str, where: str, right: str) -> None:
    """Refuse keys that look like ours, but would not be read.

    Args:
        given: Options of many kinds.
        name: Our key.
        where: The place of the options, for messages.
        right: The right spelling of our key there.
    """
    for key in given:
        if key != name and resembles(key, name):
            raise RetrievalConfigError(f"{where}: {shortened(key)} is not read; write {right}.")


@dataclass(frozen=True)
class Kind:
    """A kind of values.

    Attributes:
        text: The values in words, for help and documentation, in Markdown.
        check: Returns a value as the engine keeps it, given the name of the option and the value as
            the user wrote it. Raises RetrievalConfigError if the value is of another kind.
    """

    text: str
    check: Callable[[str, Any], Any]


def one_of(names: Collection[str] | Mapping[str, str]) -> Kind:
    """The kind of some names; of a mapping, the values explain the names."""
    meanings = names if isinstance(names, Mapping) else {}
    texts = [f"`{name}`" + (f" ({meanings[name]})" if name in meanings else "") for name in names]
    return Kind(", ".join(texts), lambda key, value: require_name(key, value, names))


def one_described(known: Mapping[str, Any]) -> Kind:
    """The kind of the names of things that have a ``meaning``; some may be added later."""
    texts = [f"`{name}` ({each.meaning})" for name, each in known.items()]
    return Kind(", ".join(texts), lambda key, value: require_name(key, value, known))


def one_number_of(numbers: Collection[int]) -> Kind:
    """The kind of some whole numbers."""

    def check(key: str, value: Any) -> int:
        if require_int(key, value) not in numbers:
            raise RetrievalConfigError(f"{key}={value} is not supported; use one of {numbers}.")
        return int(value)

    return Kind(", ".join(map(str, numbers)), check)


def checked_later(text: str) -> Kind:
    """The kind of values that are checked where they are used, since more than one kind fits."""
    return Kind(text, lambda _, value: value)


TOKENS = Kind("tokens", require_int)
SHARE = Kind("above 0, up to 1", require_share)
PART = Kind("from 0, below 1", require_part)
SIMILARITY = Kind("a number from -1 to 1", require_number)
SWITCH = Kind("true, false", require_bool)
SIZE = Kind("bytes, such as `64GiB`", parse_size)
