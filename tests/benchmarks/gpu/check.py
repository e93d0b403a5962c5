"""All of ``make gpu-check``, on a machine that has what it needs."""

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from itertools import product
from math import inf

import torch

from benchmarks.gpu import accuracy, machine, models, programs, report
from benchmarks.gpu.library import Kernels
from benchmarks.gpu.report import NO_TIME, Outcome, Record
from benchmarks.gpu.timing import measure
from benchmarks.gpu.workloads import LAYER, Workload

BINDINGS = "memory, copies and graphs by the CUDA bindings"
NOT_CHECKED = Outcome("kernels", "not checked")
PARTS = ("kernels", "long documents", "the bindings", "timing", "models", "the GPU",
         "compute-sanitizer")  # fmt: skip
"""What is said of these is of one run."""
MAIN_LENGTHS = (16_384, 262_144)
AFTER_BUILD_SECONDS = 120.0


class Check:
    """One run, whose record is kept on disk after every step and may hold earlier findings."""

    def __init__(self, options: argparse.Namespace, record: Record) -> None:
        self._options = options
        self.record = record
        self._lost_in_timing = False
        self._seconds = options.seconds or inf
        self._end = time.monotonic() + self._seconds

    def kernels(self) -> None:
        """Those that ``programs.build`` made, by the test programs."""
        self._run(programs.programs(self._folder))

    def sanitizers(self) -> None:
        """The same programs under compute-sanitizer, which makes them slow."""
        self._run(programs.sanitized(self._folder))

    def long_documents(self) -> None:
        """Every mechanism's kernel, and the layer's."""
        kernels = self._kernels()
        layer = [LAYER] if "fastformer" in self._options.mechanism else []
        for mechanism in (*self._options.mechanism, *layer):
            workload = accuracy.long_documents(mechanism)
            what = accuracy.title(workload)
            if not self._is_due(what):
                continue
            try:
                self.add(accuracy.check(workload, kernels))
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                self.add(Outcome(what, said, passed=False, printed=traceback.format_exc()))
            if not self._is_alive():
                return

    def build(self) -> None:
        """Raises SystemExit where that fails."""
        self._folder = programs.build(torch.cuda.get_device_capability())
        # A slow build must not leave the kernels for the next call.
        self._end = max(self._end, time.monotonic() + min(AFTER_BUILD_SECONDS, self._seconds))

    def main_times(self) -> None:
        """Those of the lengths that tell most, which come before slower checks."""
        self.times([tokens for tokens in self._options.tokens if tokens in MAIN_LENGTHS])

    def times(self, lengths: Sequence[int] | None = None) -> None:
        """Of every mechanism at every length, and that the outputs of long documents agree."""
        if self._lost_in_timing:
            return
        options = self._options
        cache = programs.ROOT / "build" / "inductor-gpu"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
        kernels = self._kernels()
        forms = list(product(options.mechanism, (False, True)))
        if "fastformer" in options.mechanism:
            forms.append((LAYER, False))
        lengths = options.tokens if lengths is None else lengths
        for (mechanism, causal), tokens in product(forms, lengths):
            size = (options.batch, tokens, options.dim)
            workload = Workload(mechanism, *size, torch.bfloat16, causal)
            if any(workload == timed for timed, _ in self.record.times):
                continue
            if (why := workload.too_large(torch.cuda.mem_get_info()[0])) is not None:
                self.record.leave_out(f"{workload}: {why}")
            elif self._is_due(f"timing of {workload}"):
                self._time(workload, kernels)
                if not self._is_alive():
                    self._lost_in_timing = True
                    return

    def models(self) -> None:
        """What ``aftexport`` exports, and how it gets at the GPU."""
        runtimes = {"onnxruntime": self._options.no_onnxruntime,
                    "tensorrt": self._options.no_tensorrt}  # fmt: skip
        left_out = [runtime for runtime, without in runtimes.items() if without]
        mechanisms, folder = self._options.mechanism, self._options.bundles
        if folder is None:
            outcomes = models.run(self._folder, mechanisms, self._is_due, left_out)
        else:
            outcomes = models.run_bundles(self._folder, folder, self._is_due)
        for outcome in outcomes:
            self.add(outcome)

    def bindings(self) -> None:
        """NVIDIA's Python bindings, by which engines run."""
        if self._is_due(BINDINGS):
            self.add(check_bindings())

    def add(self, outcome: Outcome) -> None:
        """Tells and keeps it."""
        print(outcome, flush=True)
        self.record.add(outcome)
        report.keep(self.record, self._options.out)

    def _run(self, checks: Iterable[programs.Program | Outcome]) -> None:
        for check in checks:
            if isinstance(check, Outcome):
                self.add(check)
            elif self._is_due(check.what):
                self.add(check.run())

    def _kernels(self) -> Kernels:
        return Kernels(self._folder / "gpu" / "libaft_cuda.so")

    def _is_alive(self) -> bool:
        """Whether this process can use the GPU still, after what ran last."""
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            said = f"{error}; nothing can run in this process after that"
            self.add(Outcome("the GPU", said, passed=False))
            return False
        return True

    def _time(self, workload: Workload, kernels: Kernels) -> None:
        what = f"timing of {workload}"
        try:
            seconds, absent, wrong = measure(workload, kernels, self._options.rounds)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            self.add(Outcome(what, said, passed=False, printed=traceback.format_exc()))
            return
        print(f"{workload}: {report.in_microseconds(seconds)}", flush=True)
        self.record.times.append((workload, seconds))
        for line in absent:
            print(line, flush=True)
            self.record.leave_out(line)
        self.add(Outcome(what, "; ".join(wrong) or "outputs agree", not wrong))

    def _is_due(self, what: str) -> bool:
        """Whether it is not known yet and there is time for it."""
        if any(outcome.what == what and outcome.passed for outcome in self.record.outcomes):
            return False
        if time.monotonic() < self._end:
            return True
        self.record.leave_out(f"{what}: {NO_TIME}")
        return False


