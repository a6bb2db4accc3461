"""What a check finds."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    ADVICE = "advice"
    """Serving works, and something would make it faster or safer."""
    ERROR = "error"
    """Serving does not work."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: A word or two, such as ``threads``.
        text: What was found; a clause without a full stop.
        severity: How much it matters.
        remedy: What to do; empty where nothing is to be done.
        server: The address of the server that it is about, if it is about one.
    """

    name: str
    text: str
    severity: Severity = Severity.OK
    remedy: str = ""
    server: str = ""

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


def advice(name: str, text: str, remedy: str) -> Finding:
    """A finding that something could be better."""
    return Finding(name, text, Severity.ADVICE, remedy)


def judged(name: str, text: str, remedy: str) -> Finding:
    """A finding that is advice if there is a remedy."""
    return advice(name, text, remedy) if remedy else Finding(name, text)


def error(name: str, text: str, remedy: str) -> Finding:
    """A finding that serving does not work."""
    return Finding(name, text, Severity.ERROR, remedy)


def failed(findings: Iterable[Finding]) -> bool:
    """Whether any of the findings is an error."""
    return any(finding.severity is Severity.ERROR for finding in findings)
