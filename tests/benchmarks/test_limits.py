import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import limits

FUNCTION = re.compile(r"(?m)^[0-9a-f]+ <.*repeat.*>:$")
MULTIPLY_ADD = re.compile(r"\b(vfn?madd|v?dp|vpdp|vpmadd|fmla|bfmmla|smmla|sdot|smlal)")
VECTOR = re.compile(r"%[xyz]mm\d|\b[qv]\d+\b")
MEMORY = re.compile(r"\(%|\[(x\d|sp)")


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_sums_stay_in_registers() -> None:
    """A loop that keeps its sums in memory has half the rate."""
    library = limits.compile_library()._name
    words = ["objdump", "--disassemble", "--no-show-raw-insn", library]
    listing = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    loops = [text.partition("\n\n")[0].splitlines() for text in FUNCTION.split(listing)[1:]]
    assert loops
    for lines in loops:
        places = [n for n, line in enumerate(lines) if MULTIPLY_ADD.search(line)]
        assert len(places) >= 12, lines
        vectors = [line for line in lines[places[0] : places[-1] + 1] if VECTOR.search(line)]
        assert [line for line in vectors if MEMORY.search(line)] == []


def test_register_rates_count_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer call does proportionally more work, and an absent instruction has no rate."""
    monkeypatch.setattr(limits, "LIBRARY", tmp_path / "rates.so")
    library = limits.compile_library()
    assert library.fp32(10) == 10 * library.fp32(1) > 0
    rates = limits.register_rates(1)
    present = {kind for kind in limits.KINDS if getattr(library, kind)(1)}
    assert rates.keys() == present | {"copy"}
    assert isinstance(library, ctypes.CDLL)
    seconds = dict.fromkeys(rates, 0.5)
    found = limits.in_billions(rates, seconds)
    assert found["fp32"] == pytest.approx(rates["fp32"].work / 0.5e9)


def test_least_time_is_by_best_rate_of_slowest_kind() -> None:
    kinds = ("copy", "copy", "gemm", "exp")
    rates = {str(i): limits.Rate(kind, lambda: None, 10.0) for i, kind in enumerate(kinds)}
    seconds = {"0": 2.0, "1": 1.0, "2": 1.0, "3": 1.0}
    work = {"bytes_moved": 40.0, "flops": 30.0, "exps": 0.0}
    assert limits.least_seconds(rates, seconds, **work) == (4.0, "copy")
