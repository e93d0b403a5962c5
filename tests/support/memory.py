"""What Linux says of the memory of a process."""

import resource
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
_PAGES_PER_MIB = MIB / resource.getpagesize()

NEEDS_PROC = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")


def resident_mib(process: int | str = "self") -> float:
    """What it has of the machine's memory."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) / _PAGES_PER_MIB


def fresh_mib(process: int | str = "self") -> float:
    """Pages it was given since it began."""
    after_the_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
    return int(after_the_name.split()[7]) / _PAGES_PER_MIB
