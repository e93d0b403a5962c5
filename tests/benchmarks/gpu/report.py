"""The record of a GPU: what was checked, how long everything took, and a plot of it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.gpu.timing import (
    COMPILED,
    COPY,
    EAGER,
    GEMM,
    GEMM_SIZE,
    OURS,
    PRODUCT,
    SDPA,
    Seconds,
)
from benchmarks.gpu.workloads import Workload
from benchmarks.plot import Panel, compared_styles, draw
from benchmarks.record import write_record


@dataclass(frozen=True)
class Outcome:
    """One check, and what came out.

    ``printed`` is all that a failed program printed. A check is ``skipped`` if it could not run
    here and the command did not leave it out.
    """

    what: str
    said: str
    passed: bool = True
    printed: str = ""
    skipped: bool = False

    @classmethod
    def skip(cls, what: str, reason: str, option: str) -> "Outcome":
        """Return the outcome of a check that cannot run here; ``option`` leaves it out."""
        said = f"{reason}; {option} leaves it out"
        return cls(what, said, skipped=True)

    def __str__(self) -> str:
        state = "SKIPPED, " if self.skipped else "" if self.passed else "FAILED, "
        return f"{self.what}: {state}{self.said}"


NO_TIME = "no time was left"
_OTHERS = (PRODUCT, EAGER, COMPILED, SDPA)


@dataclass(frozen=True)
class Record:
    """All that is reported of a GPU with some versions of software."""

    gpu: str
    software: Sequence[str]
    outcomes: list[Outcome]
    times: list[tuple[Workload, Seconds]]
    left_out: list[str]

    def add(self, outcome: Outcome) -> None:
        """Adds it, in the place of an earlier one of the same check."""
        self.outcomes[:] = [o for o in self.outcomes if o.what != outcome.what] + [outcome]

    def leave_out(self, line: str) -> None:
        """Adds it, if it is not there."""
        if line not in self.left_out:
            self.left_out.append(line)

    @property
    def waiting(self) -> list[str]:
        """The checks that there was no time for."""
        return [line for line in self.left_out if line.endswith(NO_TIME)]

    def path(self, folder: Path, suffix: str) -> Path:
        """Where it is in a folder."""
        return folder / f"{'-'.join(self.gpu.lower().split())}{suffix}"


def keep(record: Record, folder: Path) -> None:
    """Writes ``<gpu-name>.json``, for ``load``, and ``.log`` if a program failed that printed."""
    path = record.path(folder, ".json")
    new = path.with_suffix(".new")
    write_record(json.loads(json.dumps(asdict(record), default=str)), new)
    new.replace(path)
    printed = [f"{outcome}\n{outcome.printed}" for outcome in record.outcomes if outcome.printed]
    log = record.path(folder, ".log")
    if printed:
        log.write_text("\n".join(printed))
    else:
        log.unlink(missing_ok=True)


def load(record: Record, folder: Path) -> Record:
    """What ``keep`` wrote of this GPU, without what there was no time for; else ``record``.

    Raises:
        SystemExit: where that was found with other software.
    """
    path = record.path(folder, ".json")
    if not path.exists():
        return record
    kept = json.loads(path.read_text())
    if kept["software"] != record.software:
        raise SystemExit(f"{path} is of {kept['software']}, not {record.software}")
    times = []
    for members, seconds in kept["times"]:
        dtype = getattr(torch, members.pop("dtype").removeprefix("torch."))
        times.append((Workload(**members, dtype=dtype), seconds))
    left_out = [line for line in kept["left_out"] if not line.endswith(NO_TIME)]
    outcomes = [Outcome(**members) for members in kept["outcomes"] if not members["skipped"]]
    return Record(record.gpu, record.software, outcomes, times, left_out)


def in_microseconds(seconds: Seconds) -> str:
    """Every contender's, in a line."""
    return ", ".join(f"{name} {taken * 1e6:,.1f} µs" for name, taken in seconds.items())


