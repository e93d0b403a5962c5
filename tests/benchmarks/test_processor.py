from pathlib import Path

import pytest

from benchmarks.processor import read_processor

CPUINFO = """processor : 0
vendor_id : {vendor}
cpu family : {family}
model : {model}
model name : AMD EPYC
stepping : 1
flags : fpu avx2 fma {flags}
"""


@pytest.mark.parametrize(
    ("vendor", "family", "model", "title"),
    [
        ("AuthenticAMD", 25, 1, "AMD Zen 3"),
        ("AuthenticAMD", 25, 17, "AMD Zen 4"),
        ("AuthenticAMD", 26, 2, "AMD Zen 5"),
        ("GenuineIntel", 6, 207, "Intel Emerald Rapids"),
        ("GenuineIntel", 6, 999, "GenuineIntel family 6 model 999"),
    ],
)
def test_generation_follows_from_numbers(
    tmp_path: Path, vendor: str, family: int, model: int, title: str
) -> None:
    path = tmp_path / "cpuinfo"
    text = CPUINFO.format(vendor=vendor, family=family, model=model, flags="avx512_vnni sse")
    path.write_text(text, "utf-8")
    processor = read_processor(path)
    assert processor.title == title
    assert processor.flags == ("avx2", "fma", "avx512_vnni")
    assert (processor.family, processor.model, processor.stepping) == (family, model, 1)


@pytest.mark.parametrize(
    ("implementer", "part", "slug"),
    [
        ("0x41", "0xd0c", "arm-neoverse-n1"),
        ("0x41", "0xd4f", "arm-neoverse-v2"),
        ("0x41", "0xfff", "aarch64-implementer-0x41-part-0xfff"),
        ("0xc0", "0xd0c", "aarch64-implementer-0xc0-part-0xd0c"),
    ],
)
def test_aarch64_is_told_by_part(tmp_path: Path, implementer: str, part: str, slug: str) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimddp i8mm\n"
        f"CPU implementer\t: {implementer}\nCPU architecture: 8\nCPU variant\t: 0x3\n"
        f"CPU part\t: {part}\nCPU revision\t: 1\n",
        "utf-8",
    )
    processor = read_processor(path)
    assert processor.slug == slug
    assert processor.flags == ("asimddp", "i8mm")
    assert (processor.vendor, processor.model) == (implementer, int(part, 16))
