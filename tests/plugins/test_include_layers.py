"""Headers of the kernels include down: mechanisms and encoder, then matmul, then simd or device.

The layer of a file is that of its folder. A file includes files of its own folder and of lower
layers, by their paths from plugins/cpu or plugins/cuda.
"""

import re
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"
LAYERS = {
    ".": 0,  # the interface: parameter structs and entry points
    "simd": 1,
    "device": 1,
    "matmul": 2,
    "mechanisms/shared": 3,
    "mechanisms": 4,
    "mechanisms/aft_full": 4,
    "mechanisms/recurrent": 4,
    "encoder": 4,
    "dispatch": 5,
    "methods": 6,
}
ELSEWHERE = {"emulator.h"}
"""The tests' emulator of a GPU, in place of CUDA's own header."""
INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
SUFFIXES = {".h", ".cc", ".cuh", ".cu"}


def sources(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES)


def wrong_includes(root: Path) -> list[str]:
    """List every include that goes up or to another folder of the same layer."""
    wrong = []
    for path in sources(root):
        name, folder = path.relative_to(root).as_posix(), path.parent.relative_to(root).as_posix()
        for included in INCLUDE.findall(path.read_text()):
            if included in ELSEWHERE:
                continue
            assert (root / included).exists(), f"{name} includes {included}, which does not exist"
            other = Path(included).parent.as_posix()
            if other != folder and LAYERS[other] >= LAYERS[folder]:
                wrong.append(f"{name} includes {included}")
    return wrong


@pytest.mark.parametrize("part", ["cpu", "cuda"])
def test_kernels_include_down(part: str) -> None:
    assert sources(PLUGINS / part)
    assert wrong_includes(PLUGINS / part) == []


@pytest.mark.parametrize(
    ("path", "included"),
    [
        ("simd/math.h", "matmul/product.h"),
        ("matmul/product.h", "mechanisms/shared/sums.h"),
        ("mechanisms/shared/sums.h", "mechanisms/aft.h"),
        ("encoder/linear.cc", "mechanisms/aft.h"),
        ("mechanisms/aft.cc", "dispatch/table.h"),
        ("kernels.h", "simd/math.h"),
    ],
)
def test_include_up_is_found(tmp_path: Path, path: str, included: str) -> None:
    for name, text in ((included, ""), (path, f'#include "{included}"\n')):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert wrong_includes(tmp_path) == [f"{path} includes {included}"]
