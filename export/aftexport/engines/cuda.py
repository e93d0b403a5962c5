"""The GPU, by the CUDA bindings of Python: devices, streams, graphs and memory, without torch."""

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.errors import EngineError


@dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        name: as the driver has it.
        capability: 90 for compute capability 9.0.
    """

    name: str
    capability: int

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.capability // 10}.{self.capability % 10}"


def runtime() -> Any:
    """The module ``cuda.bindings.runtime``.

    Raises:
        EngineError: where it is not installed.
    """
    try:
        from cuda.bindings import runtime as module
    except ImportError as error:
        raise EngineError(
            "The CUDA bindings of Python are not installed.", "Run: pip install cuda-bindings"
        ) from error
    return module


def call(function: str, *arguments: Any) -> Any:
    """Calls a function of the CUDA runtime; its result, or a tuple where it has several.

    Raises:
        EngineError: with CUDA's own words.
    """
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
        raise EngineError(f"CUDA failed in {function}: {words}.", "Look at nvidia-smi.")
    return results[0] if len(results) == 1 else tuple(results)


def device() -> Device:
    """The GPU in use, the first that CUDA_VISIBLE_DEVICES lets through.

    Raises:
        EngineError: where there is none, or no driver for it.
    """
    module = runtime()
    status, count = module.cudaGetDeviceCount()
    if status != module.cudaError_t.cudaSuccess or not count:
        words = module.cudaGetErrorString(status)[1].decode()
        raise EngineError(
            f"No GPU was found here ({words}).", "Look at nvidia-smi; a container takes --gpus all."
        )
    properties = call("cudaGetDeviceProperties", 0)
    return Device(properties.name.decode(), properties.major * 10 + properties.minor)


class Memory:
    """Bytes on the GPU, given back when this object goes."""

    def __init__(self, size: int) -> None:
        self.address: int = call("cudaMalloc", max(size, 1))
        self.size = size
        weakref.finalize(self, _quietly, "cudaFree", self.address)


class Pinned:
    """Bytes on the host that the GPU copies from and to by itself."""

    def __init__(self, size: int) -> None:
        module = runtime()
        self.address: int = call("cudaHostAlloc", max(size, 1), module.cudaHostAllocDefault)
        self._bytes: NDArray[np.uint8] = np.frombuffer(_view(self.address, size), np.uint8)
        weakref.finalize(self, _quietly, "cudaFreeHost", self.address)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """The first bytes as an array."""
        count = int(np.prod(shape)) * dtype.itemsize
        return self._bytes[:count].view(dtype).reshape(shape)


class Stream:
    """What the GPU does in order."""

    def __init__(self) -> None:
        self.handle: int = int(call("cudaStreamCreateWithFlags", runtime().cudaStreamNonBlocking))
        weakref.finalize(self, _quietly, "cudaStreamDestroy", self.handle)

    def to_device(self, target: Memory, source: Pinned, size: int) -> None:
        """Copies ``size`` bytes to the GPU."""
        kind = runtime().cudaMemcpyKind.cudaMemcpyHostToDevice
        call("cudaMemcpyAsync", target.address, source.address, size, kind, self.handle)

    def to_host(self, target: Pinned, source: Memory, size: int) -> None:
        """Copies ``size`` bytes from the GPU."""
        kind = runtime().cudaMemcpyKind.cudaMemcpyDeviceToHost
        call("cudaMemcpyAsync", target.address, source.address, size, kind, self.handle)

    def wait(self) -> None:
        """Waits until all of it is done."""
        call("cudaStreamSynchronize", self.handle)

    def capture(self, enqueue: Callable[[], None]) -> "Graph":
        """Records what ``enqueue`` puts on the stream, without running it."""
        mode = runtime().cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        call("cudaStreamBeginCapture", self.handle, mode)
        try:
            enqueue()
        finally:
            graph = call("cudaStreamEndCapture", self.handle)
        return Graph(graph)


class Graph:
    """Recorded work, launched at once."""

    def __init__(self, graph: Any) -> None:
        self._graph = call("cudaGraphInstantiate", graph, 0)
        call("cudaGraphDestroy", graph)
        weakref.finalize(self, _quietly, "cudaGraphExecDestroy", self._graph)

    def launch(self, stream: Stream) -> None:
        """Puts all of it on the stream."""
        call("cudaGraphLaunch", self._graph, stream.handle)


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * max(size, 1)).from_address(address)).cast("B")


def _quietly(function: str, handle: Any) -> None:
    """For finalizers: at the end of the process the driver may be gone already."""
    getattr(runtime(), function)(handle)
