"""Train a model on the source files of this Python, for one of three tasks, and export it.

Nothing is downloaded, and Python's own parser gives the truth. Run it from the root of the
repository with

    pip install '.[cpu,torch]'
    python examples/label_source_files.py --task multi-label
    python examples/label_source_files.py --task regression --steps 200
    python examples/label_source_files.py --task token-classification

A model answers which constructs a file uses anywhere, how many of 10 lines are comments, or the
kind of each of its bytes. Its tokens are bytes, so each place of the parser is a token. The
training sees short parts of files, and the model answers for whole files. The example prints the
result of the bundle for held-out files beside that of a baseline.
"""

import argparse
import ast
import io
import random
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

import aftexport
import aftserve
from aftexport.nn import ClassifierConfig, DocumentClassifier, task_loss

USES = {"classes": ast.ClassDef, "comprehensions": ast.ListComp, "f-strings": ast.JoinedStr,
        "lambdas": ast.Lambda, "raised errors": ast.Raise, "while loops": ast.While}  # fmt: skip
KINDS = {"O": (), "comment": (tokenize.COMMENT,), "name": (tokenize.NAME,),
         "operator": (tokenize.OP,), "string": (tokenize.STRING,)}  # fmt: skip
TASKS = {
    "multi-label": ("multi_label_classification", list(USES)),
    "regression": ("regression", ["comments in 10 lines"]),
    "token-classification": ("token_classification", list(KINDS)),
}
"""The task, and the names of its labels or values."""
FILES, BYTES = 100, range(3_000, 12_000)
BATCH, PART = 16, 512


def collect(dice: random.Random) -> list[str]:
    """Return source files of the standard library that are ASCII, so bytes are characters."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py")):
        if path.stat().st_size in BYTES and "packages" not in path.parent.name:
            text = path.read_text("latin-1")
            try:
                ast.parse(text)
                list(tokenize.generate_tokens(io.StringIO(text).readline))
            except (SyntaxError, tokenize.TokenError, ValueError):
                continue
            if text.isascii():
                found.append(text)
    return dice.sample(found, min(FILES, len(found)))


@cache
def spans_of(text: str, task: str) -> list[tuple[int, int, int]]:
    """Return the spans of a file, which is parsed once."""
    return [*find_spans(text, task)]


def find_spans(text: str, task: str) -> Iterator[tuple[int, int, int]]:
    """Yield the first byte, the end and the number of each construct, line or token of a file."""
    lines = text.splitlines(keepends=True)
    starts = np.cumsum([0, *map(len, lines)]).tolist()
    if task == "multi-label":
        for node in ast.walk(ast.parse(text)):
            for number, kind in enumerate(USES.values()):
                if isinstance(node, kind):
                    place = starts[node.lineno - 1] + node.col_offset
                    yield place, place + 1, number
    elif task == "regression":
        for start, line in zip(starts, lines, strict=False):
            if words := line.strip():
                yield start, start + 1, int(words.startswith("#"))
    else:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            for number, kinds in enumerate(KINDS.values()):
                if token.type in kinds:
                    (row, first), (last_row, last) = token.start, token.end
                    yield starts[row - 1] + first, starts[last_row - 1] + last, number


def truth_of(text: str, task: str, start: int, stop: int) -> Tensor:
    """Return the truth about a part of a file, in the shape that ``task_loss`` expects."""
    spans = [span for span in spans_of(text, task) if start <= span[0] < stop]
    if task == "multi-label":
        held = {number for *_, number in spans}
        return torch.tensor([float(number in held) for number in range(len(USES))])
    if task == "regression":
        return torch.tensor([10 * sum(number for *_, number in spans) / max(1, len(spans))])
    kinds = torch.zeros(stop - start, dtype=torch.int64)
    for first, end, number in spans:
        kinds[first - start : end - start] = number
    return kinds


def train(model: DocumentClassifier, task: str, texts: Sequence[str], steps: int) -> None:
    """Train in place on random parts of files."""
    dice = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        ids, targets = [], []
        for text in dice.choices(texts, k=BATCH):
            start = dice.randrange(len(text) - PART)
            ids.append(torch.tensor([*text[start : start + PART].encode()]))
            # A construct counts for the whole file, a share or a kind for its place.
            span = (0, len(text)) if task == "multi-label" else (start, start + PART)
            targets.append(truth_of(text, task, *span))
        logits = model(torch.stack(ids), torch.full((BATCH,), PART))
        optimizer.zero_grad()
        task_loss(model.config.problem_type, logits, torch.stack(targets)).backward()
        optimizer.step()
        schedule.step()
    model.eval()


def read_answer(head: Any, task: str) -> Tensor:
    """Return an answer of the bundle in the form of the truth."""
    if task == "multi-label":
        return torch.tensor([float(name in head.labels) for name in USES])
    if task == "regression":
        return torch.tensor([*head.values.values()])
    return torch.tensor([[*KINDS].index(label) for label in head.labels])


def score(answers: Sequence[Tensor], truth: Sequence[Tensor], task: str) -> float:
    """Return the mean absolute error of values, or the share of right labels."""
    pairs = [*zip(answers, truth, strict=True)]
    if task == "regression":
        return float(np.mean([abs(float(one - other)) for one, other in pairs]))
    return float(torch.cat([one == other for one, other in pairs]).float().mean())


def usual(truth: Sequence[Tensor], task: str) -> Tensor:
    """Return the answer without a look at the file: the most common one, or the mean."""
    if task == "token-classification":
        return torch.cat([*truth]).mode().values
    mean = torch.stack([*truth]).mean(0)
    return mean if task == "regression" else mean.round()


def main() -> None:
    """Train, export and judge a model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--out", type=Path, default=Path("build/examples/source_files"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    task, (problem_type, names) = arguments.task, TASKS[arguments.task]

    torch.set_num_threads(1)  # threads of so small a model mostly wait for one another
    torch.manual_seed(0)
    texts = collect(random.Random(0))
    held_out, training = texts[::5], [text for i, text in enumerate(texts) if i % 5]
    config = ClassifierConfig(
        mechanism="aft_local", vocab_size=256, num_labels=len(names), problem_type=problem_type,
        dim=32, depth=2, ffn_dim=64, window=16,
        pooling="mean" if task == "token-classification" else "attention",
    )  # fmt: skip
    model = DocumentClassifier(config)
    nn.init.normal_(model.embedding.weight, std=0.02)
    train(model, task, training, arguments.steps)

    path = arguments.out / f"{task}.pt"
    aftexport.save(path, model=model, labels=names)
    exported = aftexport.export(path, tokenizer="bytes", force=True, console=Console(quiet=True))
    truth = [truth_of(text, task, 0, len(text)) for text in held_out]
    known = usual([truth_of(text, task, 0, len(text)) for text in training], task)
    with aftserve.Predictor(exported.path) as predictor:
        heads = [answer.heads["logits"] for answer in predictor(held_out)]
    form, unit = (".3f", "mean error") if task == "regression" else (".1%", "right")
    for title, answers in (
        ("baseline", [known.expand_as(one) for one in truth]),
        ("bundle", [read_answer(head, task) for head in heads]),
    ):
        print(f"{title:9} {score(answers, truth, task):{form}} {unit}, {len(truth)} held-out files")


if __name__ == "__main__":
    main()
