"""An engine of TensorRT or TensorRT-RTX on the GPU, without torch."""

import warnings
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.engines import RunStoppedError, Stop, Tensors
from aftexport.engines.cuda import Graph, Memory, Pinned, Stream
from aftexport.engines.tensorrt.runtimes import TensorRt, deserialize, element, load
from aftexport.engines.tensorrt.settings import RuntimeName
from aftexport.errors import EngineError
from aftexport.system.contract import AXES, LENGTHS, main_input

_MAX_BUCKETS = 32
"""Maximum number of cached graphs; the least recently used graph is dropped."""


@dataclass(frozen=True)
class Profile:
    """The documents and tokens that an optimization profile accepts."""

    shortest: tuple[int, int]  # `(batch, tokens)`
    best: tuple[int, int]
    longest: tuple[int, int]

    def can_take(self, batch: int, tokens: int) -> bool:
        """Return whether the shape is within the range of the profile."""
        sizes = zip(self.shortest, (batch, tokens), self.longest, strict=True)
        return all(low <= size <= high for low, size, high in sizes)


def choose_profile(profiles: Sequence[Profile], batch: int, tokens: int) -> int:
    """Return the index of the fitting profile whose best length is nearest, by the ratio."""
    fitting = [i for i, profile in enumerate(profiles) if profile.can_take(batch, tokens)]
    if not fitting:
        ranges = " or ".join(
            f"{p.shortest[0]} to {p.longest[0]} documents of {p.shortest[1]} to {p.longest[1]}"
            for p in profiles
        )
        raise EngineError(
            f"The engine expects {ranges} tokens, got {batch} documents of {tokens} tokens.",
            "Send shorter documents or fewer, or export with a larger --max-length or --max-batch.",
        )
    return min(fitting, key=lambda i: abs(np.log(tokens / profiles[i].best[1])))


