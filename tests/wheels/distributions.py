"""The files that `make wheels` and `make cuda-wheel` wrote into dist, and the libraries inside."""

import io
import subprocess
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path, PurePosixPath

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

REPOSITORY = Path(__file__).parents[2]
DIST = REPOSITORY / "dist"
PURE_WHEELS = sorted(DIST.glob("aftexport-*-none-any.whl"))
"""That without kernels."""
WHEELS = sorted({*DIST.glob("*.whl")} - {*PURE_WHEELS})


def tracked_files() -> set[str]:
    """Return the paths of the repository's files, as Git knows them."""
    words = ["git", "ls-files", "--cached"]
    listed = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return {path for path in listed.stdout.splitlines() if (REPOSITORY / path).exists()}


def metadata(wheel: Path) -> Message:
    """Return the METADATA of a wheel; its payload is the readme."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return BytesParser().parsebytes(archive.read(name))


def names(wheel: Path) -> set[str]:
    """Return the paths inside a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def libraries(wheel: Path) -> dict[str, ELFFile]:
    """Return the shared libraries of a wheel by file name."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            PurePosixPath(name).name: ELFFile(io.BytesIO(archive.read(name)))
            for name in archive.namelist()
            if name.endswith(".so")
        }


def symbols(library: ELFFile, *, defined: bool) -> set[str]:
    """Return the names that a library exports, or those that it takes from others."""
    table = library.get_section_by_name(".dynsym")
    assert isinstance(table, SymbolTableSection)
    return {
        symbol.name
        for symbol in table.iter_symbols()
        if symbol.name
        and symbol["st_info"]["type"] != "STT_SECTION"
        and (symbol["st_shndx"] != "SHN_UNDEF") == defined
    }


def needed(library: ELFFile) -> set[str]:
    """Return the file names of the libraries that a library loads."""
    section = library.get_section_by_name(".dynamic")
    assert isinstance(section, DynamicSection)
    return {tag.needed for tag in section.iter_tags("DT_NEEDED")}
