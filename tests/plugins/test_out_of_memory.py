"""An allocation that fails on a thread of the runtime makes the run fail with an error."""

import subprocess
import sys
from pathlib import Path

import pytest

from .runner import LIBRARY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is Linux's")

# A window of a million keys takes each task 1 GB, whatever the document.
PROGRAM = """
import resource, sys
from pathlib import Path
import numpy as np
from plugins.runner import INPUTS, random_inputs, session

names = INPUTS["AftLocal"]
small = random_inputs("AftLocal", 4, 512, 64)
large = [*small[:3], np.zeros((1, 1_999_999), np.float32), small[4]]
one = session("AftLocal", threads=2)
before = one.run(None, dict(zip(names, small)))[0]
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (1500 << 20),) * 2)  # for one thread of the two
failures = 0
while failures < 5:
    try:
        one.run(None, dict(zip(names, large)))
    except Exception as error:
        failures += 1
        print(error)
assert np.array_equal(one.run(None, dict(zip(names, small)))[0], before)
"""


def test_failed_allocation_spares_next_run() -> None:
    assert LIBRARY is not None
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("AftLocal: std::bad_alloc") == 5, done.stdout
