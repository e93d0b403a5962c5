"""The time that a workload should take on a GPU, from its bytes, instructions and launches."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path

from benchmarks.gpu.control_flow import ControlFlow, Loop, Work
from benchmarks.gpu.devices import (
    CACHE_SECONDS,
    CACHED_SHARE,
    LAUNCH_SECONDS,
    MEMORY_SECONDS,
    MERGE_CYCLES,
    PHASE_SECONDS,
    Device,
)
from benchmarks.gpu.disassembly import Kernel, disassemble
from benchmarks.gpu.launch import Launch
from benchmarks.gpu.occupancy import claim, resident_blocks

WARP = 32


class Code:
    """A kernel's machine code and its occupancy."""

    def __init__(self, kernel: Kernel) -> None:
        self.flow = ControlFlow(kernel)
        self.threads, _ = claim(kernel.stem, kernel.function)
        self.blocks = resident_blocks(kernel)
        self.is_tf32 = any("TF32" in i.opcode for i in kernel.code)

    @property
    def warps(self) -> float:
        """Warps of a block."""
        return self.threads / WARP

    def work_of(self, launch: Launch) -> Work:
        """Return the work of a warp of a launch."""
        hot, loops = self.flow.hot, self.flow.loops
        if hot is None:
            return self.flow.whole()
        behind = [loop for loop in loops if loop.header > hot.header]
        longest = max(behind, key=lambda o: self.flow.work_of(o).instructions, default=None)
        products = self._product_iterations(launch, hot)

        def trips(loop: Loop) -> float:
            if loop is hot:
                return launch.iterations
            if loop in behind:
                return launch.after if loop is longest else float(launch.after > 0)
            if loop in loops:
                return launch.before
            return products if self._multiplies(loop) else launch.inner

        return self.flow.whole(trips)

    def _multiplies(self, loop: Loop) -> bool:
        """Return whether a loop is an innermost one with products."""
        return self._flops(self.flow.work_of(loop)) > 0 and not any(
            self._flops(self.flow.work_of(inner)) for inner in loop.inner
        )

    def _flops(self, work: Work) -> float:
        """Return the operations of products of a warp's path."""
        if self.flow.has_products:
            return work.products
        return 2 * WARP * work.multiply_adds

    def _product_iterations(self, launch: Launch, hot: Loop) -> float:
        """Return how often the loops with products run in an iteration of the hot loop."""

        def with_products(count: float) -> float:
            def trips(loop: Loop) -> float:
                return count if self._multiplies(loop) else launch.inner

            return self._flops(self.flow.work_of(hot, trips))

        # Not by a count of 0: the fullest path would then be one around the loops.
        once, each = with_products(1), with_products(2) - with_products(1)
        if not launch.flops or not launch.iterations or not each:
            return 1
        needed = launch.flops / (launch.grid * self.warps * launch.iterations)
        return max(1.0, 1 + (needed - once) / each)


class Codes:
    """The machine code of a library for one architecture.

    Args:
        library: the path of libaft_cuda.a.
        architecture: the compute capability without its dot.
    """

    def __init__(self, library: Path, architecture: str) -> None:
        kernels = disassemble(library, architecture)
        self._kernels = {(kernel.stem, kernel.name): kernel for kernel in kernels}
        self._known: dict[tuple[str, str], Code] = {}

    def of(self, launch: Launch) -> Code | None:
        """Return the code of a launch; None if it is a library's product.

        Raises:
            KeyError: if the library has no kernel of that name.
        """
        if not launch.kernel:
            return None
        key = (launch.stem, launch.kernel)
        if key not in self._known:
            self._known[key] = Code(self._kernels[key])
        return self._known[key]


@dataclass(frozen=True)
class Time:
    """The parts of a launch's time in seconds.

    Attributes:
        issue: of the instructions, and between barriers.
        memory: of the bytes from memory and caches.
        products: of tensor cores, or of a library's product.
        latency: of loads in a row that nothing hides.
        merge: of records that one thread merges in a row.
        instructions: of all warps.
        bytes: from and to memory.
    """

    issue: float
    memory: float
    products: float
    latency: float
    merge: float
    instructions: float
    bytes: float

    @cached_property
    def bound(self) -> str:
        """The part that takes longest."""
        parts = ("issue", "memory", "products", "latency", "merge")
        return max(parts, key=lambda part: getattr(self, part))

    @property
    def seconds(self) -> float:
        """The time with that of the launch."""
        return getattr(self, self.bound) + LAUNCH_SECONDS  # type: ignore[no-any-return]


def time_of(launch: Launch, code: Code | None, device: Device, only_loops: bool = False) -> Time:
    """Return the time of a launch.

    Args:
        launch: its sizes.
        code: the kernel's; None for a library's product.
        device: the GPU.
        only_loops: takes no time for the code outside of loops, as estimates by hand do.
    """
    again_from_memory = launch.reused > CACHED_SHARE * device.cache
    read = launch.read + (launch.again if again_from_memory else 0)
    cached = launch.cached + (0 if again_from_memory else launch.again)
    memory = max(read / device.copy, (read + cached) / device.cache_rate)
    if code is None:
        products = launch.flops / device.library_rate(launch.is_float32)
        return Time(0, memory, products, 0, 0, 0, read)
    work = code.work_of(launch)
    counted = work.looped if only_loops and launch.iterations else work.instructions
    busiest = ceil(launch.grid / device.multiprocessors)  # blocks of one multiprocessor
    waves = ceil(busiest / code.blocks)
    return Time(
        issue=busiest * code.warps * counted / device.issue_rate
        + waves * work.barriers * PHASE_SECONDS / min(busiest, code.blocks),
        memory=memory,
        products=launch.flops / device.product_rate(code.is_tf32) if code.flow.has_products else 0,
        latency=waves * launch.exposed * MEMORY_SECONDS,
        merge=launch.records * (CACHE_SECONDS / launch.at_once + MERGE_CYCLES / device.clock),
        instructions=launch.grid * code.warps * work.instructions,
        bytes=read,
    )
