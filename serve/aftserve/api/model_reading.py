"""Requests whose meaning depends on the model, while a reload may replace its bundle."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from aftexport.bundle.manifest import Manifest
from aftexport.errors import InputError
from aftserve.errors import UnavailableError
from aftserve.model.results import DocumentAnswer
from aftserve.serving.service import Service

T = TypeVar("T")

_MAX_READINGS = 4
"""Readings of a request before it is refused; a reload takes longer than most requests."""


async def read_and_answer(
    service: Service,
    read: Callable[[Manifest], T],
    answer: Callable[[T], Coroutine[Any, Any, Sequence[DocumentAnswer]]],
) -> tuple[T, Sequence[DocumentAnswer]]:
    """Read a request by a manifest, and answer it by the bundle of the same manifest.

    A reload may come between the two. The request is then read and answered again, because names
    that were found in one bundle may be absent from the other.

    Args:
        service: the model that answers.
        read: reads the request by a manifest, and raises an error if the model cannot answer it.
        answer: classifies what was read; its list may be empty.

    Returns:
        What was read, and the answers.

    Raises:
        UnavailableError: if another bundle answered each time.
    """
    for _ in range(_MAX_READINGS):
        bundle = service.active.bundle
        reading = read(bundle.manifest)
        try:
            answers = await answer(reading)
        except InputError:
            if service.active.bundle is bundle:
                raise
            continue  # the new bundle refused names of the one before
        used = answers[0].result.bundle if answers else service.active.bundle.digest
        if used == bundle.digest:
            return reading, answers
    raise UnavailableError(
        f"The bundle was replaced during each of {_MAX_READINGS} readings of the request.",
        "Send it again.",
        1,
    )
