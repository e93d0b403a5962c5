"""The recurrent family: our kernel, ONNX Runtime's, torch.compile and our body, in turn."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

import aftplugins
from aftexport.bench.timing import Run, peak_mib
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES, VERSION
from aftexport.operators.torch_ops import RECURRENT_OPERATORS
from aftexport.parity import TOLERANCES
from benchmarks.limits import least_seconds, rates
from benchmarks.processor import read_processor
from benchmarks.record import (
    Refusals,
    Row,
    make_record,
    read_earlier,
    read_setting,
    record_path,
    write_record,
)
from benchmarks.timing import interleave

OPERATOR = RECURRENT_OPERATORS["RecurrentLinearAttention"]
RULES = ("linear", "gated", "delta", "gated_delta")
SHAPES = ((1, 16_384, 8, 32), (1, 16_384, 1, 256), (32, 512, 8, 32))
"""Documents, tokens, heads and channels of a head."""
CONTENDERS = {
    "aftexport_fp32": "our kernel",
    "onnxruntime": "com.microsoft.LinearAttention",
    "torch_compile": "the operator's chunks of tokens",
    "body": "our portable body in ONNX Runtime",
}
Feeds = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Recurrence:
    """One update rule at one size; every document is whole.

    Attributes:
        rule: the update rule.
        batch, tokens, heads, width: the size; a head has as many channels of keys as of values.
    """

    rule: str
    batch: int
    tokens: int
    heads: int
    width: int

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of our operator."""
        given = {a.name: a.default for a in OPERATOR.attributes}
        heads = {"q_num_heads": self.heads, "kv_num_heads": self.heads}
        return given | {"update_rule": self.rule} | heads

    def feeds(self) -> Feeds:
        """Draw the inputs; keys have a norm of about 1, as in models."""
        rng = np.random.default_rng(0)
        sequence = (self.batch, self.tokens, self.heads * self.width)
        gates = (self.batch, self.tokens, self.heads)
        feeds = {name: rng.standard_normal(sequence) for name in ("query", "key", "value")}
        feeds["key"] /= self.width**0.5
        if "gated" in self.rule:
            feeds["decay"] = -rng.exponential(0.1, gates)
        if "delta" in self.rule:
            feeds["beta"] = rng.uniform(size=gates)
        return {name: x.astype(np.float32) for name, x in feeds.items()}

    def work(self) -> dict[str, float]:
        """Least bytes moved, and operations of the recurrence token by token."""
        rows = float(self.batch * self.tokens * self.heads)
        products = 3 if "delta" in self.rule else 2
        exps = rows if "gated" in self.rule else 0.0
        return {
            "bytes_moved": 16.0 * rows * self.width,
            "flops": 2.0 * products * rows * self.width**2,
            "exps": exps,
        }


def run(options: argparse.Namespace, console: Console) -> None:
    """Time every rule at every size; write a record."""
    rounds = options.rounds or 11
    shapes = [s for s in SHAPES if s[1] in (options.tokens or (s[1],))]
    names = options.contender or list(CONTENDERS)
    default = record_path("recurrent") if options.record else Path("build/bench_recurrent.json")
    out = options.out or default
    facts = {name: {"title": CONTENDERS[name]} for name in names}
    setting = read_setting(facts, threads=options.threads, rounds=rounds)
    earlier = read_earlier(out, setting, replace=options.replace) if options.record else None
    workloads = [Recurrence(rule, *shape) for shape in shapes for rule in RULES]
    rows: list[Row] = []
    for workload in track(workloads, "Recurrent", console=console):
        rows += measure(workload, names, options.threads, rounds)
    write_record(make_record(setting, rows, Refusals(), earlier), out)
    table = Table("rule", "size", "contender", "ms", "over the limit")
    for row in rows:
        size = "x".join(str(row[name]) for name in ("batch", "tokens", "heads", "width"))
        over = row["seconds"] / row["limit_seconds"]
        table.add_row(
            row["mechanism"], size, row["contender"], f"{row['seconds'] * 1e3:.2f}", f"{over:.2f}"
        )
    console.print(table)
    console.print(f"{read_processor().title}, {options.threads} threads; rows in {out}")


