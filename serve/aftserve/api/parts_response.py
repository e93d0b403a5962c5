"""A response in parts that are made as the client reads them."""

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Mapping

import anyio.to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aftserve.api.deadline import disconnected

logger = logging.getLogger("aftserve.request")


class PartsResponse(Response):
    """A response whose parts are made one at a time, so that its memory stays bounded.

    Each part is made in a thread, because the tokens of a part can take a tenth of a second. The
    server makes a part once the client has read most of those before, and makes none after the
    client has left. At the deadline the server closes the connection, so that the client sees an
    incomplete body.

    Args:
        parts: the parts of the body.
        media_type: media type of the body.
        headers: other headers.
        size: bytes of the body; None if they are not known.
        deadline: deadline of the client by ``time.monotonic``; by default none, for parts that
            end with an error by themselves.
    """

    def __init__(
        self,
        parts: Iterator[bytes],
        media_type: str,
        headers: Mapping[str, str] | None = None,
        size: int | None = None,
        deadline: float = math.inf,
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        if size is not None:
            self.headers["content-length"] = str(size)
        self._parts = parts
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts."""
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while (part := await self._next()) is not None:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                if leaving.done():
                    return
                if time.monotonic() > self._deadline:
                    logger.warning("an answer was cut off at the deadline of its client")
                    return  # uvicorn closes the connection
            await send({"type": "http.response.body", "body": b""})
        finally:
            leaving.cancel()

    async def _next(self) -> bytes | None:
        """Return the next part; None after the last one. Cancellation does not wait for it."""
        return await anyio.to_thread.run_sync(next, self._parts, None, abandon_on_cancel=True)
