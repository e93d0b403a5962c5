"""Count the instructions per token that each kernel takes on an emulated aarch64.

    make native-aarch64 PART=1
    PYTHONPATH=tests:tests/support:examples .venv/bin/python -m benchmarks.aarch64 --record

The first command builds ``build/native/aarch64/count_workload``. QEMU names every
block of instructions before it runs. The counts are exact, and say nothing about time.
"""

import argparse
import collections
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.record import FOLDER, read_commit, write_record

PROGRAM = Path("build/native/aarch64/count_workload")
RECORD = FOLDER / "instructions-aarch64.json"

MECHANISMS = (
    "aft_simple",
    "aft_full",
    "aft_local",
    "aft_conv",
    "efficient_attention",
    "linear_attention",
    "fastformer",
)
OPERATORS = (
    "layer_norm_linear",
    "layer_norm_feed_forward",
    "linear_residual",
    "layer_norm_fastformer",
)
WITH_PRODUCTS = ("aft_full", *OPERATORS)
CHANNELS = 256

Case = tuple[str, str, str, bool]  # kernel, element, method, causal


def cases(only: str) -> Iterator[Case]:
    """Yield the rows of the table."""
    for kernel in (*MECHANISMS, *OPERATORS):
        if only not in kernel:
            continue
        for element in ("float32", "float16"):
            for causal in (False, True) if kernel in MECHANISMS else (False,):
                yield kernel, element, "fp32", causal
        if kernel in WITH_PRODUCTS:
            for method in ("bf16", "int8"):
                yield kernel, "float32", method, False


def count_by_function(trace: Iterable[str]) -> collections.Counter[str]:
    """Return the instructions between the two markers, by function."""
    counted: collections.Counter[str] = collections.Counter()
    sizes: dict[str, int] = {}  # of a translated block, by its address on the host
    size = 0
    inside = False
    for line in trace:
        if line.startswith("0x"):
            size += 1
        elif line.startswith("IN:"):
            size = 0
        elif line.startswith("Trace"):
            fields = line.split()
            if size:
                sizes[fields[2]] = size
                size = 0
            name = fields[4] if len(fields) > 4 else "?"
            if name == "aft_count_begin":
                inside = True
            elif name == "aft_count_end":
                return counted
            elif inside:
                counted[name] += sizes[fields[2]]
    raise RuntimeError(
        "expected a trace with both markers, got its end; run the program in QEMU to see its error"
    )


def count(program: Path, cpu: str, case: Case, tokens: int) -> collections.Counter[str]:
    """Run the workload and return its instructions by function."""
    kernel, element, method, causal = case
    command = ["qemu-aarch64-static", "-L", "/usr/aarch64-linux-gnu", "-cpu", cpu]
    command += ["-d", "exec,nochain,in_asm", "-D", "/dev/stderr", str(program)]
    command += [kernel, element, method, str(int(causal)), str(tokens), str(CHANNELS)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr
    with process, process.stderr:
        counted = count_by_function(process.stderr)
        process.kill()
    return counted


def main() -> None:
    """Print one row per case with one column per program."""
    options = parse_options()
    for program in options.programs:
        if not program.exists():
            sys.exit(f"Expected a program, got {program}. Run: make native-aarch64")
    rows = []
    for case in cases(options.only):
        kernel, element, method, causal = case
        counts = [count(program, options.cpu, case, options.tokens) for program in options.programs]
        per_token = [counted.total() / options.tokens for counted in counts]
        ratios = [f"{per_token[0] / later:6.2f}" for later in per_token[1:]]
        name = f"{kernel}{' causal' if causal else ''}"
        numbers = " ".join(f"{value:10,.0f}" for value in per_token)
        print(f"{name:28} {element:8} {method:5} {numbers} {' '.join(ratios)}", flush=True)
        rows.append({"kernel": kernel, "element": element, "method": method, "causal": causal,
                     "instructions_per_token": round(per_token[0], 1)})  # fmt: skip
        if options.functions:
            for function, instructions in counts[-1].most_common(8):
                print(f"    {instructions / options.tokens:10,.0f} {function}")
    if options.record:
        write_record(make_record(rows, options.cpu, options.tokens), RECORD)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "programs",
        nargs="*",
        type=Path,
        default=[PROGRAM],
        help="count_workload as built; several are compared with the first (default: %(default)s)",
    )
    parser.add_argument(
        "--cpu", default="max", help="processor that QEMU emulates (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--only", default="", help="part of a kernel's name")
    parser.add_argument(
        "--functions", action="store_true", help="also print the functions that take the most"
    )
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    options = parser.parse_args()
    if options.record and (options.only or len(options.programs) > 1):
        parser.error("--record: expected one program and every kernel")
    return options


def make_record(rows: Sequence[dict[str, Any]], cpu: str, tokens: int) -> dict[str, Any]:
    """Return the counts with the setting that they depend on."""
    first = ["aarch64-linux-gnu-g++", "--version"]
    compiler = subprocess.run(first, capture_output=True, text=True, check=True).stdout
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": read_commit(),
        "compiler": compiler.splitlines()[0],
        "cpu": cpu,
        "tokens": tokens,
        "channels": CHANNELS,
        "rows": list(rows),
    }


def table(record: Mapping[str, Any]) -> str:
    """Return the table of the documentation: the instructions per token of each kernel."""
    columns = {
        "float32": ("float32", "fp32", False),
        "causal": ("float32", "fp32", True),
        "float16 tensors": ("float16", "fp32", False),
        "bf16": ("float32", "bf16", False),
        "int8": ("float32", "int8", False),
    }
    counts = {
        (row["kernel"], row["element"], row["method"], row["causal"]): row["instructions_per_token"]
        for row in record["rows"]
    }
    lines = [f"| kernel | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    for kernel in (*MECHANISMS, *OPERATORS):
        found = [counts.get((kernel, *key)) for key in columns.values()]
        cells = ["" if number is None else f"{number:,.0f}" for number in found]
        lines.append(f"| `{kernel}` | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