def write(record: Record, folder: Path) -> Path:
    """Writes ``<gpu-name>.md``, and beside it a plot."""
    keep(record, folder)
    path = record.path(folder, ".md")
    lines = [f"# {record.gpu}", "", "; ".join(record.software) + ".", "", "## Checked", ""]
    lines += [f"- {outcome}" for outcome in record.outcomes]
    lines += ["", "## Timed", ""]
    if record.times:
        plot = path.with_suffix(".svg")
        lines += [_explanation(record), "", _plot(record, plot), "", *_tables(record)]
    else:
        lines += ["Nothing was timed.", ""]
    if record.left_out:
        lines += ["## Left out", "", *(f"- {line}" for line in record.left_out), ""]
    path.write_text("\n".join(lines))
    return path


def limit(workload: Workload, seconds: Seconds) -> tuple[float, str]:
    """The least time at the rates measured with the workload, and which bounds it."""
    needed = {
        COPY: seconds[COPY],
        GEMM: seconds[GEMM] * workload.flops / (2.0 * GEMM_SIZE**3),
    }
    kind = max(needed, key=needed.__getitem__)
    return needed[kind], kind


def _explanation(record: Record) -> str:
    first = record.times[0][0]
    copy = max(workload.bytes_moved / seconds[COPY] for workload, seconds in record.times)
    gemm = max(2.0 * GEMM_SIZE**3 / seconds[GEMM] for _, seconds in record.times)
    return (
        f"Medians of CUDA graphs replayed in turns, inputs not in the last cache; batch "
        f"{first.batch}, {first.dim} channels, {str(first.dtype).removeprefix('torch.')}. "
        f"Measured in between: copies of the same bytes, at most {copy / 1e9:,.0f} GB/s, and "
        f"bfloat16 products of {GEMM_SIZE} x {GEMM_SIZE}, at most {gemm / 1e12:,.0f} TFLOP/s. "
        "The limit is the longer of the copy and of the mechanism's multiply-adds at the "
        f"products' rate. Ratios are times over {OURS}'s: above 1 {OURS} is the faster one. "
        f"{SDPA} is another function of the same sizes."
    )


def _tables(record: Record) -> Iterable[str]:
    titles = dict.fromkeys((workload.mechanism, workload.causal) for workload, _ in record.times)
    for mechanism, causal in titles:
        table = [
            (workload, seconds)
            for workload, seconds in record.times
            if (workload.mechanism, workload.causal) == (mechanism, causal)
        ]
        others = [name for name in _OTHERS if any(name in seconds for _, seconds in table)]
        yield f"### {mechanism}{', causal' if causal else ''}"
        yield ""
        yield "| tokens | µs | of the limit | " + " | ".join(others) + " |"
        yield "|" + "---:|" * (3 + len(others))
        for workload, seconds in table:
            ours = seconds[OURS]
            least, kind = limit(workload, seconds)
            cells = [f"{workload.tokens:,}", f"{ours * 1e6:,.1f}", f"{least / ours:.0%} ({kind})"]
            cells += [f"{seconds[n] / ours:.2f}" if n in seconds else "" for n in others]
            yield "| " + " | ".join(cells) + " |"
        yield ""


def _plot(record: Record, path: Path) -> str:
    """Draw nanoseconds a token; return the line of the record that shows the picture."""
    panels = []
    for title, causal in (("not causal", False), ("causal", True)):
        panel = Panel(title)
        for workload, seconds in sorted(record.times, key=lambda timed: timed[0].tokens):
            for name, suffix in ((OURS, ""), (COMPILED, f", {COMPILED}")):
                if workload.causal == causal and name in seconds:
                    point = (workload.tokens, seconds[name] / workload.tokens * 1e9)
                    panel.curves.setdefault(workload.mechanism + suffix, []).append(point)
        panels.append(panel)
    mechanisms = list(dict.fromkeys(workload.mechanism for workload, _ in record.times))
    styles = compared_styles(mechanisms, COMPILED)
    draw("Nanoseconds a token", panels, styles, path, columns=3)
    return f"![nanoseconds a token]({path.name})"
