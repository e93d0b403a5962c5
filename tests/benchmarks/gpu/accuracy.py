"""Kernels in float32 on long documents, against the same in float64 by PyTorch.

The test programs compute their definitions on the host, which is too slow for these: sums of so
many tokens that small errors of one sign show, in offsets beyond what small tensors have.
"""

from dataclasses import replace

import torch

from aftexport.parity import TOLERANCES
from benchmarks.gpu.library import Kernels
from benchmarks.gpu.report import Outcome
from benchmarks.gpu.timing import LAST_ROW_SEES_ALL
from benchmarks.gpu.workloads import Workload

BATCH, TOKENS, DIM = 64, 16_384, 256
"""As many documents as heads need to be summed in one piece each."""
TOKENS_SQUARED = 4096
"""For AFT-full."""
BOUND = TOLERANCES["fp32"].bound


def long_documents(mechanism: str) -> Workload:
    """What is checked of a mechanism."""
    tokens = TOKENS_SQUARED if mechanism == "aft_full" else TOKENS
    return Workload(mechanism, BATCH, tokens, DIM, torch.float32, causal=False)


def title(workload: Workload) -> str:
    """What the outcome is called."""
    return f"{workload.batch} x {workload}, float32, against float64 in PyTorch"


def check(workload: Workload, kernels: Kernels, device: str = "cuda") -> Outcome:
    """The largest error, of the causal form that of the last row where that sees all keys too.

    Raises:
        RuntimeError: where the kernel refuses the call, memory ends, or CUDA fails.
    """
    tensors = workload.tensors(device)
    doubled = {n: x.double() if x.is_floating_point() else x for n, x in tensors.items()}
    exact = replace(workload, dtype=torch.float64)
    with torch.inference_mode():
        expected = exact.baseline()(*exact.baseline_inputs(doubled))
    del doubled
    errors = {"error": _error(workload.kernel(kernels, tensors)(), expected)}
    if workload.mechanism in LAST_ROW_SEES_ALL:
        causal = replace(workload, causal=True).kernel(kernels, tensors)()
        errors["of the causal form's last row"] = _error(causal[:, -1], expected[:, -1])
    said = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
    passed = all(error <= BOUND for error in errors.values())
    return Outcome(title(workload), f"{said}, bound {BOUND:.0e}", passed)


def _error(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output - expected).abs().max() / expected.abs().max().clamp(min=1.0))
