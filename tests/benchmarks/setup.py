"""What holds for the whole process: threads, memory, and where compiled code is kept."""

import ctypes
import os
import platform
import sys
from pathlib import Path

import torch

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


COMPILED = Path("build/inductor")
"""What torch.compile has compiled, for the next run."""
PEERS = Path("build/peers")
"""The packages of the peers, which ``make`` installs apart from those of aftexport."""


def prepare(threads: int) -> None:
    """Prepares this process; call it before anything is allocated or compiled."""
    keep_freed_memory()
    sys.path.append(str(PEERS.absolute()))
    os.environ["NNCF_CI"] = "1"  # NNCF would otherwise send statistics, where it finds the package
    torch.set_num_threads(threads)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(COMPILED.absolute())
    # A pool of compilers takes longer to start than a few kernels take to compile.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # Unasked, it finds out by seven seconds of trials; a compiler that cannot do it will say so.
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"


def keep_freed_memory() -> None:
    """Lets glibc keep what is freed for the next allocation, for every contender alike.

    A large block is otherwise fresh from the kernel on every call, and touching it for
    the first time can take longer than the work: on a virtual machine 20 to 100 ms for
    64 MiB. That is a price of the allocator, and would be counted as the contenders'.
    """
    if sys.platform != "linux":
        return
    mallopt = ctypes.CDLL(None).mallopt
    if not (mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1)):
        raise RuntimeError("glibc refused to keep freed memory")


def cpu_name() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
