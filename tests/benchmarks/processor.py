"""The processor of a run, told by family and model: virtual machines hide its name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
FLAGS = ("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8",
         "asimddp", "i8mm", "bf16")  # fmt: skip
"""The instruction sets that decide the rate of products."""
_GENERATIONS = (
    ("AuthenticAMD", 23, range(0x30), "AMD Zen"),
    ("AuthenticAMD", 23, range(0x30, 0x100), "AMD Zen 2"),
    ("AuthenticAMD", 25, range(0x10), "AMD Zen 3"),
    ("AuthenticAMD", 25, range(0x10, 0x20), "AMD Zen 4"),
    ("AuthenticAMD", 25, range(0x20, 0x60), "AMD Zen 3"),
    ("AuthenticAMD", 25, range(0x60, 0x100), "AMD Zen 4"),
    ("AuthenticAMD", 26, range(0x100), "AMD Zen 5"),
    ("GenuineIntel", 6, range(85, 86), "Intel Skylake or Cascade Lake"),
    ("GenuineIntel", 6, range(106, 107), "Intel Ice Lake"),
    ("GenuineIntel", 6, range(143, 144), "Intel Sapphire Rapids"),
    ("GenuineIntel", 6, range(207, 208), "Intel Emerald Rapids"),
    ("GenuineIntel", 6, range(173, 174), "Intel Granite Rapids"),
)
_ARM = "0x41"
_ARM_PARTS = {
    0xD03: "Arm Cortex-A53",
    0xD08: "Arm Cortex-A72",
    0xD0B: "Arm Cortex-A76",
    0xD0C: "Arm Neoverse N1",
    0xD40: "Arm Neoverse V1",
    0xD49: "Arm Neoverse N2",
    0xD4F: "Arm Neoverse V2",
}


@dataclass(frozen=True)
class Processor:
    """A model of processors.

    The title is the generation, or the numbers where it is not in the table. The numbers are those
    of CPUID; on aarch64, the implementer, 0, the part and the revision.
    """

    title: str
    name: str
    vendor: str
    family: int
    model: int
    stepping: int
    flags: tuple[str, ...]

    @property
    def slug(self) -> str:
        """The title for names of files."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def read_processor(cpuinfo: Path = CPUINFO) -> Processor:
    """Return the processor that the kernel describes."""
    text = cpuinfo.read_text("utf-8") if cpuinfo.exists() else ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = fields.get("flags", fields.get("Features", "")).split()
    if "CPU implementer" in fields:
        title, numbers = _aarch64(fields)
    else:
        title, numbers = _x86(fields)
    name = fields.get("model name", "unknown processor")
    return Processor(title, name, *numbers, tuple(flag for flag in FLAGS if flag in flags))


def _x86(fields: Mapping[str, str]) -> tuple[str, tuple[str, int, int, int]]:
    vendor = fields.get("vendor_id", "")
    family, model = int(fields.get("cpu family", 0)), int(fields.get("model", 0))
    titles = [
        t for v, f, models, t in _GENERATIONS if (v, f) == (vendor, family) and model in models
    ]
    numbers = f"{vendor} family {family} model {model}"
    unknown = numbers if vendor else fields.get("model name", "unknown processor")
    title = titles[0] if titles else unknown
    return title, (vendor, family, model, int(fields.get("stepping", 0)))


def _aarch64(fields: Mapping[str, str]) -> tuple[str, tuple[str, int, int, int]]:
    implementer, part = fields["CPU implementer"], int(fields["CPU part"], 16)
    title = f"aarch64 implementer {implementer} part {part:#x}"
    if implementer == _ARM:
        title = _ARM_PARTS.get(part, title)
    return title, (implementer, 0, part, int(fields.get("CPU revision", 0)))
