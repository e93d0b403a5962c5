"""The contenders: whole documents, windows, truncation, and bags of words.

All of one job answer through the bundle of one model, as ``aftserve`` does; the bag has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from scipy.sparse import csr_array, vstack
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import normalize

import aftexport
from aftexport.nn import ClassifierConfig
from aftexport.nn.config import MECHANISM_LAYERS
from aftserve.predictor import Predictor
from benchmarks.documents.compose import WINDOW, Document, Draw, Task, windows_of
from benchmarks.documents.measures import Scores
from benchmarks.documents.texts import Ids
from train_whole_documents import Recipe, Trained

SOFTMAX, WINDOWS, BAG = "dot_product_attention", "windows", "bag_of_words"
MAX_SOFTMAX = 8_192
"""The longest documents of the softmax encoder, whose cost grows with the square."""
MAX_PARTS = 8_192
"""The longest documents of the recipe without a part."""
MECHANISMS = (
    "linear_attention", "aft_simple", "aft_conv", "aft_local", "efficient_attention", "fastformer",
    "gated_delta_net",
)  # fmt: skip
LOCAL = "aft_conv"
"""The layer of the recipe, and of the model that reads windows."""
WITHOUT: dict[str, dict[str, Any]] = {
    "without_locality": {"locality": 0.0},
    "without_long_documents": {"stages": ((1.0, WINDOW),)},
    "without_short_documents": {"stages": ((1.0, 16_384),)},
    "without_small_steps": {"tokens_per_step": 8_192},
    "without_weights": {"weighs_rare": False},
}
"""The recipe without one of its parts."""
POOLED = {f"with_{name}": name for name in ("attention", "logsumexp", "mean")}
"""The recipe with another pooling than the one that fits."""
PARTS = (*WITHOUT, *POOLED)
"""The models that show what a part of the recipe is worth, by one seed and no record of speed."""
MODELS = (*MECHANISMS, SOFTMAX, WINDOWS, BAG, *PARTS)
"""The models of a full table; each is one training."""
KNOWN = (
    *(name for name in MECHANISM_LAYERS if name != "aft_full"), SOFTMAX, WINDOWS, BAG,
    *PARTS,
)  # fmt: skip
POOLINGS = {"contains": "max", "dominant": "mean", "conflict": "max"}
"""The pooling that fits each task."""
DIM, DEPTH, NUM_HEADS = 96, 2, 8
TITLES = {
    **{name: f"whole, {name}" for name in MECHANISM_LAYERS},
    SOFTMAX: "whole, softmax attention",
    **{name: f"whole, {LOCAL}, {name.replace('_', ' ')}" for name in PARTS},
    BAG: "bag of words, logistic regression",
    "window_max": "windows of 512, maximum",
    "window_mean": "windows of 512, mean",
    "window_learned": "windows of 512, learned",
    "first": "first 512 tokens",
    "ends": "first and last 256 tokens",
}
Answers = Callable[[Sequence[Document]], dict[str, Scores]]
"""A function that returns the scores of documents by contender."""


def recipe_of(model: str, recipe: Recipe) -> Recipe:
    """Return the recipe for a model of this benchmark; windows and softmax end at their length."""
    greatest = {WINDOWS: WINDOW, SOFTMAX: 2_048}.get(model)
    if greatest is not None:
        stages = tuple((share, min(tokens, greatest)) for share, tokens in recipe.stages)
        return replace(recipe, stages=stages)
    return replace(recipe, **WITHOUT.get(model, {}))


def config_of(model: str, pooling: str, task: Task, vocabulary: int) -> ClassifierConfig:
    """Return the configuration of a model, which has the same width for all."""
    return ClassifierConfig(
        mechanism=LOCAL if model in (WINDOWS, *PARTS) else model,
        vocab_size=vocabulary,
        num_labels=len(task.columns),
        dim=DIM,
        depth=DEPTH,
        num_heads=NUM_HEADS,
        ffn_dim=2 * DIM,
        pooling=POOLED.get(model, pooling),
        problem_type=task.problem_type,
    )


def write_bundle(trained: Trained, task: Task, path: Path) -> None:
    """Export a model; parity has tests of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".pt")
    aftexport.save(source, model=trained.model, labels=task.labels)
    aftexport.export(source, out=path, force=True, check_parity=False, console=Console(quiet=True))


