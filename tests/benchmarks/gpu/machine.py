"""What the check needs of a machine, and what this one has."""

import ctypes
import importlib.util
import shutil
import sys
from pathlib import Path

LEAST_CAPABILITY = (8, 0)
TOOLKIT = Path("/usr/local/cuda")


def missing() -> list[str]:
    """What this machine lacks; empty if the check can run."""
    lacks = []
    if (why := _no_gpu()) is not None:
        lacks.append(f"an NVIDIA GPU ({why})")
    lacks += [name for name in ("nvcc", "cmake") if program(name) is None]
    if importlib.util.find_spec("torch") is None:
        lacks.append(f"PyTorch ({sys.executable} has none; PYTHON=... names another)")
    elif not lacks:
        lacks += _torch_lacks()
    return lacks


def program(name: str) -> Path | None:
    """Where a program is: on the PATH, beside this Python, in NVIDIA's wheels or toolkit."""
    site = (Path(place) for place in sys.path if place.endswith("site-packages"))
    places = [Path(sys.executable).parent, *(place / "nvidia" / "cu13" / "bin" for place in site)]
    places += [TOOLKIT / "bin", TOOLKIT / "compute-sanitizer"]
    paths = (None, *map(str, places))
    found = next((found for path in paths if (found := shutil.which(name, path=path))), None)
    return Path(found) if found else None


def _no_gpu() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "its driver, libcuda.so.1, is not installed"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value == 0:
        return "its driver finds none"
    return None


def _torch_lacks() -> list[str]:
    import torch

    if torch.version.cuda is None:
        return [f"PyTorch built for CUDA ({sys.executable} has one for CPUs)"]
    if not torch.cuda.is_available():
        return ["PyTorch that can use the GPU (torch.cuda.is_available() is false)"]
    if (capability := torch.cuda.get_device_capability()) < LEAST_CAPABILITY:
        return [
            f"a GPU of compute capability {'.'.join(map(str, LEAST_CAPABILITY))} "
            f"(this one has {'.'.join(map(str, capability))})"
        ]
    return []
