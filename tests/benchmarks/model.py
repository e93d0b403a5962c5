"""A whole model: a four-layer document classifier, every way it can be run on a CPU."""

import argparse
import copy
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import torch
from onnxruntime.quantization import quantize_dynamic
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aftexport.bench.timing import Run, peak_mib
from aftexport.capture.capture import capture
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.engines.onnxruntime_profile import operator_shares
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.passes.finish import finish
from benchmarks.setup import cpu_name
from benchmarks.timing import interleave
from benchmarks.workloads import HEADS, OP_TYPES, TAPS, WINDOW, Workload, plain_form

LENGTHS = (4_096, 16_384)
FULL_MAX_TOKENS = 4_096
FLOAT64_MAX_TOKENS = 4_096
CONTENDERS = ("torch_eager", "torch_compile", "torch_compile_bf16", "ort_portable",
              "ort_dynamic_int8", "aftexport_fp32", "aftexport_bf16", "aftexport_int8")  # fmt: skip
_PRODUCTS = ("LayerNormLinear", "LayerNormQueryKeyValue", "LayerNormFeedForward", "LinearResidual",
             "MatMul", "Gemm")  # fmt: skip
_STAGES = dict.fromkeys(_PRODUCTS, "products") | dict.fromkeys(OP_TYPES.values(), "attention")
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One model and one document.

    Attributes:
        workload: mechanism, tokens and channels.
        model: in float32, on random weights.
        inputs: ``input_ids [1, T]`` and ``lengths [1]``.
    """

    workload: Workload
    model: DocumentClassifier
    inputs: dict[str, torch.Tensor]

    @property
    def arrays(self) -> dict[str, Any]:
        """The inputs for ONNX Runtime."""
        return {name: tensor.numpy() for name, tensor in self.inputs.items()}


def run(options: argparse.Namespace, console: Console) -> None:
    """Times the models that ``options`` name; writes ``build/bench_model.json``."""
    rounds = options.rounds or 7
    lengths = options.tokens or LENGTHS
    names = options.contender or CONTENDERS
    tasks = [
        Workload(mechanism, 1, tokens, options.dim)
        for mechanism in options.mechanism
        for tokens in lengths
        if mechanism != "aft_full" or tokens <= FULL_MAX_TOKENS
    ]
    rows: list[Row] = []
    left_out: list[str] = []
    if "aft_full" in options.mechanism and max(lengths) > FULL_MAX_TOKENS:
        left_out.append(f"aft_full above {FULL_MAX_TOKENS:,} tokens: its bias is quadratic")
    for workload in track(tasks, "Timing models", console=console):
        console.print(f"{workload.mechanism}, {workload.tokens:,} tokens")
        rows += measure(build(workload), names, options.threads, rounds, left_out)
    out = options.out or Path("build/bench_model.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"cpu": cpu_name(), "threads": options.threads, "rounds": rounds,
              "left_out": left_out, "rows": rows}  # fmt: skip
    out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(table(rows))
    console.print(f"{cpu_name()}, {options.threads} threads; rows in {out}")
    for line in left_out:
        console.print(f"left out: {line}")


def build(workload: Workload) -> Task:
    """The model of a workload and its document, both from a fixed seed."""
    torch.manual_seed(0)
    config = ClassifierConfig(
        mechanism=workload.mechanism, vocab_size=8_192, num_labels=10, dim=workload.dim, depth=4,
        num_heads=HEADS, ffn_dim=4 * workload.dim,
        window=TAPS if workload.mechanism == "aft_conv" else WINDOW,
        max_length=workload.tokens if workload.mechanism == "aft_full" else None,
    )  # fmt: skip
    inputs = {
        "input_ids": torch.randint(config.vocab_size, (1, workload.tokens)),
        "lengths": torch.tensor([workload.tokens]),
    }
    model = DocumentClassifier(config).eval()
    for module in model.modules():
        if callable(fold := getattr(module, "fold", None)):
            fold()
    return Task(workload, model, inputs)


def measure(
    task: Task, names: Sequence[str], threads: int, rounds: int, left_out: list[str]
) -> list[Row]:
    """The task's rows; what a contender cannot run is added to ``left_out`` by name."""
    torch.compiler.reset()
    expected = _eager(task)()
    exact = None
    if task.workload.tokens <= FLOAT64_MAX_TOKENS:
        exact = _logits(copy.deepcopy(task.model).double(), task)
    runs: dict[str, Callable[[], np.ndarray[Any, Any]]] = {}
    shares: dict[str, dict[str, float]] = {}
    releases: dict[str, Callable[[], None]] = {}
    outputs = {}
    for name in names:
        try:
            runs[name], shares[name], releases[name] = _contender(task, name, threads)
            outputs[name] = runs[name]()
        except Exception as error:
            runs.pop(name, None)
            reason = (str(error).splitlines() or [""])[0]
            left_out.append(f"{name} of {task.workload}: {type(error).__name__}: {reason}")
    seconds = interleave(runs, rounds)
    for release in releases.values():
        release()  # what was kept would not be counted below
    return [
        {
            "mechanism": task.workload.mechanism,
            "batch": 1,
            "tokens": task.workload.tokens,
            "dim": task.workload.dim,
            "contender": name,
            "seconds": seconds[name],
            "error_float32": _error(outputs[name], expected),
            "error_float64": None if exact is None else _error(outputs[name], exact),
            "peak_mib": peak_mib(run),
            "shares": shares[name],
        }
        for name, run in runs.items()
    ]


