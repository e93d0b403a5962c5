import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import register_rates

FUNCTION = re.compile(r"(?m)^[0-9a-f]+ <.*repeat.*>:$")
MULTIPLY_ADD = re.compile(r"\b(vfn?madd|v?dp|vpdp|vpmadd|fmla|bfmmla|smmla|sdot|smlal)")
VECTOR = re.compile(r"%[xyz]mm\d|\b[qv]\d+\b")
MEMORY = re.compile(r"\(%|\[(x\d|sp)")


def test_missing_instruction_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = SimpleNamespace(fp32=lambda rounds: 0 * rounds)
    monkeypatch.setattr(register_rates, "compile_library", lambda: lacking)
    with pytest.raises(RuntimeError, match="Expected a processor with AVX2 and FMA"):
        register_rates.register_rate("fp32", 1)


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_sums_stay_in_registers() -> None:
    """A loop that keeps its sums in memory has half the rate."""
    library = register_rates.compile_library()._name
    words = ["objdump", "--disassemble", "--no-show-raw-insn", library]
    listing = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    loops = [text.partition("\n\n")[0].splitlines() for text in FUNCTION.split(listing)[1:]]
    assert loops
    for lines in loops:
        places = [n for n, line in enumerate(lines) if MULTIPLY_ADD.search(line)]
        assert len(places) >= 12, lines
        vectors = [line for line in lines[places[0] : places[-1] + 1] if VECTOR.search(line)]
        assert [line for line in vectors if MEMORY.search(line)] == []
