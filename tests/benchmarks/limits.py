"""What the machine can do at best, measured in the same run as the contenders."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import onnx
import onnxruntime
import torch

from aftexport.bench.timing import Run

_GEMM_SHAPES = ((512, 512, 512), (4096, 256, 1024))
_EXP_ELEMENTS = (1 << 16, 1 << 18)
_EXP_CALLS = 16  # in a row: one takes less time than a thread to wake


class Rate(NamedTuple):
    """One way to measure what the machine can do: ``run`` does ``work`` of a kind."""

    kind: str
    run: Run
    work: float


def rates(bytes_moved: float, threads: int) -> dict[str, Rate]:
    """What to time along with the contenders of a workload, so that a slow moment hits all alike.

    copy: bytes read plus bytes written, by PyTorch's ``copy_`` and ``addcmul`` (three arrays
    read, one written, as the operators do), at the workload's own size: what fits into the
    last cache moves several times faster than what does not.

    gemm: float32 operations, by PyTorch and ONNX Runtime in several shapes; which library
    wins depends on the processor.

    exp: float32 exponentials, by PyTorch's ``exp`` and ``sigmoid`` (one exponential and a
    division), in cache; the sigmoid is often the faster one.

    Args:
        bytes_moved: by the workload.
        threads: of every measurement; PyTorch has been told.

    Returns:
        By a name of each.
    """
    measured = [*copies(bytes_moved), *_products(threads), *_exponentials()]
    return {f"{rate.kind} {number}": rate for number, rate in enumerate(measured)}


def least_seconds(
    rates: Mapping[str, Rate],
    seconds: Mapping[str, float],
    *,
    bytes_moved: float,
    flops: float,
    exps: float,
) -> tuple[float, str]:
    """The least time for some work at the best rate of each kind, and the kind that bounds it.

    Args:
        rates: what was timed, by name.
        seconds: median seconds of a run, by name.
        bytes_moved, flops, exps: the work.
    """
    best = dict.fromkeys(("copy", "gemm", "exp"), 0.0)
    for name, rate in rates.items():
        best[rate.kind] = max(best[rate.kind], rate.work / seconds[name])
    work = {"copy": bytes_moved, "gemm": flops, "exp": exps}
    needed = {kind: work[kind] / best[kind] for kind in best}
    kind = max(needed, key=needed.__getitem__)
    return needed[kind], kind


def copies(bytes_moved: float) -> Iterator[Rate]:
    """Yield the ways to move as many bytes as a workload."""
    memory = torch.ones(int(bytes_moved) // 4)
    source, target = memory.chunk(2)
    yield Rate("copy", partial(target.copy_, source), bytes_moved)
    a, b, c, out = memory.chunk(4)
    yield Rate("copy", partial(torch.addcmul, a, b, c, out=out), bytes_moved)


@cache
def _products(threads: int) -> list[Rate]:
    measured = []
    for rows, inner, columns in _GEMM_SHAPES:
        left, right = torch.rand(rows, inner), torch.rand(inner, columns)
        out, flops = torch.empty(rows, columns), 2.0 * rows * inner * columns
        measured.append(Rate("gemm", partial(torch.mm, left, right, out=out), flops))
        session = _matmul_session(right, threads)
        run = partial(session.run, None, {"left": left.numpy()})
        measured.append(Rate("gemm", run, flops))
    return measured


def _matmul_session(right: torch.Tensor, threads: int) -> onnxruntime.InferenceSession:
    make, float32 = onnx.helper, onnx.TensorProto.FLOAT
    graph = make.make_graph(
        [make.make_node("MatMul", ["left", "right"], ["out"])],
        "product",
        [make.make_tensor_value_info("left", float32, [None, right.shape[0]])],
        [make.make_tensor_value_info("out", float32, [None, right.shape[1]])],
        [onnx.numpy_helper.from_array(right.numpy(), "right")],
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 20)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


@cache
def _exponentials() -> list[Rate]:
    return [
        Rate("exp", _exponential(function, elements), _EXP_CALLS * elements)
        for elements, function in product(_EXP_ELEMENTS, (torch.exp, torch.sigmoid))
    ]


def _exponential(function: Callable[..., torch.Tensor], elements: int) -> Run:
    inputs, out = torch.randn(elements), torch.empty(elements)

    def run() -> None:
        for _ in range(_EXP_CALLS):
            function(inputs, out=out)

    return run
