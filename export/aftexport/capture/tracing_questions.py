"""Questions of a forward whether it is being captured, answered as in an ordinary run of PyTorch.

A forward may compute something else while it is captured. The export must have the branch that
PyTorch runs, so the code of a model gets the answer no.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType

from aftexport.capture.shape_guards import is_the_users, line_of
from aftexport.system.internals.torch_operators import tracing_questions

_LIBRARY = "transformers"
"""A library whose captured branch is the general one: it keeps every mask, whatever its values."""
_LOCK = threading.RLock()


@contextmanager
def answered_as_in_pytorch() -> Iterator[list[str]]:
    """Let a model's own code find that it is not captured, in this thread, during the block.

    Yields:
        A list that receives each question, with the line that asked it.
    """
    thread, asked = threading.get_ident(), list[str]()

    def asking(own: Callable[[], bool], name: str) -> Callable[[], bool]:
        def answer() -> bool:
            if threading.get_ident() != thread or not (line := _line_of_model()):
                return own()
            asked.append(f"{name}() ({line})")
            return False

        return answer

    with _LOCK:  # torch is shared by the whole process
        changed = [(question, question.__code__) for question in tracing_questions()]
        for question, code in changed:
            # A new body, not a new function: the model may have imported the function by name.
            own = FunctionType(code, question.__globals__)
            name = f"{question.__module__}.{question.__name__}"
            question.__defaults__ = (asking(own, name),)
            question.__code__ = _asked.__code__
        try:
            yield asked
        finally:
            for question, code in changed:
                question.__code__, question.__defaults__ = code, None


def _asked(answer: Callable[[], bool]) -> bool:
    return answer()


def _line_of_model() -> str:
    """Return the line of the model that asks; empty if a library asks for itself."""
    frame: FrameType | None = sys._getframe(2)
    # torch and transformers have functions that hand the question on.
    while frame is not None and _package(frame) in ("torch", _LIBRARY) and _is_question(frame):
        frame = frame.f_back
    if frame is None or not is_the_users(frame) or _package(frame) == _LIBRARY:
        return ""
    return line_of(frame, frame.f_lineno)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_question(frame: FrameType) -> bool:
    return frame.f_code.co_name.startswith("is_") or frame.f_code is _asked.__code__
