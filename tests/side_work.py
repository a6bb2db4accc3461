"""Side work that runs when the fewest, or the most, have come before it."""


class AtOnce:
    """Runs everything when it is submitted."""

    idle = True

    def submit(self, work):
        work()

    def wait(self):
        pass


class Delayed:
    """Runs nothing before it is waited for."""

    def __init__(self):
        self._submitted = []

    @property
    def idle(self):
        """Whether everything has been waited for."""
        return not self._submitted

    def submit(self, work):
        self._submitted.append(work)

    def wait(self):
        submitted, self._submitted = self._submitted, []
        for work in submitted:
            work()