def check(options: argparse.Namespace) -> Record:
    """Build, check, time and report; return the record.

    The order is that of what tells most in little time.
    """
    record = Record(torch.cuda.get_device_name(), _software(), [], [], [])
    if options.go_on:
        record = report.load(record, options.out)
        record.outcomes[:] = [o for o in record.outcomes if o.what not in PARTS]
    run = Check(options, record)
    print(f"{record.gpu}: building the kernels and their tests", flush=True)
    run.build()
    try:
        if options.no_kernels and not record.outcomes:
            run.add(NOT_CHECKED)
        for what, part, without in (
            ("kernels", run.kernels, options.no_kernels),
            ("long documents", run.long_documents, options.no_kernels),
            ("the bindings", run.bindings, options.no_bindings),
            ("timing", run.main_times, options.no_timing),
            ("models", run.models, options.no_models),
            ("compute-sanitizer", run.sanitizers, options.no_kernels or options.no_sanitizer),
            ("timing", run.times, options.no_timing),
        ):
            if without:
                continue
            try:
                part()
            except Exception as error:  # the others may be right
                said = f"{type(error).__name__}: {error}"
                run.add(Outcome(what, said, passed=False, printed=traceback.format_exc()))
    finally:
        print(f"record in {report.write(record, options.out)}", flush=True)
    return record


def check_bindings() -> Outcome:
    """What ``aftexport.engines.cuda`` does, there and back."""
    try:
        import numpy as np

        from aftexport.engines import cuda

        cuda.runtime()
    except Exception as error:
        return Outcome.skip(BINDINGS, str(error), "--no-bindings")
    try:
        stream, size = cuda.Stream(), 1 << 20
        source, target, memory = cuda.Pinned(size), cuda.Pinned(size), cuda.Memory(size)
        sent = source.array((size // 8,), np.dtype(np.int64))
        received = target.array((size // 8,), np.dtype(np.int64))
        graph = stream.capture(lambda: stream.to_host(target, memory, size))
        for first in (1, 2):
            sent[:] = np.arange(first, first + len(sent))
            stream.to_device(memory, source, size)
            graph.launch(stream)
            stream.wait()
            if not np.array_equal(sent, received):
                return Outcome(BINDINGS, "other numbers come back", passed=False)
        return Outcome(BINDINGS, f"{cuda.device()}")
    except Exception as error:
        return Outcome(BINDINGS, str(error), passed=False, printed=traceback.format_exc())


def _software() -> list[str]:
    release = subprocess.run(
        [machine.program("nvcc"), "--version"], capture_output=True, text=True, check=True
    ).stdout.rpartition("release ")[2]
    return [
        f"compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}",
        f"CUDA {release.partition(',')[0]}",
        f"PyTorch {torch.__version__}",
        f"Python {sys.version.partition(' ')[0]}",
    ]
