"""PyTorch: softmax attention for scale, ``torch.compile``, and the model as it is written."""

from dataclasses import dataclass

# The table of decompositions lists every operator at its first import, and must not meet the
# plain form that takes an operator's place.
import torch
import torch._inductor.decomposition

from aftexport.bench.timing import Run
from benchmarks.contenders.contender import ModelContender, OperatorContender, Prepared
from benchmarks.task import Task, logits, plain_operator
from benchmarks.workloads import HEADS, Tensors, Workload, plain_form


class Sdpa(OperatorContender):
    """``scaled_dot_product_attention`` with as many heads and channels: another function."""

    def prepare_operator(self, workload: Workload, tensors: Tensors, threads: int) -> Run:
        """Return the attention on query, key and value of its own."""
        heads = (workload.batch, workload.tokens, HEADS, workload.dim // HEADS)
        generator = torch.Generator().manual_seed(0)
        query, key, value = (
            torch.randn(*heads, generator=generator).transpose(1, 2) for _ in range(3)
        )

        def run() -> object:
            with torch.inference_mode():
                return (torch.nn.functional.scaled_dot_product_attention(query, key, value),)

        return run


@dataclass(frozen=True, eq=False)
class Compiled(ModelContender):
    """The model compiled for static shapes."""

    is_frozen: bool = False
    """Whether the weights are constants, which Inductor packs for its products."""

    def prepare(self, task: Task, threads: int) -> Prepared:
        """Compile the model for the task's length: code for any length is slower."""
        compiled = torch.compile(
            task.model.module, dynamic=False, fullgraph=True, options={"freezing": self.is_frozen}
        )
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16")

        # The option alone would only tell the backends apart: Dynamo reads the configuration, at
        # the first run, which compiles.
        freezing = torch._inductor.config.patch(freezing=self.is_frozen)

        def run():  # type: ignore[no-untyped-def]
            with plain_operator(task.workload), autocast, freezing:
                return logits(compiled, task)

        return Prepared(run)


class CompiledOperator(Compiled, OperatorContender):
    """The model, or the plain form of an operator."""

    def prepare_operator(self, workload: Workload, tensors: Tensors, threads: int) -> Run:
        """Compile the plain form of the operator."""
        # The guard against underflow reads a value back, which a compiler cannot fuse over. The
        # plain form is the stronger contender and is within range on these inputs.
        compiled = torch.compile(plain_form(workload), dynamic=False, fullgraph=True)

        def run() -> object:
            with torch.inference_mode():
                return (compiled(*tensors.values()),)

        return run


class Eager(ModelContender, OperatorContender):
    """The model as it is written, with the operators' reference forms."""

    def prepare(self, task: Task, threads: int) -> Prepared:
        """Return the model itself."""
        return Prepared(lambda: logits(task.model.module, task))

    def prepare_operator(self, workload: Workload, tensors: Tensors, threads: int) -> Run:
        """Return the operator's reference form."""

        def run() -> object:
            with torch.inference_mode():
                return (workload.operator.compute(*tensors.values(), **workload.attributes),)

        return run


CONTENDERS = (
    Sdpa("sdpa", "softmax attention (PyTorch SDPA)", is_same_function=False),
    CompiledOperator("torch_compile", "torch.compile"),
    Compiled("torch_compile_bf16", "torch.compile, bf16 autocast", "bf16"),
    Compiled("torch_compile_frozen", "torch.compile, freezing", is_frozen=True),
    Compiled(
        "torch_compile_frozen_bf16", "torch.compile, freezing, bf16 autocast", "bf16",
        is_frozen=True,
    ),
    Eager("torch_eager", "PyTorch eager"),
)  # fmt: skip
ENCODERS = (Eager("torch_sdpa", "PyTorch SDPA"), *CONTENDERS[3:5])
