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
TRIES = 0.005
"""The share of a request's time that may go into drafts of a kind that does not pay, to find out
whether that has changed."""
GOOD = 0.9
"""How likely tokens are accepted where drafts are good; what would not pay then is not tried."""


class Cost(NamedTuple):
    """The time that a draft takes, in that of a step without drafts for each of its requests.

    Attributes:
        once: Of any draft, however long.
        token: Of each of its tokens.
        shared: Of a step that verifies any drafts, of however many requests.
    """

    once: float
    token: float
    shared: float = 0.0

    def among(self, drafts: int) -> "Cost":
        """The same for one of so many drafts of a step, which bear what is shared."""
        return Cost(self.once + self.shared / max(drafts, 1), self.token)


VERIFY = Cost(0.0, 0.03, shared=0.15)
"""The time of drafts, as a share of a step beside its reads of contexts
(``python -m benchmarks.serving verifying``): a step of several rows multiplies matrices, attends
and samples by other functions, while each row adds little to what is read."""


class Plan(NamedTuple):
    """A draft that may be made.

    Attributes:
        tokens: Its length.
        rate: Tokens that a step with it yields on average, per time of a step without drafts.
    """

    tokens: int
    rate: float


NOTHING = Plan(0, 1.05)
"""No draft, in place of one that promises a gain of less than a twentieth: how likely tokens are
accepted is a guess at first, and a step that accepts none has lost its time."""


class Pace:
    """What a request's drafts have come to; as small for a long request as for a short one.

    Tokens of a kind are accepted independently of each other, with a probability that is estimated
    from the accepted ones and those that were wrong. Nothing is known of the tokens behind these.
    """

    __slots__ = ("_accepted", "_tried", "_waited")

    def __init__(self) -> None:
        self._accepted = [WEIGHT * prior for prior in PRIOR]
        self._tried = [WEIGHT] * len(PRIOR)
        self._waited = [0.0] * len(PRIOR)

    @staticmethod
    def kind(match: int) -> int:
        """The kind of a lookup with so many agreeing tokens; -1: there is none."""
        return sum(match >= bound for bound in BOUNDS) - 1

    def acceptance(self, kind: int) -> float:
        """How likely a token of a kind is accepted."""
        return self._accepted[kind] / self._tried[kind]

    def plan(self, kind: int, most: int, cost: Cost) -> Plan:
        """The draft of a kind that yields most tokens in the time that it takes.

        Args:
            kind: The kind; -1: there is nothing to draft.
            most: Its most tokens.
            cost: The time that it takes.
        """
        return best(self.acceptance(kind), most, cost) if kind >= 0 else NOTHING

    def probe(self, kind: int, most: int, cost: Cost) -> bool:
        """Whether to try a token of a kind that does not pay; see :data:`TRIES`.

        Args:
            kind, most, cost: See :meth:`plan`.
        """
        if kind < 0 or self.plan(kind, most, cost).tokens or not best(GOOD, most, cost).tokens:
            return False
        self._waited[kind] += TRIES
        if self._waited[kind] < cost.once + cost.token:
            return False
        self._waited[kind] = 0.0
        return True

    def note(self, kind: int, drafted: int, accepted: int) -> None:
        """Note that of a draft of a kind the first ``accepted`` tokens were right, and no more."""
        if self._tried[kind] > MEMORY:
            self._accepted[kind] /= 2
            self._tried[kind] /= 2
        self._accepted[kind] += accepted
        self._tried[kind] += accepted + (accepted < drafted)


def best(likely: float, most: int, cost: Cost) -> Plan:
    """The draft that yields most tokens in the time that it takes.

    Args:
        likely: How likely each of its tokens is accepted behind others that were.
        most: Its most tokens.
        cost: The time that it takes.
    """
    found, tokens, last = NOTHING, 1.0, 1.0
    for count in range(1, most + 1):
        last *= likely
        tokens += last
        rate = tokens / (1 + cost.once + count * cost.token)
        if rate > found.rate:
            found = Plan(count, rate)
    return found
