"""The tests of the CUDA kernels must notice every fault planted here.

AFT_TEST_ALL=1 plants all of them, and else a part of each file's.
"""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sampling import part_of

from . import emulated, memory_accesses
from .mutations import MUTATIONS, SLOWER, Mutation

TESTS = Path(__file__).parent


def _runs(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that compiles and runs kernels."""
    reason = emulated.missing()
    test = pytest.mark.skipif(reason is not None, reason=str(reason))(test)
    return pytest.mark.skipif(
        "AFT_CUDA_MUTATIONS" not in os.environ, reason="it takes minutes: make cuda-mutations"
    )(test)


def test_planted_text_occurs_once() -> None:
    """A fault whose text was reformatted would be noticed only in the seeded part with it."""
    wrong = [
        mutation
        for mutation in [*MUTATIONS, *SLOWER]
        for file in [emulated.KERNELS / mutation.file, TESTS / mutation.file]
        if file.exists() and file.read_text().count(mutation.old) != 1
    ]
    assert not wrong


def planted(mutation: Mutation, folder: Path) -> tuple[Path, Path]:
    """Return copies of the kernels and of the tests, one of which has the fault."""
    sources, tests = folder / "sources", TESTS
    shutil.copytree(emulated.KERNELS, sources)
    file = sources / mutation.file
    if not file.exists():  # a fault of the caller
        tests = folder / "tests" / "plugins" / "cuda"
        shutil.copytree(TESTS, tests, ignore=lambda *_: ["gpu"])
        (folder / "tests" / "oracles").symlink_to(TESTS.parents[1] / "oracles")
        file = tests / mutation.file
    file.write_text(file.read_text().replace(mutation.old, mutation.new))
    return sources, tests


def compiled(command: list[str | Path]) -> None:
    done = subprocess.run(
        [os.environ.get("CXX", "g++"), "-w", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} does not compile:\n{done.stderr}"


def build_mutant(
    mutation: Mutation, programs: Path, folder: Path, options: Sequence[str] = ("-O0",)
) -> Path:
    """Build the kernel with the fault and link the test to it, as a program that counts too."""
    sources, tests = planted(mutation, folder)
    stem, program, kernel = mutation.kernel, folder / "mutant", folder / "kernel.o"
    common = ["-std=c++17", "-fno-strict-aliasing", f"-I{sources}", f"-I{emulated.KERNELS.parent}"]
    common += [f"-I{tests}", f"-I{TESTS / 'emulator'}", "-x", "c++"]
    compiled([*options, *common, "-c", next(sources.rglob(f"{stem}.cu")), "-o", kernel])
    definition = programs / "CMakeFiles" / f"{stem}_definition.dir" / f"{stem}_test.cc.o"
    if tests != TESTS:
        definition = folder / "definition.o"
        compiled(["-O0", *common, "-c", tests / f"{stem}_test.cc", "-o", definition])
    hooks = programs / "CMakeFiles" / f"{stem}_accesses.dir" / "emulator" / "instrumentation.cc.o"
    libraries = [programs / "libemulator.so", f"-Wl,-rpath,{programs}", "-ldl"]
    compiled([kernel, definition, hooks, *libraries, "-o", program])
    return program


def survives(mutation: Mutation, programs: Path, folder: Path) -> bool:
    """Build the kernel with the fault, and run its test."""
    program = build_mutant(mutation, programs, folder)
    try:
        return emulated.run(program).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@_runs
@pytest.mark.parametrize("stem", emulated.STEMS)
def test_every_planted_fault_is_noticed(
    stem: str, tmp_path: Path, count_cases: Callable[[int, int], None]
) -> None:
    faults = [mutation for mutation in MUTATIONS if mutation.kernel == stem]
    assert faults, f"no faults are planted in {stem}"
    mutations = part_of(faults, lambda mutation: (str(mutation), {mutation.file}), 0.15)
    count_cases(len(mutations), len(faults))
    programs = emulated.build()
    folders = [tmp_path / str(i) for i in range(len(mutations))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        survived = pool.map(survives, mutations, [programs] * len(mutations), folders)
        missed = [mutation for mutation, lives in zip(mutations, survived, strict=True) if lives]
    assert not missed


@_runs
@pytest.mark.parametrize("mutation", SLOWER, ids=lambda mutation: mutation.kernel)
def test_every_planted_waste_is_counted(mutation: Mutation, tmp_path: Path) -> None:
    recorded = [
        "-O2",
        "-fsanitize=thread",
        "-fno-tree-vectorize",
        "-fno-store-merging",
        "-DEMULATOR_RECORDS",
    ]
    program = build_mutant(mutation, emulated.build(), tmp_path, recorded)
    assert memory_accesses.exceeding(mutation.kernel, program)
