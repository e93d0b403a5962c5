"""A command's process: signals that end it, its end, garbage collection, memory and cores.

An export leaves a third of a million objects, and Python takes seconds to collect and destroy them.
The system releases their memory anyway. ``gc.freeze`` would skip only the collection, and libraries
bound by nanobind then report leaks. The collector visits every object each time their number has
grown by a quarter.
"""

import ctypes
import gc
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from aftexport.system.internals.python_exit import flush_c_streams, join_threads, run_exit_functions

COMPLETION_START = "_ARGCOMPLETE"
"""The variable with the number of words up to the program, which argcomplete's scripts set."""


def is_completing() -> bool:
    """Return whether a shell asks what may follow, in place of running the command."""
    return COMPLETION_START in os.environ


def end_process(command: Callable[[], int]) -> NoReturn:
    """Run a command, and end the process with its status after threads and exit functions.

    Raises:
        SystemExit: if the command ends by a text, or if standard output or standard error cannot
            be written. Python then reports the error.
    """
    try:
        status = command()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    join_threads()
    run_exit_functions()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except (OSError, ValueError):
        sys.exit(status)
    flush_c_streams()
    os._exit(status)


class TerminatedError(KeyboardInterrupt):
    """The process received SIGTERM."""


def exit_status(end: KeyboardInterrupt) -> int:
    """Return the exit status of a command that a signal ended, by the convention of shells."""
    return 128 + (signal.SIGTERM if isinstance(end, TerminatedError) else signal.SIGINT)


class Interruption:
    """A signal handler that ends a command by an exception."""

    def __init__(self) -> None:
        self._raised: type[KeyboardInterrupt] | None = None
        self._time = -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise the exception of a signal, once per second."""
        now = time.monotonic()
        # The signal often comes twice, to the process and to its group. The second one must not
        # interrupt the cleanup.
        if now - self._time > 1:
            self._time = now
            self._raised = TerminatedError if number == signal.SIGTERM else KeyboardInterrupt
            raise self._raised

    def check(self) -> None:
        """Raise the exception again, since a library may have lost it in a callback."""
        if self._raised is not None:
            raise self._raised


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Let both signals end the block by an exception, unless they have other handlers."""
    defaults: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    is_main = threading.current_thread() is threading.main_thread()
    handled = [n for n, default in defaults.items() if is_main and signal.getsignal(n) == default]
    interruption = Interruption()
    for number in handled:
        signal.signal(number, interruption)
    try:
        yield interruption
    except KeyboardInterrupt:
        interruption.check()  # a library may have replaced the exception by its own
        raise
    finally:
        for number in handled:
            signal.signal(number, defaults[number])


def collect_frozen() -> None:
    """Collect all garbage, also among frozen objects, which stay thawed.

    An object that a thread still holds would be frozen for ever if the others were frozen again.
    """
    gc.unfreeze()
    gc.collect()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collection during the block, which makes lasting objects such as modules."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def give_back() -> None:
    """Make glibc return freed memory: by itself it keeps all pages below memory in use."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/core_cpus_list"


def usable_cores() -> int:
    """Return the number of cores for this process, by its affinity and its container's CPU quota.

    With more threads, a matrix product waits for the slowest thread. Hardware threads of one core
    count once, if Linux reports them.
    """
    import loky  # here, because it takes 40 ms, and most commands run no engine

    allowed: int = loky.cpu_count()
    try:
        cores = {Path(_TOPOLOGY.format(n)).read_text() for n in os.sched_getaffinity(0)}
    except (AttributeError, OSError):
        return allowed
    return min(allowed, len(cores))
