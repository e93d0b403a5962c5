"""The measures of scores: F1, average precision, false alarms and calibration error."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score

from aftexport.calibration.calibrate import calibration_error
from aftexport.calibration.fit import Sample, fit
from aftexport.heads import HEADS
from aftexport.heads.calibration import Scaling, scaled
from aftexport.heads.head import DecidingHead
from benchmarks.documents.compose import Document, Task
from benchmarks.record import Row

Scores = NDArray[np.float64]
"""The scores of documents, ``[documents, columns]``."""
_LEAST = 1e-7


@dataclass(frozen=True)
class Judge:
    """The threshold and the calibration of a contender, from documents of the validation.

    The threshold has the best F1. It is the same at every length.
    """

    task: Task
    threshold: float
    scalings: tuple[Scaling, ...]

    def measure(self, scores: Scores, documents: Sequence[Document]) -> Row:
        """Return the measures of the scores of documents."""
        targets = _targets(documents)
        answers = decide(self.task, scores, self.threshold)
        clean = np.array([each.is_clean for each in documents])
        sample = sample_of(self.task, scores, documents)
        before, after = (
            calibration_error(*sample.observations(sample.head.scores(logits)))
            for logits in (sample.logits, scaled(self.scalings, sample.logits, sample.tokens))
        )
        return {
            "documents": len(documents),
            "f1": f1(answers, targets),
            "average_precision": float(average_precision_score(targets.ravel(), scores.ravel())),
            "false_alarms": float(answers[clean].any(1).mean()) if clean.any() else None,
            "error_before": before.value,
            "error_after": after.value,
        }


def make_judge(task: Task, scores: Scores, documents: Sequence[Document]) -> Judge:
    """Choose the threshold and fit the calibration."""
    targets = _targets(documents)
    candidates = np.unique(np.quantile(scores, np.linspace(0, 1, 400)))
    best = max(candidates.tolist(), key=lambda at: f1(decide(task, scores, at), targets))
    scalings = tuple(each.scaling for each in fit(sample_of(task, scores, documents)))
    return Judge(task, best, scalings)


def decide(task: Task, scores: Scores, threshold: float) -> NDArray[np.bool_]:
    """Return the labels that are answered; exactly one, if they exclude each other."""
    if task.problem_type == "single_label_classification":
        return np.eye(scores.shape[1], dtype=bool)[scores.argmax(1)]
    return scores >= threshold


def f1(answers: NDArray[np.bool_], targets: NDArray[np.int64]) -> float:
    """Return the F1 over all labels of all documents."""
    wanted = targets == 1
    found = float((answers & wanted).sum())
    return 2 * found / max(1.0, float(answers.sum() + wanted.sum()))


def sample_of(task: Task, scores: Scores, documents: Sequence[Document]) -> Sample:
    """Return the sample for a calibration."""
    head = HEADS[task.problem_type].of_width(scores.shape[1], task.labels)
    assert isinstance(head, DecidingHead)
    inner = scores.clip(_LEAST, 1 - _LEAST)
    logits, truths = np.log(inner), _targets(documents)
    if task.problem_type == "single_label_classification":
        truths = truths.argmax(1)
    else:
        logits = logits - np.log1p(-inner)
        truths = truths if task.problem_type == "multi_label_classification" else truths[:, 0]
    return Sample(head, logits, np.array([len(each.ids) for each in documents]), truths)


def _targets(documents: Sequence[Document]) -> NDArray[np.int64]:
    return np.stack([each.target for each in documents])