def bucket(tokens: int, longest: int) -> int:
    """Return the padded length of a batch, so that only a few lengths need a graph.

    Each doubling from 32 has four lengths: at most a fifth of the tokens is padding.
    """
    if tokens <= 32:
        return min(32, longest)
    step = 1 << (tokens - 1).bit_length() - 3
    return min(-(-tokens // step) * step, longest)


def without_padding(outputs: Tensors, tokens: int) -> dict[str, NDArray[np.generic]]:
    """Return ``[batch, width]`` or ``[batch, tokens, width]`` outputs without padded tokens."""
    return {name: x[:, :tokens] if x.ndim == 3 else x for name, x in outputs.items()}


@dataclass
class _Bucket:
    """A shape with its execution context and its graph."""

    context: Any
    shapes: dict[str, tuple[int, ...]]
    graph: Graph | None = None


class TensorrtEngine:
    """A built engine on the GPU. It is not thread-safe.

    If the model takes ``lengths``, a batch is padded to the next bucket. The work of a bucket
    is recorded as a CUDA graph on its second use. TensorRT-RTX records graphs itself, and
    compiles its kernels on first use. EngineError is raised without the runtime or a GPU.
    """

    name = "tensorrt"
    takes_choice = False

    def __init__(
        self, serialized: bytes, runtime: RuntimeName, *, uses_plugins: bool = False
    ) -> None:
        self._trt: TensorRt = load(runtime)
        self._stream = Stream()
        self._runtime, self._engine = deserialize(self._trt, serialized, uses_plugins=uses_plugins)
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        self.types = {name: element(self._engine.get_tensor_dtype(name)) for name in names}
        self.input_names = tuple(name for name in names if name in AXES)
        self.output_names = tuple(name for name in names if name not in AXES)
        self._main = main_input(self.input_names)
        self._features = tuple(map(int, self._engine.get_tensor_shape(self._main)[2:]))
        self.profiles = [self._profile(i) for i in range(self._engine.num_optimization_profiles)]
        self._graphs = runtime == "tensorrt"
        self._buckets: OrderedDict[tuple[int, int], _Bucket] = OrderedDict()
        self._pinned = {name: Pinned(self._bytes(name)) for name in names}
        self._memory = {name: Memory(self._bytes(name)) for name in names}
        # All buckets share one scratch memory, because they run one after the other.
        self._scratch = Memory(self._engine.device_memory_size_v2)

    @property
    def title(self) -> str:
        """The runtime and its version, for people."""
        return self._trt.title

    @property
    def min_tokens(self) -> int:
        """The minimum number of tokens; 1 if the model takes ``lengths`` and so allows padding."""
        if LENGTHS in self.input_names:
            return 1
        return min(profile.shortest[1] for profile in self.profiles)

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of a document."""
        return max(profile.longest[1] for profile in self.profiles)

    @property
    def max_batch(self) -> int:
        """The maximum number of documents in a run."""
        return max(profile.longest[0] for profile in self.profiles)

    def run(
        self, inputs: Tensors, stop: Stop | None = None, outputs: Collection[str] | None = None
    ) -> dict[str, NDArray[np.generic]]:
        """Run the model once; see ``Engine.run``. All outputs are computed.

        Work on the GPU cannot be interrupted. A stop takes effect before the run, or between
        two parts of a batch that is larger than the engine's maximum.
        """
        try:
            ids = np.asarray(inputs[self._main])
            arrays = {name: np.asarray(inputs[name]) for name in self.input_names}
        except KeyError as error:
            raise EngineError(
                f"The input {error} is missing.", "Give every input of the model."
            ) from error
        if not self._fits(arrays):
            shapes = ", ".join(f"{name} {a.dtype} {a.shape}" for name, a in arrays.items())
            raise EngineError(
                f"Expected inputs {self._main} {[-1, -1, *self._features]} and lengths [-1], got "
                f"{shapes}.",
                "Check the shapes and types of the inputs.",
            )
        # A batch above the engine's maximum runs in parts.
        parts = []
        for start in range(0, len(ids), self.max_batch):
            if stop is not None and stop.is_requested:
                raise RunStoppedError
            part = {name: a[start : start + self.max_batch] for name, a in arrays.items()}
            parts.append(self._run_part(part))
        return {
            name: np.concatenate([part[name] for part in parts])
            for name in parts[0]
            if outputs is None or name in outputs
        }

    def _fits(self, arrays: Tensors) -> bool:
        """Return whether the ranks and types of inputs are those of the engine."""
        tokens = arrays[self._main]
        return (
            tokens.ndim == 2 + len(self._features)
            and tokens.shape[2:] == self._features
            and all(len(a) == len(tokens) for a in arrays.values())
            and all(a.dtype == self.types[name] for name, a in arrays.items())
        )

    def release(self) -> None:
        """Do nothing, because all memory is on the GPU and has a constant size."""

    def _run_part(self, inputs: Tensors) -> dict[str, NDArray[np.generic]]:
        batch, tokens = inputs[self._main].shape[:2]
        profile = choose_profile(self.profiles, batch, tokens)
        if LENGTHS in self.input_names:
            longest = self.profiles[profile].longest[1]
            shortest = self.profiles[profile].shortest[1]
            tokens = max(bucket(tokens, longest), shortest)
        self._fill(inputs, batch, tokens)
        ready = self._bucket(profile, batch, tokens)
        sizes = {name: self._size(name, shape) for name, shape in ready.shapes.items()}
        for name in self.input_names:
            self._stream.to_device(self._memory[name], self._pinned[name], sizes[name])
        if ready.graph is not None:
            ready.graph.launch(self._stream)
        else:
            self._enqueue(ready)
        for name in self.output_names:
            self._stream.to_host(self._pinned[name], self._memory[name], sizes[name])
        self._stream.wait()
        asked = inputs[self._main].shape[1]
        outputs = {name: self._output(name, ready.shapes[name]) for name in self.output_names}
        return without_padding(outputs, asked)

    def _fill(self, inputs: Tensors, batch: int, tokens: int) -> None:
        given = inputs[self._main]
        padded = self._pinned[self._main].array((batch, tokens, *self._features), given.dtype)
        width = given.shape[1]
        padded[:, :width] = given
        padded[:, width:] = 0  # any valid token
        if LENGTHS in inputs:
            self._pinned[LENGTHS].array((batch,), np.dtype(np.int64))[:] = inputs[LENGTHS]

    def _bucket(self, profile: int, batch: int, tokens: int) -> _Bucket:
        """Return the bucket of a shape; record its graph on the second use, after allocations."""
        key = (batch, tokens)
        if key in self._buckets:
            self._buckets.move_to_end(key)
            ready = self._buckets[key]
            if self._graphs and ready.graph is None:
                self._record(ready)
            return ready
        if len(self._buckets) >= _MAX_BUCKETS:
            self._buckets.popitem(last=False)
        # A graph holds the state of its context, so each graph has its own context.
        context = self._context(profile)
        shapes = self._input_shapes(batch, tokens)
        for name in self.input_names:
            if not context.set_input_shape(name, shapes[name]):
                raise self._failure(f"refuses {name} of shape {shapes[name]}")
        shapes = {name: shapes[name] for name in self.input_names}
        shapes |= {name: tuple(context.get_tensor_shape(name)) for name in self.output_names}
        context.set_device_memory(self._scratch.address, self._scratch.size)
        for name, memory in self._memory.items():
            context.set_tensor_address(name, memory.address)
        self._buckets[key] = _Bucket(context, shapes)
        return self._buckets[key]

    def _record(self, ready: _Bucket) -> None:
        """Record the graph of a bucket; turn graphs off if a layer, such as a loop, forbids it."""
        try:
            ready.graph = self._stream.capture(lambda: self._enqueue(ready))
        except EngineError as error:
            self._graphs = False
            warnings.warn(f"CUDA graphs are off: {error.problem}", stacklevel=2)

    def _context(self, profile: int) -> Any:
        module = self._trt.module
        managed = module.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._trt.name == "tensorrt_rtx":
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(managed)
            config.cuda_graph_strategy = module.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            managed = config
        context = self._trt.attempt(
            lambda: self._engine.create_execution_context(managed),
            "cannot create a context",
            "Free memory on the GPU.",
        )
        if not context.set_optimization_profile_async(profile, self._stream.handle):
            raise self._failure(f"refuses profile {profile}")
        return context

    def _enqueue(self, ready: _Bucket) -> None:
        if not ready.context.execute_async_v3(self._stream.handle):
            raise self._failure("failed")

    def _failure(self, event: str) -> EngineError:
        return EngineError(
            f"{self._trt.title} {event}: {self._trt.reason()}.",
            "Send shorter or fewer documents at once. If it still fails, build the engine again.",
        )

    def _profile(self, index: int) -> Profile:
        shapes = self._engine.get_tensor_profile_shape(self._main, index)
        low, best, high = ((int(shape[0]), int(shape[1])) for shape in shapes)
        return Profile(low, best, high)

    def _size(self, name: str, shape: Sequence[int]) -> int:
        widths = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
        return int(np.prod(shape)) * widths[self.types[name]]

    def _input_shapes(self, batch: int, tokens: int) -> dict[str, tuple[int, ...]]:
        return {self._main: (batch, tokens, *self._features), LENGTHS: (batch,)}

    def _bytes(self, name: str) -> int:
        """Return the maximum size of a tensor in bytes."""
        batch, tokens = self.max_batch, self.max_tokens
        shapes = self._input_shapes(batch, tokens)
        if name not in shapes:
            *axes, width = self._engine.get_tensor_shape(name)
            shapes[name] = (batch, *([tokens] if len(axes) == 2 else []), int(width))
        return self._size(name, shapes[name])

    def _output(self, name: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
        kind = self.types[name]
        if kind == "bfloat16":  # the upper half of a float32
            bits = self._pinned[name].array(shape, np.dtype(np.uint16))
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return self._pinned[name].array(shape, np.dtype(kind)).copy()
