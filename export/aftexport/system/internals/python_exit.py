"""Parts of Python itself: the steps at the end of a process, without the release of memory."""

import atexit
import ctypes
import sys
import threading
from collections.abc import Callable

from aftexport.system.internals.versions import Versions

VERSIONS = Versions("python", "3.11", "3.14")

with VERSIONS.named():
    join_threads: Callable[[], None] = threading._shutdown  # type: ignore[attr-defined]
    run_exit_functions: Callable[[], None] = atexit._run_exitfuncs

ATTRIBUTES = ("threading._shutdown", "atexit._run_exitfuncs")
"""Attributes of these parts that this module uses."""

_C_LIBRARY = "ucrtbase" if sys.platform == "win32" else None
"""The library with stdio; None for those that the process has loaded, which Windows lacks."""


def flush_c_streams() -> None:
    """Write the output that libraries in C left in the buffers of stdio."""
    ctypes.CDLL(_C_LIBRARY).fflush(None)
