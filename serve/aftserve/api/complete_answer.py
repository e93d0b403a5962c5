"""The complete answer for one document as a JSON object."""

import anyio.to_thread

from aftserve.http.loop_turns import LoopTurns
from aftserve.model.results import DocumentAnswer


async def complete_json(answer: DocumentAnswer, turns: LoopTurns) -> bytes:
    """Return an answer with every head as JSON; cancellation does not wait for it.

    An answer for many tokens takes a tenth of a second, so a thread makes it.
    """
    await turns.take()
    if not answer.tokens.results:
        return _json(answer)
    return await anyio.to_thread.run_sync(_json, answer, abandon_on_cancel=True)


def _json(answer: DocumentAnswer) -> bytes:
    return answer.complete().model_dump_json(exclude_none=True).encode()
