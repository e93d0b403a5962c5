"""The contenders: our kernel, ONNX Runtime's, torch.compile of the chunked form, and our body."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray

from aftexport.bench.timing import Run
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES
from aftexport.operators.mechanisms.recurrent_linear_attention import DELTA_RULES, GATED_RULES
from aftexport.operators.torch_ops import RECURRENT_OPERATORS
from benchmarks.recurrent.chunked_form import ChunkedForm, Compiler, compile_static
from benchmarks.workloads import open_session, single_node

OPERATOR = RECURRENT_OPERATORS["RecurrentLinearAttention"]
RULES = ("linear", "gated", "delta", "gated_delta")
Feeds = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Recurrence:
    """One update rule at one size; every document is whole.

    A head has ``width`` channels of keys and as many of values.
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
        feeds = {
            name: rng.standard_normal(sequence, np.float32) for name in ("query", "key", "value")
        }
        feeds["key"] *= np.float32(self.width**-0.5)
        if self.rule in GATED_RULES:
            feeds["decay"] = -rng.exponential(0.1, gates).astype(np.float32)
        if self.rule in DELTA_RULES:
            feeds["beta"] = rng.uniform(size=gates).astype(np.float32)
        return feeds

    @property
    def bytes_moved(self) -> float:
        """The bytes of all inputs and of the output, each read or written once."""
        gates = (self.rule in GATED_RULES) + (self.rule in DELTA_RULES)
        return 4.0 * self.batch * self.tokens * self.heads * (4 * self.width + gates)

    @property
    def multiply_adds(self) -> float:
        """The multiply-adds of the definition, token by token, without those of the decays.

        Per token and head: the query reads the state, and the token changes it. With a delta rule,
        the key reads the state as well. A form in chunks takes more.
        """
        passes = 3 if self.rule in DELTA_RULES else 2
        return float(passes * self.batch * self.tokens * self.heads * self.width**2)


OURS = "aftexport_fp32"
CONTENDERS = {
    OURS: "our kernel",
    "onnxruntime": "ONNX Runtime's `com.microsoft.LinearAttention`",
    "torch_compile": "torch.compile of the chunked form",
    "body": "our fallback in ONNX Runtime",
}
Preparation = Callable[[int], Run]
"""Returns a call of the contender with a number of threads; the call returns the output."""


def preparation(
    name: str, workload: Recurrence, feeds: Feeds, compiler: Compiler = compile_static
) -> Preparation:
    """Return the way to prepare a contender; the chunked form compiles at its first call."""
    if name == "torch_compile":
        compiled = _chunked(workload, feeds, compiler)
        return lambda threads: compiled

    def prepare(threads: int) -> Run:
        loaded, given = session(name, workload, feeds, threads)
        return lambda: loaded.run(["output"], given)[0]

    return prepare


def session(
    name: str, workload: Recurrence, feeds: Feeds, threads: int, *, has_arena: bool = True
) -> tuple[onnxruntime.InferenceSession, Feeds]:
    """Return a session over one node, which keeps freed memory in its arena, and its inputs."""
    node = _standard_node(workload, feeds)
    functions: list[onnx.FunctionProto] = []
    if name != "onnxruntime":
        lengths = torch.full((workload.batch,), workload.tokens).numpy()
        feeds = feeds | {"lengths": lengths}
        node, functions = _own_node(workload, feeds)
    model = single_node(node, feeds, functions=functions)
    return open_session(model, threads, has_kernels=name == OURS, has_arena=has_arena), feeds


def _chunked(workload: Recurrence, feeds: Feeds, compiler: Compiler) -> Run:
    tensors = {name: torch.from_numpy(x) for name, x in feeds.items()}
    inputs = [tensors.get(name) for name in ("query", "key", "value", "decay", "beta")]
    form, scale = ChunkedForm(compiler), workload.width**-0.5

    def run() -> object:
        with torch.inference_mode():
            return form(*inputs, heads=workload.heads, scale=scale)  # type: ignore[arg-type]

    return run


def _standard_node(workload: Recurrence, feeds: Feeds) -> onnx.NodeProto:
    return onnx.helper.make_node(
        "LinearAttention",
        [n if n in feeds else "" for n in OPERATOR.inputs[:-1]],
        ["output", "present_state"],
        domain="com.microsoft",
        update_rule=workload.rule,
        scale=workload.width**-0.5,
        q_num_heads=workload.heads,
        kv_num_heads=workload.heads,
    )


def _own_node(
    workload: Recurrence, feeds: Feeds
) -> tuple[onnx.NodeProto, list[onnx.FunctionProto]]:
    node = onnx.helper.make_node(
        OPERATOR.op_type,
        [n if n in feeds else "" for n in OPERATOR.inputs],
        list(OPERATOR.outputs),
        domain=DOMAIN,
        **workload.attributes,
        **PLUGIN_ATTRIBUTES,
    )
    settings = {a.name: workload.attributes[a.name] for a in OPERATOR.settings}
    return node, [OPERATOR.function(settings, 20, frozenset(feeds))]
