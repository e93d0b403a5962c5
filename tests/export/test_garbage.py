import gc
from pathlib import Path

import pytest
from commands import run_python

from aftexport.garbage import unsearched

_GARBAGE = """
import sys
from aftexport.garbage import unsearched_at_exit

class Ring:
    def __init__(self):
        self.self = self
    def __del__(self):
        print("found")

if "unsearched" in sys.argv:
    unsearched_at_exit()
ring = Ring()
"""


def test_nothing_is_searched_within_and_afterwards_as_before() -> None:
    assert gc.isenabled()
    with unsearched():
        with unsearched():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), unsearched():
        _ = 1 / 0
    assert gc.isenabled()


@pytest.mark.parametrize(("words", "found"), [((), "found\n"), (("unsearched",), "")])
def test_the_end_of_a_process_is_not_searched(
    words: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    outcome = run_python("-c", _GARBAGE, *words, cwd=tmp_path)
    assert (outcome.code, outcome.out) == (0, found)
