"""The tasks of the demo, by their names on the command line."""

from collections.abc import Mapping

from aftexport.demo.tasks.multi_label import MultiLabel
from aftexport.demo.tasks.regression import ProseShare
from aftexport.demo.tasks.single_label import SingleLabel
from aftexport.demo.tasks.task import Task
from aftexport.demo.tasks.token_classification import TokenKinds

__all__ = ["TASKS", "Task"]

TASKS: Mapping[str, type[Task]] = {
    "single-label": SingleLabel,
    "multi-label": MultiLabel,
    "regression": ProseShare,
    "token-classification": TokenKinds,
}
