"""The machine code of the CUDA kernels in a built library, by NVIDIA's cuobjdump and nvdisasm."""

import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.machine import program

LIBRARY = Path(__file__).parents[3] / "build" / "cuda" / "libaft_cuda.a"
TOOLS = ("cuobjdump", "nvdisasm")
_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+) )?([\w.]+)\s*([^;]*);", re.MULTILINE
)
_LABEL = re.compile(r"`\(([^)]+)\)")
_MEMBER = re.compile(r"^member .*:(\w+)\.cu\.o:$", re.MULTILINE)
_EXTRACTED = re.compile(r"^Extracting ELF file .*: (\S+)$", re.MULTILINE)
_USAGE = re.compile(r"Function (\S+):\n\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_RESERVED = {"90": 1024, "100": 1024, "120": 1024}
"""Bytes of the driver in a block's shared memory, which cuobjdump counts from sm_90 on."""
_ARCHITECTURE = re.compile(r"\.sm_(\d+)a?\.cubin$", re.MULTILINE)


class Instruction(NamedTuple):
    """An instruction of a GPU.

    Attributes:
        address: bytes after the kernel's first instruction.
        predicate: the register that disables it, such as ``!P0``, or an empty string.
        opcode: its name with all suffixes, such as ``LDG.E.128``.
        operands: the rest of the line.
    """

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without suffixes."""
        return self.opcode.partition(".")[0]

    @property
    def label(self) -> str:
        """The label among the operands, or an empty string."""
        found = _LABEL.search(self.operands)
        return found[1] if found else ""

    @property
    def bytes(self) -> int:
        """The bytes that a thread's access to memory moves."""
        for part in self.opcode.split(".")[1:]:
            if part in ("128", "64"):
                return int(part) // 8
            if part in ("U8", "S8", "8"):
                return 1
            if part in ("U16", "S16", "16"):
                return 2
        return 4


@dataclass(frozen=True)
class Kernel:
    """A kernel as compiled for one architecture.

    Attributes:
        stem: the name of its source file.
        name: as in the source, with template arguments, such as ``sum_kernel<BFloat16, 8>``.
        architecture: the compute capability without its dot.
        registers: number of registers of a thread.
        spilled: bytes of a thread's stack and local memory.
        shared: bytes of static shared memory.
        code: the instructions in their order.
        labels: the addresses of labels.
    """

    stem: str
    name: str
    architecture: str
    registers: int
    spilled: int
    shared: int
    code: list[Instruction] = field(repr=False)
    labels: dict[str, int] = field(repr=False)

    @property
    def function(self) -> str:
        """The name without template arguments."""
        return self.name.partition("<")[0]

    @property
    def element(self) -> str:
        """The type of the tensors: ``float``, ``Half`` or ``BFloat16``."""
        first = self.name.partition("<")[2].partition(",")[0].rstrip(">").strip()
        return first if first in ("Half", "BFloat16") else "float"


def find_tool(name: str) -> Path:
    """Return the path of one of ``TOOLS``.

    Raises:
        FileNotFoundError: if neither the PATH nor an installed wheel has it.
    """
    path = program(name)
    if path is None:
        raise FileNotFoundError(f"Expected {name}, found none: pip install nvidia-cuda-{name}")
    return path


def architectures_in(library: Path) -> set[str]:
    """Return the compute capabilities, without the dot, that a library has code for."""
    return set(_ARCHITECTURE.findall(_run(find_tool("cuobjdump"), "-lelf", library)))


def disassemble(
    library: Path, architecture: str, stems: Collection[str] | None = None
) -> Iterator[Kernel]:
    """Yield the kernels of a static library for one architecture.

    Args:
        library: the path of libaft_cuda.a.
        architecture: the compute capability without its dot.
        stems: the source files whose kernels are wanted; None for all.
    """
    cuobjdump, nvdisasm = map(find_tool, TOOLS)
    target = f"sm_{architecture}"
    listing = _run(cuobjdump, "-res-usage", "-arch", target, library)
    usage = {name: tuple(map(int, numbers)) for name, *numbers in _USAGE.findall(listing)}
    names = dict(zip(usage, _readable_names(list(usage)), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        printed = _run(cuobjdump, "-xelf", target, library.resolve(), folder=folder)
        _, *members = _MEMBER.split(printed)
        for stem, listed in zip(members[::2], members[1::2], strict=True):
            if stems is not None and stem not in stems:
                continue
            for file in _EXTRACTED.findall(listed):
                text = _run(nvdisasm, "-c", Path(folder) / file)
                for section in text.split("//--------------------- .text.")[1:]:
                    mangled = section.partition(" ")[0]
                    code, labels = parse_code(section)
                    registers, stack, shared, local = usage[mangled]
                    yield Kernel(
                        stem=stem,
                        name=names[mangled],
                        architecture=architecture,
                        registers=registers,
                        spilled=stack + local,
                        shared=max(0, shared - _RESERVED.get(architecture, 0)),
                        code=code,
                        labels=labels,
                    )


def _readable_names(mangled: list[str]) -> list[str]:
    """Return names of kernels with their template arguments, without namespaces."""
    printed = _run("c++filt", *mangled)
    for words in ("aft::cuda::", "(anonymous namespace)::", "(AftCudaGate)"):
        printed = printed.replace(words, "")
    names = [line.removeprefix("void ").partition("(")[0] for line in printed.splitlines()]
    return [name.replace("> >", ">>") for name in names]


def parse_code(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of a listing of nvdisasm, and the addresses of its labels."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in text.splitlines():
        if found := _INSTRUCTION.match(line):
            address, predicate, opcode, operands = found.groups()
            code.append(Instruction(int(address, 16), predicate or "", opcode, operands))
            labels |= dict.fromkeys(waiting, code[-1].address)
            waiting.clear()
        elif line.startswith(".L_") and line.endswith(":"):
            waiting.append(line[:-1])
    return code, labels


def _run(*words: str | Path, folder: str | None = None) -> str:
    return subprocess.run(
        list(map(str, words)), cwd=folder, capture_output=True, text=True, check=True
    ).stdout
