"""The answers to newline-delimited documents, each sent as soon as it and those before are done."""

import asyncio
import time
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aftserve.api.deadline import disconnected
from aftserve.api.error_responses import status_of
from aftserve.errors import DeadlineError
from aftserve.schemas import LineProblem

_PART_BYTES = 1 << 16
"""Answers that are done are sent together up to this size."""


class LinesResponse(Response):
    """A response with one line for each task, in their order.

    At the deadline, the tasks that are not done get a line with status 504. All tasks end with the
    response, and once the client has left. A closed connection may show at the next line only.

    Args:
        tasks: the tasks that make the lines.
        media_type: media type of the body.
        deadline: deadline of the client by ``time.monotonic``.
    """

    def __init__(
        self, tasks: Sequence["asyncio.Task[bytes]"], media_type: str, deadline: float
    ) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._tasks = tasks
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines."""
        leaving = asyncio.create_task(disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            part = bytearray()
            for number, task in enumerate(self._tasks):
                if not await self._wait(task, leaving):
                    return
                part += self._line(task)
                following = self._tasks[number + 1 : number + 2]
                if len(part) < _PART_BYTES and all(one.done() for one in following):
                    continue
                await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
                part.clear()
            await send({"type": "http.response.body", "body": bytes(part)})
        finally:
            for one in (leaving, *self._tasks):
                one.cancel()

    async def _wait(self, task: "asyncio.Task[bytes]", leaving: "asyncio.Task[None]") -> bool:
        """Wait for a task until the deadline; return False if the client leaves meanwhile."""
        left = self._deadline - time.monotonic()
        await asyncio.wait({task, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return task.done() or not leaving.done()

    def _line(self, task: "asyncio.Task[bytes]") -> bytes:
        if task.done():
            return task.result()
        error = DeadlineError()
        problem = LineProblem(detail=str(error), status=status_of(error))
        return problem.model_dump_json(exclude_none=True).encode() + b"\n"
