"""CUDA devices, streams, graphs and memory through Python's CUDA bindings, without torch."""

import ctypes
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.errors import EngineError

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE: there is no GPU, or CUDA_VISIBLE_DEVICES hides it."""


@dataclass(frozen=True)
class Device:
    """A GPU."""

    name: str
    capability: int  # compute capability times 10, 90 for 9.0

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.capability // 10}.{self.capability % 10}"


def runtime() -> Any:
    """Return the module ``cuda.bindings.runtime``."""
    try:
        from cuda.bindings import runtime as module
    except ImportError as error:
        raise EngineError(
            "The CUDA bindings of Python are not installed.", "Run: pip install cuda-bindings"
        ) from error
    return module


def call(function: str, *arguments: Any) -> Any:
    """Call a function of the CUDA runtime; return its result, or a tuple of several results."""
    module = runtime()
    status, *results = getattr(module, function)(*arguments)
    if status != module.cudaError_t.cudaSuccess:
        words = module.cudaGetErrorString(status)[1].decode()
        if status == module.cudaError_t.cudaErrorMemoryAllocation:
            raise EngineError(
                "The GPU is out of memory.",
                "Send shorter documents or fewer at once, or build with a smaller --max-length "
                "or --max-batch.",
            )
        raise EngineError(f"CUDA failed in {function}: {words}.", "Check nvidia-smi.")
    return results[0] if len(results) == 1 else tuple(results)


def device() -> Device:
    """Return the GPU in use, the first in CUDA_VISIBLE_DEVICES; raise EngineError without one."""
    module = runtime()
    status, count = module.cudaGetDeviceCount()
    if status != module.cudaError_t.cudaSuccess or not count:
        words = module.cudaGetErrorString(status)[1].decode()
        raise EngineError(
            f"Expected a GPU, got none ({words}).",
            "Check nvidia-smi; start a container with --gpus all.",
        )
    properties = call("cudaGetDeviceProperties", 0)
    return Device(properties.name.decode(), properties.major * 10 + properties.minor)


def missing_gpu() -> str | None:
    """Return the reason why there is no GPU here; None if there is one.

    It asks the driver, because ONNX Runtime needs no bindings of Python.
    """
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return f"the NVIDIA driver is not installed, {_DRIVER} is missing"
    count = ctypes.c_int()
    if status := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return _driver_error(driver, status)
    return None if count.value else "the NVIDIA driver finds no device"


def _driver_error(driver: ctypes.CDLL, status: int) -> str:
    if status == _NO_DEVICE:
        return "no device is visible to the NVIDIA driver"
    text = ctypes.c_char_p()
    if driver.cuGetErrorString(status, ctypes.byref(text)) or not text.value:
        return f"the NVIDIA driver reports error {status}"
    return f"the NVIDIA driver reports error {status}, {text.value.decode()}"


class Memory:
    """Memory on the GPU, freed when this object is deleted."""

    def __init__(self, size: int) -> None:
        self.address: int = call("cudaMalloc", max(size, 1))
        self.size = size
        weakref.finalize(self, _quietly, "cudaFree", self.address)


class Pinned:
    """Pinned host memory, which the GPU accesses directly."""

    def __init__(self, size: int) -> None:
        module = runtime()
        self.address: int = call("cudaHostAlloc", max(size, 1), module.cudaHostAllocDefault)
        self._bytes: NDArray[np.uint8] = np.frombuffer(_view(self.address, size), np.uint8)
        weakref.finalize(self, _quietly, "cudaFreeHost", self.address)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the first bytes as an array."""
        count = int(np.prod(shape)) * dtype.itemsize
        return self._bytes[:count].view(dtype).reshape(shape)


class Stream:
    """A CUDA stream: a sequence of operations on the GPU."""

    def __init__(self) -> None:
        self.handle: int = int(call("cudaStreamCreateWithFlags", runtime().cudaStreamNonBlocking))
        weakref.finalize(self, _quietly, "cudaStreamDestroy", self.handle)

    def to_device(self, target: Memory, source: Pinned, size: int) -> None:
        """Copy ``size`` bytes to the GPU."""
        kind = runtime().cudaMemcpyKind.cudaMemcpyHostToDevice
        call("cudaMemcpyAsync", target.address, source.address, size, kind, self.handle)

    def to_host(self, target: Pinned, source: Memory, size: int) -> None:
        """Copy ``size`` bytes from the GPU."""
        kind = runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost
        call("cudaMemcpyAsync", target.address, source.address, size, kind, self.handle)

    def wait(self) -> None:
        """Wait until all work on the stream is done."""
        call("cudaStreamSynchronize", self.handle)

    def capture(self, enqueue: Callable[[], None]) -> "Graph":
        """Return a graph of the work that ``enqueue`` puts on the stream; do not run the work."""
        mode = runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        call("cudaStreamBeginCapture", self.handle, mode)
        try:
            enqueue()
        finally:
            graph = call("cudaStreamEndCapture", self.handle)
        return Graph(graph)


class Graph:
    """A CUDA graph: recorded work that is launched as a whole."""

    def __init__(self, graph: Any) -> None:
        self._graph = call("cudaGraphInstantiate", graph, 0)
        call("cudaGraphDestroy", graph)
        weakref.finalize(self, _quietly, "cudaGraphExecDestroy", self._graph)

    def launch(self, stream: Stream) -> None:
        """Put the recorded work on the stream."""
        call("cudaGraphLaunch", self._graph, stream.handle)


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * max(size, 1)).from_address(address)).cast("B")


def _quietly(function: str, handle: Any) -> None:
    """Call a function and ignore its status: the driver may already be unloaded at exit."""
    getattr(runtime(), function)(handle)
