"""Complete answers for many tokens do not stop the event loop."""

import asyncio
import threading
import time

import pytest
from served_heads import TAGGER, answer_of

from aftserve.api.document_answers import complete_json, run_until_disconnect
from aftserve.errors import DeadlineError
from aftserve.http.clients import LoopTurns
from aftserve.model.documents import DocumentAnswer


def test_answer_is_complete() -> None:
    answer = answer_of(TAGGER, 50)
    expected = answer.complete().model_dump_json(exclude_none=True).encode()
    assert asyncio.run(complete_json(answer, LoopTurns())) == expected


def test_deadline_does_not_wait_for_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on while a thread makes the answer."""
    go_on, threads = threading.Event(), list[int]()

    def slow(answer: DocumentAnswer) -> bytes:
        threads.append(threading.get_ident())
        assert go_on.wait(60)
        return b""

    async def stays() -> dict[str, str]:
        await asyncio.Event().wait()
        return {}

    async def answered() -> None:
        try:
            with pytest.raises(DeadlineError):
                await run_until_disconnect(
                    complete_json(answer_of(TAGGER, 50), LoopTurns()), stays, time.monotonic() + 0.1
                )
        finally:
            go_on.set()

    monkeypatch.setattr("aftserve.api.document_answers._json", slow)
    asyncio.run(answered())
    assert threads != [threading.get_ident()]
