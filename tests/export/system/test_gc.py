import gc
from pathlib import Path

import pytest
from commands import run_python

from aftexport.system.gc import collection_paused

_GARBAGE = """
import sys
from aftexport.system.gc import no_collection_at_exit

class Ring:
    def __init__(self):
        self.self = self
    def __del__(self):
        print("collected")

if "none" in sys.argv:
    no_collection_at_exit()
ring = Ring()
"""


def test_collection_stops_only_within_block() -> None:
    assert gc.isenabled()
    with collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collection_paused():
        _ = 1 / 0
    assert gc.isenabled()


@pytest.mark.parametrize(("words", "collected"), [((), "collected\n"), (("none",), "")])
def test_nothing_is_collected_at_exit(
    words: tuple[str, ...], collected: str, tmp_path: Path
) -> None:
    outcome = run_python("-c", _GARBAGE, *words, cwd=tmp_path)
    assert (outcome.code, outcome.out) == (0, collected)
