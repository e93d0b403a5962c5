"""GPU time of every contender on one workload, and of what the GPU can do at best."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.library import Kernels
from benchmarks.gpu.workloads import HEADS, Run, Workload

COPY, GEMM, OURS, PRODUCT = "copy", "gemm", "aftexport", "aftexport, GEMM"
EAGER, COMPILED, SDPA = "eager", "torch.compile", "flash SDPA"
GEMM_SIZE = 8192
OWN = (COPY, GEMM, OURS, PRODUCT)
"""What the check is of; of the others one that fails is left out."""
SDPA_MOST_TOKENS = 262_144
LAST_ROW_SEES_ALL = ("aft_simple", "aft_full", "efficient_attention", "linear_attention")
"""Mechanisms whose causal form has the last row of the other."""
SLOW_SECONDS, SLOW_ROUNDS = 0.1, 3
MOST_SETS = 32
AGREEMENT = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 4e-2}
"""Of float32, float16 and bfloat16 outputs with the baseline's, which has errors of its own."""

Seconds = Mapping[str, float]
"""Of a call, by contender."""

Set = dict[str, torch.Tensor]


def measure(
    workload: Workload, kernels: Kernels, rounds: int
) -> tuple[Seconds, list[str], list[str]]:
    """Times the contenders that memory allows; a line for each that was left out, or is wrong.

    A contender is captured in a CUDA graph, once on every one of several sets of tensors that
    together exceed the last cache several times: no contender finds its inputs there, and the
    time that the host takes is nobody's. The graphs are replayed in turns.

    Raises:
        RuntimeError: where a kernel refuses its call, a limit cannot be measured, or CUDA fails.
    """
    makers: dict[str, Callable[[Set], Run]] = {
        COPY: partial(_copy, workload),
        GEMM: _gemm,
        OURS: partial(workload.kernel, kernels),
        SDPA: partial(_flash_attention, workload),
    }
    if not workload.causal:
        function = workload.baseline()
        makers[EAGER] = partial(_baseline, workload, function)
        # For this length alone: code for any is slower.
        compiled = torch.compile(function, dynamic=False, fullgraph=True)
        makers[COMPILED] = partial(_baseline, workload, compiled)
        if workload.mechanism == "aft_full":
            makers[PRODUCT] = partial(workload.product, kernels)
    left_out: list[str] = []
    wrong: list[str] = []
    if workload.tokens > SDPA_MOST_TOKENS:
        del makers[SDPA]
        left_out.append(f"{workload}: {SDPA}, whose time is quadratic")

    replays: dict[str, Run] = {}
    expected: torch.Tensor | None = None
    sets = [workload.tensors("cuda", seed) for seed in range(_sets(workload))]
    for name, make in makers.items():
        try:
            # A product is bound by arithmetic, whatever the caches hold.
            runs = [make(tensors) for tensors in (sets[:1] if name == GEMM else sets)]
            with torch.inference_mode():  # as later: torch.compile would compile for either
                output = runs[0]()
            replays[name] = _captured(runs)
        except Exception as error:
            memory = isinstance(error, torch.OutOfMemoryError)
            if name in (COPY, GEMM, OURS) or (name in OWN and not memory):
                raise  # without which nothing can be said
            reason = "out of memory" if memory else (str(error).splitlines() or [repr(error)])[0]
            left_out.append(f"{workload}: {name}, {reason}")
            del error
            _free()
            continue
        if name in (OURS, PRODUCT, EAGER, COMPILED):
            expected = output.clone() if expected is None else expected
            wrong += disagreement(name, output, expected)
    if workload.causal and workload.mechanism in LAST_ROW_SEES_ALL:
        whole = replace(workload, causal=False).kernel(kernels, sets[0])()
        wrong += disagreement("the last row", expected[:, -1], whole[:, -1])
        del whole
    seconds = _interleave(replays, rounds)
    times = {name: s / (1 if name == GEMM else len(sets)) for name, s in seconds.items()}
    del replays, sets, expected
    torch.compiler.reset()
    _free()
    return times, left_out, wrong


def _sets(workload: Workload) -> int:
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(MOST_SETS, int(4 * cache // workload.bytes_moved)))


def _captured(runs: list[Run]) -> Run:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        for run in runs:  # compiles, and takes what a first call takes
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        outputs = [run() for run in runs]

    def replay() -> torch.Tensor:
        graph.replay()
        return outputs[0]

    return replay


def _interleave(replays: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """Median seconds of a replay, A B C A B C."""
    seconds: dict[str, list[float]] = {name: [] for name in replays}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(rounds):
        for name, replay in replays.items():
            taken = seconds[name]
            if len(taken) >= SLOW_ROUNDS and min(taken) > SLOW_SECONDS:
                continue
            begin.record()
            replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
    return {name: median(taken) for name, taken in seconds.items()}


def disagreement(what: str, output: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """Nothing, or a line."""
    scale = max(1.0, float(expected.abs().max()))
    error = float((output.float() - expected.float()).abs().max()) / scale
    return [] if error <= AGREEMENT[output.dtype] else [f"{what} is {error:.1e} off {OURS}"]


def _baseline(workload: Workload, function: Callable[..., torch.Tensor], tensors: Set) -> Run:
    return partial(function, *workload.baseline_inputs(tensors))


def _copy(workload: Workload, _: Set) -> Run:
    """Moves as many bytes as the workload must, half of them read and half written."""
    source = torch.empty(int(workload.bytes_moved) // 2, dtype=torch.uint8, device="cuda")
    return partial(torch.empty_like(source).copy_, source)


def _gemm(_: Set) -> Run:
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda").bfloat16() for _ in range(2))
    return partial(torch.mm, left, right, out=torch.empty_like(left))


def _flash_attention(workload: Workload, tensors: Set) -> Run:
    shape = (workload.batch, workload.tokens, HEADS, workload.dim // HEADS)
    value = tensors["value"]
    query, key = tensors["query"], tensors["key"]
    if key.shape != value.shape:  # AFT-conv's
        key = torch.randn_like(value)
    query, key, value = (x.reshape(shape).transpose(1, 2) for x in (query, key, value))

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(query, key, value, is_causal=workload.causal)

    return run


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
