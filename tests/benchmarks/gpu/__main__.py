"""``make gpu-check``: builds for this machine's GPU, checks every kernel, times them, reports.

Exit status: 0 if all is right; 1 if a check failed, or could not run here and no option left it
out; 3 if the machine lacks a GPU, nvcc, CMake or PyTorch; 4 if checks are left for --continue.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.gpu import MECHANISMS, machine

LENGTHS = tuple(1024 * 4**i for i in range(6))
MACHINE_LACKS = 3
UNFINISHED = 4
SECONDS = 330.0
"""After which nothing begins: with the two minutes that a program may take, under eight minutes."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make gpu-check GPU_CHECK=",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--mechanism",
        nargs="+",
        choices=MECHANISMS,
        default=MECHANISMS,
        help="only these (default: all)",
    )
    add(
        "--tokens",
        type=int,
        nargs="+",
        default=LENGTHS,
        help=f"lengths of the documents (default: {' '.join(map(str, LENGTHS))})",
    )
    add("--batch", type=int, default=1, help="documents of a run (default: %(default)s)")
    add("--dim", type=int, default=512, help="channels (default: %(default)s)")
    add("--rounds", type=int, default=21, help="of each contender (default: %(default)s)")
    add("--no-kernels", action="store_true", help="do not check the kernels")
    add("--no-sanitizer", action="store_true", help="do not run compute-sanitizer")
    add("--no-timing", action="store_true", help="do not time them")
    add("--no-models", action="store_true", help="do not run exported models")
    add(
        "--bundles",
        type=Path,
        help="verify the bundles of this folder in ONNX Runtime's CUDA provider instead of "
        "exporting models, which needs all of aftexport's packages",
    )
    add("--no-onnxruntime", action="store_true", help="no models in ONNX Runtime's CUDA provider")
    add("--no-tensorrt", action="store_true", help="no models in TensorRT")
    add("--no-bindings", action="store_true", help="do not check NVIDIA's Python bindings")
    add(
        "--seconds",
        type=float,
        default=SECONDS,
        help="begin nothing after so long; the build is not cut short (default: %(default)g)",
    )
    add(
        "--continue",
        dest="go_on",
        action="store_true",
        help="add to the record in --out, without what passed or was timed already",
    )
    add(
        "--out",
        type=Path,
        default=Path(__file__).parent,
        help="folder of the record (default: %(default)s)",
    )
    options = parser.parse_args()
    lacks = machine.missing()
    if lacks:
        print(f"gpu-check needs {', and '.join(lacks)}.", file=sys.stderr)
        return MACHINE_LACKS
    # Imports torch.
    from benchmarks.gpu.check import check

    options.out.mkdir(parents=True, exist_ok=True)
    record = check(options)
    unmet = [outcome for outcome in record.outcomes if not outcome.passed or outcome.skipped]
    if unmet:
        print("\nNot right:", *unmet, sep="\n  ", file=sys.stderr)
    if record.waiting:
        print(
            f"\n{len(record.waiting)} checks are left. Go on: make gpu-check GPU_CHECK=--continue",
            file=sys.stderr,
        )
    return 1 if unmet else UNFINISHED if record.waiting else 0


if __name__ == "__main__":
    sys.exit(main())
