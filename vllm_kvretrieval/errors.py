"""Errors that a user can cause."""


class RetrievalConfigError(ValueError):
    """A ``kv_retrieval`` option, or the model it is asked to serve, is not acceptable.

    The message names the option, the value, and what to do instead.
    """
