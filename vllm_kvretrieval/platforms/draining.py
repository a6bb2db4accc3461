"""A server that is told to end: it answers what it has taken, and sends others away.

vLLM goes on taking requests until its engine has ended. The engine rejects them, so they get an
empty answer with status 200, or, once it has ended, a 500, while the server's health stays good. No
router takes the first one for an error. Here they get a 503 from the moment on at which the server
is told to end. Those that are on their way to the engine get there before it is told, too.
"""

import time
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from vllm.logger import init_logger

logger = init_logger("vllm.kvretrieval.http")

ON_THEIR_WAY_S = 1.0
"""Seconds until the engine is told: what has arrived may have to be read, and divided in tokens."""
METRICS = "/metrics"
"""What is served to the end: who drains a server looks there."""
STATUS = 503
MESSAGE = "This server ends, and takes no more requests: ask another one, or ask again later."


class Ending:
    """Whether a server has been told to end.

    Attributes:
        begun: Whether it has.
    """

    def __init__(self) -> None:
        self.begun = False

    def watch(self, client: Any) -> None:
        """Notice when a server is told to end.

        Args:
            client: The server's ``EngineClient``. In a thread of its own vLLM tells it first.
        """
        shutdown = client.shutdown

        def announced(timeout: float | None = None) -> None:
            if not self.begun:
                self.begun = True
                logger.info("This server ends: it answers other requests with status %d.", STATUS)
                if timeout:
                    time.sleep(min(timeout, ON_THEIR_WAY_S))
            shutdown(timeout=timeout)

        client.shutdown = announced

    def refuses(self, scope: Scope) -> bool:
        """Whether a request is to be sent away."""
        return self.begun and not scope["path"].endswith(METRICS)


async def send_away(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request as a server that ends, and close its connection; see the ASGI."""
    error = {"message": MESSAGE, "type": "ServiceUnavailableError", "param": None, "code": STATUS}
    headers = {"Connection": "close", "Retry-After": "1"}
    await JSONResponse({"error": error}, STATUS, headers)(scope, receive, send)