def _contender(
    task: Task, name: str, threads: int
) -> tuple[Run, dict[str, float], Callable[[], None]]:
    """A run, the share of each stage in it, and what gives back the memory that it keeps."""
    if name == "torch_eager":
        return _eager(task), {}, lambda: None
    if name.startswith("torch_compile"):
        return _compiled(task, bf16=name.endswith("bf16")), {}, lambda: None
    kind = name.partition("_")[2]
    program = capture(task.model, max_tokens=task.model.max_length)
    model = finish(lower(program), precision=kind if kind in ("bf16", "int8") else "fp32")
    if kind == "dynamic_int8":
        model = _quantized(model)
    fused = name.startswith("aftexport")
    content = model.SerializeToString()
    engine = OnnxRuntimeEngine(content, threads=threads, fused=fused)
    shares = operator_shares(content, task.arrays, threads=threads, fused=fused)
    return lambda: engine.run(task.arrays)["logits"], _by_stage(shares), engine.release


def _eager(task: Task) -> Run:
    return lambda: _logits(task.model, task)


def _logits(model: Callable[..., torch.Tensor], task: Task) -> "np.ndarray[Any, Any]":
    with torch.inference_mode():
        return model(**task.inputs).float().numpy()


def _compiled(task: Task, *, bf16: bool) -> Run:
    # Its table lists every operator when it is first imported, and must not meet the stand-in.
    import torch._inductor.decomposition

    compiled = torch.compile(task.model, dynamic=False, fullgraph=True)

    def run() -> object:
        with plain_operator(task.workload), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return _logits(compiled, task)

    return run


@contextmanager
def plain_operator(workload: Workload) -> Iterator[None]:
    """Puts plain PyTorch in place of the mechanism's operator, which a compiler cannot enter."""
    operators, plain = torch.ops.aftexport, plain_form(workload)
    name = workload.operator.torch_op.overloadpacket.__name__
    original, tensors = getattr(operators, name), len(workload.operator.inputs)
    setattr(operators, name, lambda *arguments: plain(*arguments[:tensors]))
    try:
        yield
    finally:
        setattr(operators, name, original)


def _quantized(model: onnx.ModelProto) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        quantize_dynamic(onnx.inliner.inline_local_functions(model), path)
        return onnx.load(path)


def _by_stage(shares: dict[str, float]) -> dict[str, float]:
    stages = {"products": 0.0, "attention": 0.0, "rest": 0.0}
    for op_type, share in shares.items():
        stages[_STAGES.get(op_type, "rest")] += share
    return stages


def _error(output: "np.ndarray[Any, Any]", expected: "np.ndarray[Any, Any]") -> float:
    scale = float(np.abs(expected).max())
    return float(np.abs(output.astype(np.float64) - expected).max()) / scale


def table(rows: Sequence[Row]) -> Table:
    """Every row, with how many times longer it took than ours in float32."""
    shown = Table("mechanism", "tokens", "contender", "ms", "/ ours fp32", "error to float32",
                  "to float64", "peak MiB", "products", "attention", "rest")  # fmt: skip
    for column in shown.columns[3:]:
        column.justify = "right"
    ours = {
        (r["mechanism"], r["tokens"]): r["seconds"]
        for r in rows
        if r["contender"] == "aftexport_fp32"
    }
    for row in rows:
        base = ours.get((row["mechanism"], row["tokens"]))
        exact, peak = row["error_float64"], row["peak_mib"]
        shown.add_row(
            row["mechanism"], f"{row['tokens']:,}", row["contender"],
            f"{row['seconds'] * 1e3:.1f}",
            "" if base is None else f"{row['seconds'] / base:.2f}",
            f"{row['error_float32']:.1e}", "" if exact is None else f"{exact:.1e}",
            "" if peak is None else f"{peak:.0f}",
            *(f"{share:.0%}" for share in row["shares"].values()),
        )  # fmt: skip
    return shown
