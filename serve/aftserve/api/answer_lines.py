"""The answer for one document as JSON lines: the document, its tokens in parts, and the end."""

import time
from collections.abc import Iterator

from pydantic import BaseModel

from aftserve.api.error_responses import status_of
from aftserve.errors import DeadlineError
from aftserve.model.answer_parts import StreamEnd
from aftserve.model.results import DocumentAnswer
from aftserve.schemas import LineProblem


def answer_lines(answer: DocumentAnswer, deadline: float) -> Iterator[bytes]:
    """Yield the lines of an answer; at the deadline, a line with the problem ends them.

    Args:
        answer: the answer.
        deadline: the client's deadline by ``time.monotonic``.
    """
    yield _line(answer.result)
    count = 1
    for part in answer.tokens.parts():
        if time.monotonic() > deadline:
            error = DeadlineError()
            yield _line(LineProblem(detail=str(error), status=status_of(error)))
            return
        yield _line(part)
        count += 1
    yield _line(StreamEnd(lines=count))


def _line(content: BaseModel) -> bytes:
    return content.model_dump_json(exclude_none=True).encode() + b"\n"
