"""A run in this process, without Ray: from rows to lines of JSON."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from aftserve.batch.answering import OfflineClassifier
from aftserve.batch.rows import Rows
from aftserve.model.answers import Answer
from aftserve.model.documents import TokenizedDocument, document_answer
from aftserve.schemas import DocumentResult, Timings
from aftserve.types import ExtraFields


def lines_of(
    loaded: OfflineClassifier, rows: Rows, *, strict: bool, on_done: Callable[[int], None]
) -> Iterator[tuple[str, bool]]:
    """Yield the line of each document, and whether it has an answer.

    Raises:
        AftexportError: if a document has no answer and ``strict`` is set.
    """
    ids, inputs = deque[Any](), deque[ExtraFields]()

    def documents() -> Iterator[Any]:
        for row in rows:
            ids.append(row.id)
            inputs.append(row.inputs)
            yield row.document

    def given() -> Iterator[ExtraFields]:
        while inputs:
            yield inputs.popleft()

    def finish(one: TokenizedDocument, answer: Answer, timings: Timings) -> DocumentResult:
        policy = loaded.classifier.policy
        return document_answer(loaded.bundle, policy, one, answer, timings).complete()

    outcomes = loaded.answer(documents(), given(), finish=finish, on_done=on_done)
    for number, outcome in enumerate(outcomes):
        id = ids.popleft()
        id = number if id is None else id
        if outcome.error is not None:
            if strict:
                error = outcome.error
                raise type(error)(f"document {id}: {error.problem}", error.remedy) from error
            answer = {"error": str(outcome.error)}
        else:
            assert outcome.result is not None  # made by finish
            answer = outcome.result.model_dump(mode="json", exclude_none=True, exclude={"timings"})
        line = json.dumps({"id": id} | answer, ensure_ascii=False, default=str, allow_nan=False)
        yield line + "\n", outcome.error is None
