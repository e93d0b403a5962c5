"""The least time of the mechanisms on GPUs, from their bytes and products; it needs no GPU.

It is the longer of a copy of the least bytes and of the multiply-adds in a library's product.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu import MECHANISMS
from benchmarks.gpu.workloads import LAYER, Workload

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LENGTHS = (4096, 16384, 65536, 1048576)
HEADER = (
    f"{'GPU':9} {'mechanism':28} {'type':4} {'tokens':>9} {'MB':>9} {'GFLOP':>9} {'copy us':>10} "
    f"{'product us':>10}  bound"
)


@dataclass(frozen=True)
class Device:
    """A GPU: bytes a second of a copy, and operations a second of a library's large product.

    ``gemm`` is for 16 bits, ``float32`` without TF32. ``memory`` is in bytes.
    """

    name: str
    copy: float
    gemm: float
    float32: float
    memory: float


DEVICES = (
    Device("H100", 3.0e12, 790e12, 57e12, 80e9),
    Device("H200", 4.3e12, 790e12, 57e12, 141e9),
    Device("L4", 0.27e12, 90e12, 25e12, 24e9),
    Device("RTX 4090", 0.92e12, 150e12, 82e12, 24e9),
    Device("B200", 7.0e12, 1700e12, 70e12, 180e9),
)
"""Rates that benchmarks reach, not those of data sheets; none was measured by this project."""


def least_seconds(workload: Workload, device: Device) -> dict[str, float]:
    """Return the seconds of a copy of the workload's bytes, and of its products in a library."""
    rate = device.float32 if workload.dtype == torch.float32 else device.gemm
    return {"memory": workload.bytes_moved / device.copy, "products": workload.flops / rate}


def lines(options: argparse.Namespace, device: Device) -> Iterator[str]:
    """Yield the lines of a GPU."""
    for mechanism in options.mechanism:
        for causal in (False, True) if mechanism != LAYER else (False,):
            name = f"{mechanism}{', causal' if causal else ''}"
            for kind in options.type:
                for tokens in options.tokens:
                    size = (options.batch, tokens, options.dim)
                    workload = Workload(mechanism, *size, TYPES[kind], causal)
                    start = f"{device.name:9} {name:28} {kind:4} {tokens:9,}"
                    if why := workload.too_large(int(device.memory)):
                        yield f"{start} {why}"
                        continue
                    seconds = least_seconds(workload, device)
                    yield (
                        f"{start} {workload.bytes_moved / 1e6:9,.0f} {workload.flops / 1e9:9,.1f} "
                        f"{seconds['memory'] * 1e6:10,.1f} {seconds['products'] * 1e6:10,.1f}  "
                        f"{max(seconds, key=seconds.__getitem__)}"
                    )


def main() -> None:
    names = [device.name for device in DEVICES]
    every = (*MECHANISMS, LAYER)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.roofline", description=__doc__)
    add = parser.add_argument
    add("--device", nargs="+", choices=names, default=names, help="default: all")
    add("--mechanism", nargs="+", choices=every, default=every, help="default: all")
    add("--type", nargs="+", choices=list(TYPES), default=list(TYPES), help="default: all")
    add("--tokens", type=int, nargs="+", default=LENGTHS, help="default: %(default)s")
    add("--batch", type=int, default=1, help="default: %(default)s")
    add("--dim", type=int, default=512, help="channels (default: %(default)s)")
    options = parser.parse_args()
    print(HEADER)
    for device in DEVICES:
        if device.name in options.device:
            print("\n".join(lines(options, device)))


if __name__ == "__main__":
    main()
