"""What the machine can do at best, measured in the same run as the contenders."""

import time
from collections.abc import Iterator
from functools import partial
from itertools import product

import onnx
import onnxruntime
import torch

from aftexport.timing import Run

_GEMM_SHAPES = ((512, 512, 512), (4096, 256, 1024))
_EXP_ELEMENTS = (1 << 16, 1 << 18)


class Limits:
    """The least time for some work: that of the best rates anything here has reached.

    copy: bytes read plus bytes written per second, the better of PyTorch's ``copy_`` and
    ``addcmul`` (three arrays read, one written, as the operators do), at the workload's
    own size: what fits into the last cache moves several times faster than what does not.

    gemm: float32 operations per second, the best of PyTorch and ONNX Runtime over several
    shapes; which library wins depends on the processor.

    exp: float32 exponentials per second, the better of PyTorch's ``exp`` and ``sigmoid``
    (one exponential and a division), in cache; the sigmoid is often the faster one.

    Args:
        threads: of every measurement.
    """

    def __init__(self, threads: int) -> None:
        self._copies: dict[float, float] = {}
        self._gemm = self._exp = 0.0
        self._products = list(_products(threads))
        self._exponentials = list(_exponentials())

    def measure(self, bytes_moved: float) -> None:
        """Measures, and keeps the best: another program may hold the machine for a while."""
        copy = max(_rate(run, bytes_moved) for run in _copies(bytes_moved))
        self._copies[bytes_moved] = max(copy, self._copies.get(bytes_moved, 0.0))
        self._gemm = max(self._gemm, *(_rate(run, flops) for run, flops in self._products))
        self._exp = max(self._exp, *(_rate(run, exps) for run, exps in self._exponentials))

    def seconds(self, *, bytes_moved: float, flops: float, exps: float) -> tuple[float, str]:
        """The least time for some work, whose bytes were measured, and which rate bounds it."""
        needed = {
            "copy": bytes_moved / self._copies[bytes_moved],
            "gemm": flops / self._gemm,
            "exp": exps / self._exp,
        }
        kind = max(needed, key=needed.__getitem__)
        return needed[kind], kind


def _copies(bytes_moved: float) -> Iterator[Run]:
    memory = torch.ones(int(bytes_moved) // 4)
    source, target = memory.chunk(2)
    yield partial(target.copy_, source)
    a, b, c, out = memory.chunk(4)
    yield partial(torch.addcmul, a, b, c, out=out)


def _products(threads: int) -> Iterator[tuple[Run, float]]:
    for rows, inner, columns in _GEMM_SHAPES:
        left, right = torch.rand(rows, inner), torch.rand(inner, columns)
        flops = 2.0 * rows * inner * columns
        yield partial(torch.mm, left, right, out=torch.empty(rows, columns)), flops
        session = _matmul_session(right, threads)
        yield partial(session.run, None, {"left": left.numpy()}), flops


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


def _exponentials() -> Iterator[tuple[Run, float]]:
    for elements, function in product(_EXP_ELEMENTS, (torch.exp, torch.sigmoid)):
        yield partial(function, torch.randn(elements), out=torch.empty(elements)), elements


def _rate(run: Run, work: float) -> float:
    """Work a second of the best of some calls."""
    run()
    seconds = []
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end or len(seconds) < 5:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return work / min(seconds)
