from pathlib import Path

import pytest

from ..cuda import emulated

PLUGINS = emulated.REPOSITORY / "plugins" / "tensorrt"
BUILT = emulated.REPOSITORY / "build" / "cuda" / "tensorrt" / "libaftplugins_tensorrt.so"


@pytest.fixture(scope="session")
def programs() -> Path:
    """Build the plugin library over the emulated kernels and its test programs."""
    if emulated.missing() is not None:
        pytest.skip(str(emulated.missing()))
    return emulated.build(emulated.SANITIZER) / "tensorrt"


@pytest.fixture(scope="session")
def library(programs: Path) -> Path:
    """Return the plugin library over the emulated kernels."""
    return programs / "libaftplugins_tensorrt.so"


@pytest.fixture(params=["emulated", "cuda"])
def each_library(request: pytest.FixtureRequest, library: Path) -> Path:
    """Return the plugin library over the emulated or over the CUDA kernels."""
    if request.param == "emulated":
        return library
    name = BUILT.relative_to(emulated.REPOSITORY)
    if not BUILT.exists():
        pytest.skip(f"no {name} (`make cuda` builds it)")
    sources = [p for folder in (PLUGINS, emulated.KERNELS) for p in folder.rglob("*.[ch]*")]
    if BUILT.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        pytest.skip(f"{name} is older than its sources (`make cuda` builds it again)")
    return BUILT
