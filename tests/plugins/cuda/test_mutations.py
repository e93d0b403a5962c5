"""The tests of the CUDA kernels must notice every fault planted here.

AFT_TEST_ALL=1 plants all of them, and else a part of each file's.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sampling import part_of

from . import emulated
from .mutations import MUTATIONS, Mutation

pytestmark = [
    pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing())),
    pytest.mark.skipif(
        "AFT_CUDA_MUTATIONS" not in os.environ, reason="it takes minutes: make cuda-mutations"
    ),
]

TESTS = Path(__file__).parent


def survives(mutation: Mutation, programs: Path, folder: Path) -> bool:
    """Build the kernel with the fault, link the test to it, and run the test."""
    sources, tests = folder / "sources", TESTS
    shutil.copytree(emulated.KERNELS, sources)
    file = sources / mutation.file
    if not file.exists():  # a fault of the caller
        tests = folder / "tests" / "plugins" / "cuda"
        shutil.copytree(TESTS, tests, ignore=lambda *_: ["machine_code", "gpu"])
        (folder / "tests" / "oracles").symlink_to(TESTS.parents[1] / "oracles")
        file = tests / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has not one {mutation.old!r}"
    file.write_text(text.replace(mutation.old, mutation.new))

    stem, program = mutation.kernel, folder / "mutant"
    definition = programs / "CMakeFiles" / f"{stem}_definition.dir" / f"{stem}_test.cc.o"
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O0", "-fno-strict-aliasing"]
    command += ["-w", "-I", str(sources), "-I", str(tests), "-I", str(TESTS / "emulator")]
    command += ["-x", "c++", str(next(sources.rglob(f"{stem}.cu")))]
    command += ["-x", "none", str(definition if tests == TESTS else tests / definition.stem)]
    command += [str(programs / "libemulator.so"), f"-Wl,-rpath,{programs}", "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, f"{mutation} does not compile:\n{built.stderr}"
    try:
        return emulated.run(program).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@pytest.mark.parametrize("stem", emulated.STEMS)
def test_every_planted_fault_is_noticed(
    stem: str, tmp_path: Path, count_cases: Callable[[int, int], None]
) -> None:
    planted = [mutation for mutation in MUTATIONS if mutation.kernel == stem]
    assert planted, f"no faults are planted in {stem}"
    mutations = part_of(planted, lambda mutation: (str(mutation), {mutation.file}), 0.15)
    count_cases(len(mutations), len(planted))
    programs = emulated.build()
    folders = [tmp_path / str(i) for i in range(len(mutations))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        survived = pool.map(survives, mutations, [programs] * len(mutations), folders)
        missed = [mutation for mutation, lives in zip(mutations, survived, strict=True) if lives]
    assert not missed
