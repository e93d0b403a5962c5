"""The end of a command's process, without a release of memory that the system releases anyway.

An export leaves a third of a million objects, and Python takes seconds to collect and destroy them.
``gc.freeze`` would skip only the collection, and libraries bound by nanobind then report leaks.
"""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from aftexport.system.internals.python_exit import (
    flush_c_streams,
    join_threads,
    run_exit_functions,
)


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
