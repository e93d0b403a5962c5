"""Bank conflicts and uncoalesced accesses of each CUDA kernel stay within the committed bounds."""

import subprocess
from pathlib import Path

import pytest

from . import emulated, memory_accesses

pytestmark = pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))


@pytest.fixture(scope="module")
def programs() -> Path:
    return emulated.build()


def test_counts_of_known_accesses(programs: Path) -> None:
    done = subprocess.run([programs / "accesses_test"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("stem", emulated.STEMS)
def test_accesses_stay_within_bounds(programs: Path, stem: str) -> None:
    assert memory_accesses.exceeding(stem, programs / f"{stem}_accesses") == []


def test_ratios_above_one_have_reason() -> None:
    for place, bound in memory_accesses.read_table().items():
        assert max(bound.ratios) <= 1.1 or bound.reason, place
