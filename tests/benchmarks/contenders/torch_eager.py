"""PyTorch without a compiler."""

import torch

from aftexport.bench.timing import Run
from benchmarks.contenders.contender import ModelContender, OperatorContender, Prepared
from benchmarks.task import Task, logits
from benchmarks.workloads import Tensors, Workload


class TorchEager(ModelContender, OperatorContender):
    """The model as it is written, with the operators' reference forms."""

    name = "torch_eager"
    title = "PyTorch eager"
    precision = "fp32"

    def prepare(self, task: Task, threads: int) -> Prepared:
        """Return the model itself."""
        return Prepared(lambda: logits(task.model.module, task))

    def prepare_operator(self, workload: Workload, tensors: Tensors, threads: int) -> Run:
        """Return the operator's reference form."""

        def run() -> object:
            with torch.inference_mode():
                return (workload.operator.compute(*tensors.values(), **workload.attributes),)

        return run


CONTENDERS = (TorchEager(),)
