"""Expected times of the CUDA kernels on GPUs, from bytes, machine code and launches.

Needs the libraries of `make cuda` and no GPU.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu import MECHANISMS
from benchmarks.gpu.devices import DEVICES, Device
from benchmarks.gpu.disassembly import LIBRARY, architectures_in
from benchmarks.gpu.expectation import Codes, Time, time_of
from benchmarks.gpu.launches import AFT_FULL_GEMM, Launches
from benchmarks.gpu.workloads import LAYER, Workload

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NOT_CAUSAL = (LAYER, AFT_FULL_GEMM)
LENGTHS = (4096, 16384, 65536, 1048576)
HEADER = (
    f"{'GPU':9} {'mechanism':28} {'type':4} {'tokens':>9} {'launches':>8} {'MB':>9} "
    f"{'Minstr.':>9} {'us':>10} {'of limit':>8}  bound"
)


def expect(
    launches: Launches, codes: Codes, device: Device, only_loops: bool = False
) -> list[Time]:
    """Return the time of every launch of a workload; ``only_loops`` as in ``time_of``."""
    return [time_of(launch, codes.of(launch), device, only_loops) for launch in launches.all()]


def limit(workload: Workload, device: Device) -> float:
    """Return the least seconds: those of a copy of its bytes, or of its products in a library."""
    return max(workload.bytes_moved / device.copy, workload.flops / device.gemm)


def bound(times: list[Time]) -> str:
    """Return what takes most of the time of a workload."""
    seconds = dict.fromkeys((time.bound for time in times), 0.0)
    for time in times:
        seconds[time.bound] += time.seconds
    return max(seconds, key=seconds.__getitem__)


def line(name: str, kind: str, workload: Workload, times: list[Time], device: Device) -> str:
    """Return the printed line of a workload."""
    seconds = sum(time.seconds for time in times)
    moved = sum(time.bytes for time in times) / 1e6
    instructions = sum(time.instructions for time in times) / 1e6
    return (
        f"{device.name:9} {name:28} {kind:4} {workload.tokens:9,} {len(times):8} {moved:9,.0f} "
        f"{instructions:9,.1f} {seconds * 1e6:10,.1f} {limit(workload, device) / seconds:8.0%}  "
        f"{bound(times)}"
    )


def lines(options: argparse.Namespace, codes: Codes, device: Device) -> Iterator[str]:
    """Yield the lines of a GPU."""
    for mechanism in options.mechanism:
        for causal in (False, True):
            if causal and mechanism in NOT_CAUSAL:
                continue
            name = f"{mechanism}{', causal' if causal else ''}"
            stem = "aft_full" if mechanism == AFT_FULL_GEMM else mechanism
            for kind in options.type:
                for tokens in options.tokens:
                    workload = Workload(
                        stem, options.batch, tokens, options.dim, TYPES[kind], causal
                    )
                    if why := workload.too_large(int(device.memory)):
                        yield f"{device.name:9} {name:28} {kind:4} {tokens:9,} {why}"
                        continue
                    times = expect(Launches(workload, mechanism), codes, device)
                    yield line(name, kind, workload, times, device)


def main() -> int:
    names = [device.name for device in DEVICES]
    every = (*MECHANISMS, AFT_FULL_GEMM, LAYER)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.expect", description=__doc__)
    add = parser.add_argument
    add("--device", nargs="+", choices=names, default=names, help="default: all")
    add("--mechanism", nargs="+", choices=every, default=every, help="default: all")
    add("--type", nargs="+", choices=list(TYPES), default=list(TYPES), help="default: all")
    add("--tokens", type=int, nargs="+", default=LENGTHS, help="default: %(default)s")
    add("--batch", type=int, default=1, help="default: %(default)s")
    add("--dim", type=int, default=512, help="channels (default: %(default)s)")
    add("--library", type=Path, default=LIBRARY, help="default: %(default)s")
    options = parser.parse_args()
    if not options.library.exists():
        print(f"Expected {options.library}, found none: run `make cuda`.", file=sys.stderr)
        return 1
    built = architectures_in(options.library)
    codes: dict[str, Codes] = {}
    print(HEADER)
    for device in DEVICES:
        if device.name not in options.device:
            continue
        architecture = device.architecture
        if architecture not in built:
            print(f"{device.name:9} left out: the library has no code for sm_{architecture}")
            continue
        if architecture not in codes:
            codes[architecture] = Codes(options.library, architecture)
        for text in lines(options, codes[architecture], device):
            print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
