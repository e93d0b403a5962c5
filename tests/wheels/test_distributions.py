"""What the files in dist contain, and where they load. `make check-wheels` runs this."""

import re
import tarfile
import tomllib
from pathlib import Path

import pytest
from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.wheel_abi import analyze_wheel_abi

import aftexport
from wheels.distributions import (
    DIST,
    PURE_WHEELS,
    REPOSITORY,
    WHEELS,
    libraries,
    metadata,
    names,
    needed,
    symbols,
    tracked_files,
)

VERSION = aftexport.__version__
ENTRIES = {
    "libaftplugins_onnxruntime.so": {"RegisterCustomOps", "aftexport_describe_choice"},
    "libaftplugins_onnxruntime_cuda.so": {"RegisterCustomOps"},
    "libaftplugins_tensorrt.so": {"getCreators", "setLoggerFinder"},
}
MAX_BYTES = 100_000_000
"""The size up to which PyPI accepts a file without asking."""

pytestmark = pytest.mark.skipif(not WHEELS, reason="dist is empty: run `make wheels`")
each_wheel = pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: wheel.name)
each_content = pytest.mark.parametrize("wheel", [*WHEELS, *PURE_WHEELS], ids=lambda w: w.name)


@each_wheel
def test_wheel_fits_every_python(wheel: Path) -> None:
    name = r"(aftexport|aftexport_cuda)-(.*)-py3-none-manylinux_2_28_(x86_64|aarch64)\.whl"
    match = re.fullmatch(name, wheel.name)
    assert match, wheel.name
    assert match[2] == VERSION
    assert wheel.stat().st_size < MAX_BYTES


@each_wheel
def test_libraries_allow_tag(wheel: Path) -> None:
    """auditwheel finds no symbol newer than manylinux_2_28 has, and no library that it lacks."""
    processor = Architecture("aarch64" if "aarch64" in wheel.name else "x86_64")
    found = analyze_wheel_abi(
        Libc.GLIBC,
        processor,
        wheel,
        frozenset(
            {"libtensorrt_rtx.so.1"}
        ),  # libtensorrt_rtx.so stands for it, see rtx_alias.cmake
        disable_isa_ext_check=False,
        allow_graft=False,
    )
    allowed = found.policies.get_policy_by_name(f"manylinux_2_28_{processor.value}")
    assert not found.overall_policy < allowed, found.versioned_symbols


@each_wheel
def test_libraries_are_complete(wheel: Path) -> None:
    """A wheel whose kernels failed to build would have none."""
    cuda = "aftexport_cuda" in wheel.name
    expected = {name for name in ENTRIES if (name != "libaftplugins_onnxruntime.so") == cuda}
    assert libraries(wheel).keys() == expected | ({"libtensorrt_rtx.so"} if cuda else set())
    machine = "EM_AARCH64" if "aarch64" in wheel.name else "EM_X86_64"
    assert {elf.header["e_machine"] for elf in libraries(wheel).values()} == {machine}


@each_wheel
def test_libraries_know_no_python(wheel: Path) -> None:
    for elf in libraries(wheel).values():
        assert not [name for name in symbols(elf, defined=False) if re.match("_?Py", name)]
        assert not [name for name in needed(elf) if "python" in name]


@each_wheel
def test_libraries_export_only_entries(wheel: Path) -> None:
    """What is linked in, such as libstdc++, must not replace that of the process."""
    for name, elf in libraries(wheel).items():
        assert symbols(elf, defined=True) == ENTRIES.get(name, set())


@pytest.mark.parametrize("wheel", PURE_WHEELS, ids=lambda wheel: wheel.name)
def test_pure_wheel_has_python_files_only(wheel: Path) -> None:
    """It has those of the other wheels, and suits every system."""
    assert wheel.name == f"aftexport-{VERSION}-py3-none-any.whl"
    inside = {name for name in names(wheel) if ".dist-info/" not in name}
    tracked = {
        path.partition("/")[2]
        for path in tracked_files()
        if re.match("export/aftexport/|plugins/aftplugins/|serve/aftserve/", path)
    }
    assert inside == tracked


@each_content
def test_wheel_has_license_and_notice(wheel: Path) -> None:
    for name in ("LICENSE", "NOTICE"):
        (inside,) = [path for path in names(wheel) if path.endswith(f".dist-info/licenses/{name}")]
        assert inside
    assert metadata(wheel).get_all("License-File") == ["LICENSE", "NOTICE"]


@each_content
def test_wheel_has_no_tests(wheel: Path) -> None:
    folders = {path.split("/")[0] for path in names(wheel)}
    assert {f for f in folders if ".dist-info" not in f} <= {"aftexport", "aftplugins", "aftserve"}


def test_cuda_wheel_follows_version() -> None:
    """The libraries fit the operators of one version."""
    file = REPOSITORY / "plugins" / "cuda" / "pyproject.toml"
    project = tomllib.loads(file.read_text("utf-8"))["project"]
    assert project["version"] == VERSION
    assert f"aftexport=={VERSION}" in project["dependencies"]


def test_archive_has_every_file() -> None:
    (archive,) = DIST.glob("aftexport-*.tar.gz")
    assert archive.name == f"aftexport-{VERSION}.tar.gz"
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert inside - {"PKG-INFO"} == tracked_files()
