"""The end of a command's process, without a release of memory that the system releases anyway.

An export leaves a third of a million objects, and Python takes seconds to collect and destroy them.
``gc.freeze`` would skip only the collection, and libraries bound by nanobind then report leaks.
"""

import atexit
import os
import sys
import threading
from typing import NoReturn


def end_process(status: int) -> NoReturn:
    """End the process after its threads and exit functions, as ``sys.exit`` does, but at once.

    Raises:
        SystemExit: if standard output or standard error cannot be written, so that Python
            reports the error.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except (OSError, ValueError):
        sys.exit(status)
    os._exit(status)
