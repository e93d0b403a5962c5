"""The interface of a contender: a way to run a model or an operator on this processor."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

from aftexport.bench.timing import Run
from benchmarks.task import Task
from benchmarks.workloads import Tensors, Workload

Precision = Literal["fp32", "bf16", "int8"]


class CannotReadError(Exception):
    """A contender refuses a graph; the message is its reason, in one line."""


@dataclass(frozen=True)
class Prepared:
    """A contender that is ready to run one model on one document."""

    run: Callable[[], NDArray[Any]]
    """The call that is timed; it returns the logits."""
    shares: dict[str, float] = field(default_factory=dict)
    """The share of each stage in the time, where the contender has a profile."""
    release: Callable[[], None] = lambda: None
    """Gives back the memory that the contender keeps between runs."""


@dataclass(frozen=True, eq=False)
class Contender(ABC):
    """The properties of every contender."""

    name: str
    """The key of the contender in records and in ``--contender``."""
    title: str
    """Its name in tables and pictures."""
    precision: Precision = "fp32"
    """The precision of the products."""
    is_ours: bool = False
    is_same_function: bool = True
    """Whether it computes the function of the others, or another for scale."""

    @property
    def facts(self) -> dict[str, Any]:
        """The properties for a record."""
        names = ("title", "precision", "is_ours", "is_same_function")
        return {name: getattr(self, name) for name in names}


class ModelContender(Contender):
    """A contender that runs whole models."""

    @abstractmethod
    def prepare(self, task: Task, threads: int) -> Prepared:
        """Compile the model of a task.

        Raises:
            CannotReadError: if the contender does not support the graph.
        """


class OperatorContender(Contender):
    """A contender that runs the core operator of a mechanism."""

    @abstractmethod
    def prepare_operator(self, workload: Workload, tensors: Tensors, threads: int) -> Run:
        """Return a call that runs the operator once and returns its output first.

        Raises:
            CannotReadError: if the contender does not support the graph.
        """


def last_line(error: BaseException) -> str:
    """Return the last line of a message that says something, as a reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
