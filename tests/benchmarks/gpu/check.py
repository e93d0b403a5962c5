"""All of ``make gpu-check``, on a machine that has what it needs."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from itertools import product

import torch

from benchmarks.gpu import machine, models, programs, report
from benchmarks.gpu.library import Kernels
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.timing import measure
from benchmarks.gpu.workloads import LAYER, Workload


def check(options: argparse.Namespace) -> bool:
    """Builds, checks, times and reports; whether nothing failed."""
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}: building the kernels and their tests", flush=True)
    folder = programs.build(torch.cuda.get_device_capability())
    record = report.Record(gpu, _software(), [], [], [])
    if options.no_kernels:
        record.outcomes.append(Outcome("kernels", "not checked in this run"))
    else:
        _add(record, programs.run(folder))
    if not options.no_timing:
        _time(options, Kernels(folder / "gpu" / "libaft_cuda.so"), record)
    if not options.no_models:
        _add(record, models.run(folder, options.mechanism))
    print(f"record in {report.write(record, options.out)}")
    return all(outcome.passed for outcome in record.outcomes)


def _add(record: report.Record, outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        print(outcome, flush=True)
        record.outcomes.append(outcome)


def _time(options: argparse.Namespace, kernels: Kernels, record: report.Record) -> None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(programs.ROOT / "build" / "inductor-gpu"))
    forms = list(product(options.mechanism, (False, True)))
    if "fastformer" in options.mechanism:
        forms.append((LAYER, False))
    for (mechanism, causal), tokens in product(forms, options.tokens):
        workload = Workload(mechanism, options.batch, tokens, options.dim, torch.bfloat16, causal)
        if (why := workload.too_large(torch.cuda.mem_get_info()[0])) is not None:
            record.left_out.append(f"{workload}: {why}")
            continue
        print(f"timing {workload}", flush=True)
        try:
            seconds, absent = measure(workload, kernels, options.rounds)
        except (ArithmeticError, RuntimeError) as error:
            _add(record, [Outcome(f"timing of {workload}", str(error), passed=False)])
            continue
        record.times.append((workload, seconds))
        record.left_out += absent


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
