"""Headers include down: mechanisms and encoder, then sums, then matmul, then simd or device.

The room of a file is its folder, or the folder that a header of the root is named after: encoder.h
belongs to encoder. A file includes files of its own room and of lower layers, by their paths from
plugins/cpu or plugins/cuda.
"""

import re
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"
LAYERS = {
    ".": 0,  # parameter structs and entry points of the mechanisms, memory, the processor
    "simd": 1,
    "device": 1,
    "matmul": 2,
    "sums": 3,
    "mechanisms": 4,
    "mechanisms/aft_full": 4,
    "mechanisms/recurrent": 4,
    "encoder": 4,
    "dispatch": 5,
    "methods": 6,
}
ELSEWHERE = {"emulator.h", "cpu/kernels.h"}
"""The emulated GPU of the tests, in place of the header of CUDA, and the kernels' parameters."""
INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
SUFFIXES = {".h", ".cc", ".cuh", ".cu"}


def sources(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES)


def room_of(path: Path) -> str:
    """Return the room of a path from plugins/cpu or plugins/cuda."""
    folder = path.parent.as_posix()
    return path.stem if folder == "." and path.stem in LAYERS else folder


def wrong_includes(root: Path) -> list[str]:
    """List every include that goes up or to another room of the same layer."""
    wrong = []
    for path in (path.relative_to(root) for path in sources(root)):
        for included in INCLUDE.findall((root / path).read_text()):
            if included in ELSEWHERE:
                continue
            assert (root / included).exists(), f"{path} includes {included}, which does not exist"
            room, other = room_of(path), room_of(Path(included))
            if other != room and LAYERS[other] >= LAYERS[room]:
                wrong.append(f"{path} includes {included}")
    return wrong


@pytest.mark.parametrize("part", ["cpu", "cuda"])
def test_kernels_include_down(part: str) -> None:
    assert sources(PLUGINS / part)
    assert wrong_includes(PLUGINS / part) == []


@pytest.mark.parametrize(
    ("path", "included"),
    [
        ("simd/math.h", "matmul/product.h"),
        ("matmul/product.h", "encoder.h"),
        ("mechanisms/aft.cc", "encoder.h"),
        ("matmul/product.h", "sums/sums.h"),
        ("sums/sums.h", "mechanisms/aft.h"),
        ("encoder/linear.cc", "mechanisms/aft.h"),
        ("mechanisms/aft.cc", "dispatch/table.h"),
        ("encoder/pool.h", "mechanisms/sums.h"),
        ("kernels.h", "simd/math.h"),
    ],
)
def test_include_up_is_found(tmp_path: Path, path: str, included: str) -> None:
    for name, text in ((included, ""), (path, f'#include "{included}"\n')):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert wrong_includes(tmp_path) == [f"{path} includes {included}"]