@dataclass(frozen=True)
class Bundle:
    """The model of a bundle, in this process."""

    predictor: Predictor
    task: Task

    def scores(self, documents: Sequence[Ids]) -> Scores:
        """Return the scores of the task's columns ``[documents, columns]``."""
        results = self.predictor([ids.tolist() for ids in documents], progress=False)
        found: list[Any] = [
            each.scores or next(iter((each.heads or {}).values())).scores for each in results
        ]
        return np.array([[scores[name] for name in self.task.columns] for scores in found])

    def window_scores(self, documents: Sequence[Document]) -> list[Scores]:
        """Return the scores of every window of each document."""
        windows = [windows_of(each.ids) for each in documents]
        scores = self.scores([window for own in windows for window in own])
        return np.split(scores, np.cumsum([len(own) for own in windows])[:-1])


def answers_of(model: str, bundle: Bundle, validation: Sequence[Document]) -> Answers:
    """Return the function for the scores of a model's contenders."""
    if model != WINDOWS:
        return lambda documents: {model: bundle.scores([each.ids for each in documents])}
    learned = fit_aggregate(bundle.window_scores(validation), validation)

    def answers(documents: Sequence[Document]) -> dict[str, Scores]:
        scores = bundle.window_scores(documents)
        return {
            "window_max": np.stack([own.max(0) for own in scores]),
            "window_mean": np.stack([own.mean(0) for own in scores]),
            "window_learned": learned(scores),
            "first": bundle.scores([each.ids[:WINDOW] for each in documents]),
            "ends": bundle.scores([ends_of(each.ids) for each in documents]),
        }

    return answers


def ends_of(ids: Ids, half: int = WINDOW // 2) -> Ids:
    """Return the first and the last tokens of a document, together a window."""
    return ids if len(ids) <= 2 * half else np.concatenate([ids[:half], ids[-half:]])


def fit_aggregate(
    scores: Sequence[Scores], documents: Sequence[Document]
) -> Callable[[Sequence[Scores]], Scores]:
    """Return an aggregation that is learned: a logistic regression, the same for every label."""
    truths = np.concatenate([each.target for each in documents])
    model = LogisticRegression(max_iter=1000).fit(_features(scores), truths)
    width = scores[0].shape[1]
    return lambda own: model.predict_proba(_features(own))[:, 1].reshape(len(own), width)


def _features(scores: Sequence[Scores]) -> NDArray[np.float64]:
    """Return the largest two logits, the mean one and the logarithm of the number of windows."""
    rows = []
    for own in scores:
        inner = own.clip(1e-6, 1 - 1e-6)
        logits = np.sort(np.log(inner) - np.log1p(-inner), axis=0)
        count = np.full(own.shape[1], np.log(len(own)))
        rows.append(np.stack([logits[-1], logits[-min(2, len(own))], logits.mean(0), count], 1))
    return np.concatenate(rows)


def fit_bag(
    draw: Draw, recipe: Recipe, vocabulary: int, seed: int, documents: int = 3_000
) -> Answers:
    """Fit a logistic regression on the counts of tokens, for documents of the recipe's lengths."""
    dice = np.random.default_rng(seed)
    greatest = max(tokens for _, tokens in recipe.stages)
    lengths = np.exp(dice.uniform(np.log(recipe.min_tokens), np.log(greatest), documents))
    drawn = [draw(int(length), dice) for length in lengths]
    model = OneVsRestClassifier(LogisticRegression(C=10.0, max_iter=300))
    targets = np.stack([each.target for each in drawn])
    model.fit(_counts(drawn, vocabulary), targets if targets.shape[1] > 1 else targets[:, 0])

    def answers(own: Sequence[Document]) -> dict[str, Scores]:
        scores: Scores = model.predict_proba(_counts(own, vocabulary))
        return {BAG: scores[:, -targets.shape[1] :]}

    return answers


def _counts(documents: Sequence[Document], vocabulary: int) -> csr_array:
    """Return the logarithms of counts, each document with the length 1."""
    rows = [np.log1p(np.bincount(each.ids, minlength=vocabulary)) for each in documents]
    return normalize(vstack([csr_array(row[None]) for row in rows], format="csr"))