def measure(workload: Recurrence, names: list[str], threads: int, rounds: int) -> list[Row]:
    """Return a row of each contender.

    Raises:
        ArithmeticError: if two contenders compute different numbers.
    """
    torch.compiler.reset()
    runs = {name: prepare(name, workload, threads) for name in names}
    outputs = {name: np.asarray(run()) for name, run in runs.items()}
    expected = next(iter(outputs.values()))
    for name, output in outputs.items():
        error = float(np.abs(output - expected).max() / max(1.0, np.abs(expected).max()))
        if not error < TOLERANCES["fp32"].bound:
            raise ArithmeticError(f"{workload}: {name} is {error:.1e} off {names[0]}")
    work = workload.work()
    limits = rates(work["bytes_moved"], threads)
    seconds = interleave(runs | {name: rate.run for name, rate in limits.items()}, rounds)
    limit_seconds, limit_kind = least_seconds(limits, seconds, **work)
    return [
        {
            "mechanism": f"recurrent_linear_attention {workload.rule}",
            "batch": workload.batch,
            "tokens": workload.tokens,
            "heads": workload.heads,
            "width": workload.width,
            "contender": name,
            "seconds": seconds[name],
            "limit_seconds": limit_seconds,
            "limit_kind": limit_kind,
            "peak_mib": peak_mib(run),
        }
        for name, run in runs.items()
    ]


def prepare(name: str, workload: Recurrence, threads: int) -> Run:
    """Return a call of the contender that returns the output."""
    feeds = workload.feeds()
    if name == "torch_compile":
        return _compiled(workload, feeds)
    if name == "onnxruntime":
        attributes = {"update_rule": workload.rule, "scale": workload.width**-0.5}
        heads = {"q_num_heads": workload.heads, "kv_num_heads": workload.heads}
        node = onnx.helper.make_node(
            "LinearAttention",
            [n if n in feeds else "" for n in OPERATOR.inputs[:-1]],
            ["output", "present_state"],
            domain="com.microsoft",
            **attributes,
            **heads,
        )
        return _session(node, feeds, threads, fused=False)
    feeds["lengths"] = np.full(workload.batch, workload.tokens, np.int64)
    node = onnx.helper.make_node(
        OPERATOR.op_type,
        [n if n in feeds else "" for n in OPERATOR.inputs],
        list(OPERATOR.outputs),
        domain=DOMAIN,
        **workload.attributes,
        **PLUGIN_ATTRIBUTES,
    )
    return _session(node, feeds, threads, fused=name == "aftexport_fp32")


def _compiled(workload: Recurrence, feeds: Feeds) -> Run:
    tensors = {name: torch.from_numpy(x) for name, x in feeds.items()}
    tensors["lengths"] = torch.full((workload.batch,), workload.tokens)
    inputs = [tensors.get(name) for name in OPERATOR.inputs]
    attributes = workload.attributes
    compiled = torch.compile(lambda *x: OPERATOR.compute(*x, **attributes), dynamic=False)

    def run() -> object:
        with torch.inference_mode():
            return compiled(*inputs)[0]

    return run


def _session(node: onnx.NodeProto, feeds: Feeds, threads: int, *, fused: bool) -> Run:
    """Return a call of a session over one node; without ``fused`` our operator runs by its body."""
    helper = onnx.helper
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(x.dtype), [None] * x.ndim
        )
        for name, x in feeds.items()
    ]
    outputs = [helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, None)]
    functions = []
    if node.domain == DOMAIN:
        values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        settings = {a.name: values[a.name].decode() for a in OPERATOR.settings}
        functions = [OPERATOR.function(settings, 20, frozenset(feeds))]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(node.domain, VERSION)]
    model = helper.make_model(
        helper.make_graph([node], "operator", inputs, outputs),
        functions=functions,
        opset_imports=opsets,
        ir_version=10,
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if fused:
        options.register_custom_ops_library(str(aftplugins.library("onnxruntime")))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(["output"], feeds)[0]
