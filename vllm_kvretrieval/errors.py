"""Errors that a user can cause."""

from vllm.exceptions import VLLMClientError


class RetrievalConfigError(VLLMClientError, ValueError):
    """A ``kv_retrieval`` option, or the model it is asked to serve, is not acceptable.

    The message names the option, the value, and what to do instead. To vLLM it is the client's
    error: where a request raises it, the HTTP server answers 400.
    """
