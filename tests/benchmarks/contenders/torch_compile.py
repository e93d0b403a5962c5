"""torch.compile in float32 and under bf16 autocast, with and without frozen weights."""

# The table of decompositions lists every operator at its first import, and must not meet the
# plain form that takes an operator's place.
import torch
import torch._inductor.decomposition

from aftexport.bench.timing import Run
from benchmarks.contenders.contender import (
    ModelContender,
    OperatorContender,
    Precision,
    Prepared,
)
from benchmarks.task import Task, logits, plain_operator
from benchmarks.workloads import Tensors, Workload, plain_form


class _Compiled(ModelContender):
    is_frozen = False

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


class TorchCompile(_Compiled, OperatorContender):
    """Compiled for static shapes, in float32."""

    name = "torch_compile"
    title = "torch.compile"
    precision: Precision = "fp32"

    def prepare_operator(self, workload: Workload, tensors: Tensors, threads: int) -> Run:
        """Compile the plain form of the operator.

        The guard against underflow reads a value back, which a compiler cannot fuse over. The
        plain form is the stronger contender and is within range on these inputs.
        """
        compiled = torch.compile(plain_form(workload), dynamic=False, fullgraph=True)

        def run() -> object:
            with torch.inference_mode():
                return (compiled(*tensors.values()),)

        return run


class TorchCompileBfloat16(_Compiled):
    """Compiled for static shapes, under bf16 autocast."""

    name = "torch_compile_bf16"
    title = "torch.compile, bf16 autocast"
    precision: Precision = "bf16"


class TorchCompileFrozen(_Compiled):
    """Compiled with the weights as constants, which Inductor packs for its products."""

    name = "torch_compile_frozen"
    title = "torch.compile, freezing"
    precision: Precision = "fp32"
    is_frozen = True


class TorchCompileFrozenBfloat16(_Compiled):
    """Compiled with the weights as constants, under bf16 autocast."""

    name = "torch_compile_frozen_bf16"
    title = "torch.compile, freezing, bf16 autocast"
    precision: Precision = "bf16"
    is_frozen = True


CONTENDERS = (
    TorchCompile(),
    TorchCompileBfloat16(),
    TorchCompileFrozen(),
    TorchCompileFrozenBfloat16(),
)
