"""How many tokens to draft for a request, by how often its drafts were accepted so far."""

from typing import NamedTuple

BOUNDS = (1, 2, 3, 5, 9, 17)
"""The shortest match of each kind of lookups: behind longer matches more is accepted."""
PRIOR = (0.1, 0.2, 0.3, 0.5, 0.8, 0.9, 0.85)
"""How likely a token of each kind is accepted, as long as the request has shown nothing; the last
one is that of the model's own drafts."""
MODEL = len(BOUNDS)
"""The kind of drafts by the served model itself, over the budget's pages."""

WEIGHT = 4.0
"""Drafted tokens that a prior counts for."""
MEMORY = 64.0
"""Drafted tokens of a kind after which the older ones count half as much."""
PROBE = 32
"""Steps of a kind without a draft after which a single token is tried."""
ROW = 0.1
"""The time that a further row of a step takes, as a share of a step of one row (on CPUs)."""


def row_cost(requests: int) -> float:
    """The time of a row in a step of so many requests, in units of the time for one token.

    A row takes the same time in a larger batch, where a step yields more tokens.
    """
    return requests * ROW / (1 - ROW + requests * ROW)


class Plan(NamedTuple):
    """A draft that may be made.

    Attributes:
        tokens: Its length.
        rate: Tokens that a step with it yields on average, per time of a step without drafts.
    """

    tokens: int
    rate: float


NOTHING = Plan(0, 1.0)


class Pace:
    """What a request's drafts have come to; as small for a long request as for a short one.

    Tokens of a kind are accepted independently of each other, with a probability that is estimated
    from the accepted ones and those that were wrong. Nothing is known of the tokens behind these.
    """

    __slots__ = ("_accepted", "_skipped", "_tried")

    def __init__(self) -> None:
        self._accepted = [WEIGHT * prior for prior in PRIOR]
        self._tried = [WEIGHT] * len(PRIOR)
        self._skipped = [0] * len(PRIOR)

    @staticmethod
    def kind(match: int) -> int:
        """The kind of a lookup with so many agreeing tokens; -1: there is none."""
        return sum(match >= bound for bound in BOUNDS) - 1

    def acceptance(self, kind: int) -> float:
        """How likely a token of a kind is accepted."""
        return self._accepted[kind] / self._tried[kind]

    def plan(self, kind: int, most: int, cost: float) -> Plan:
        """The draft of a kind that yields most tokens in the time that it takes.

        Args:
            kind: The kind; -1: there is nothing to draft.
            most: Its most tokens.
            cost: The time that each of them takes, as a share of a step without drafts.
        """
        best, likely, tokens, last = NOTHING, 0.0, 1.0, 1.0
        if kind >= 0:
            likely = self.acceptance(kind)
        for count in range(1, most + 1 if likely else 1):
            last *= likely
            tokens += last
            rate = tokens / (1 + count * cost)
            if rate <= best.rate:
                break
            best = Plan(count, rate)
        return best

    def probe(self, kind: int) -> bool:
        """Whether to try a token of a kind that does not pay, to find out if that has changed."""
        self._skipped[kind] = (self._skipped[kind] + 1) % PROBE
        return self._skipped[kind] == 0

    def note(self, kind: int, drafted: int, accepted: int) -> None:
        """Note that of a draft of a kind the first ``accepted`` tokens were right, and no more."""
        if self._tried[kind] > MEMORY:
            self._accepted[kind] /= 2
            self._tried[kind] /= 2
        self._accepted[kind] += accepted
        self._tried[kind] += accepted + (accepted < drafted)
