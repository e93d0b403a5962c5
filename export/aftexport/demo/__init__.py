"""The demo: train a small model, judge it, export it, serve it and query it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer

from aftexport.bundle.bundle import is_bundle
from aftexport.checkpoint import save
from aftexport.demo.corpus import (
    Corpus,
    Document,
    cap,
    installed_packages,
    read_documents,
    tokenized,
    train_tokenizer,
)
from aftexport.demo.server import HOST, ask, serving
from aftexport.demo.split import Split, split
from aftexport.demo.training import HeldOut, accuracies, build, fit, hold_out, predict
from aftexport.errors import UsageError
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.nn.config import MECHANISM_LAYERS
from aftexport.pipeline.export import export
from aftexport.system.console import escape, plain_table, stage
from aftexport.system.files import replacing_file

BUNDLE = "bundle"
"""Name of the folder of the bundle in that of the demo."""


@dataclass(frozen=True)
class Size:
    """The amount of work."""

    classes: int = 8
    per_class: int = 250
    steps: int = 250
    max_seconds: float = 110.0


@dataclass(frozen=True)
class DemoOptions:
    """The options of ``aftexport demo``."""

    mechanism: str
    # user's documents, `.csv` or `.jsonl`; None for source files of the packages installed here
    data: Path | None
    out: Path
    seed: int
    size: Size = field(default_factory=Size)

    def check(self) -> None:
        """Raise UsageError if an option cannot be used."""
        if self.mechanism not in MECHANISM_LAYERS:
            raise UsageError(
                f"--mechanism must be a known mechanism, got {self.mechanism!r}.",
                f"Choose one of {', '.join(MECHANISM_LAYERS)}.",
            )
        if not 0 <= self.seed < 2**32:
            raise UsageError(
                f"--seed must be from 0 to 4294967295, got {self.seed}.",
                "Give a number in this range.",
            )
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(
                f"--out must be a folder, got the file {self.out}.", "Choose a folder."
            )
        bundle = self.out / BUNDLE
        is_ours = not bundle.exists() or is_bundle(bundle)
        if not is_ours and (bundle.is_file() or any(bundle.iterdir())):
            raise UsageError(f"{bundle} exists and is not a bundle.", "Choose another --out.")


__all__ = ["DemoOptions", "Size", "run"]

MAX_TOKENS = 16_000
LONG = 10_000
"""Minimum tokens of the posted document, if the mechanism accepts such a document."""

_BEGINNING = 512
"""The tokens that many models read of a document."""
_VOCABULARY = 2048
_AFT_FULL_TOKENS = 2048  # the bias is a T x T matrix: 1 GB per layer for 16,000 tokens
_LABELS_SHOWN = 20


def run(options: DemoOptions, console: Console) -> None:
    """Train a model of documents, export it, serve it and post a long document to it.

    The folder ``options.out`` then contains ``model.pt``, ``bundle/``, ``document.txt`` (the
    posted document) and ``server.log``.
    """
    start = time.monotonic()
    options.check()
    corpus = _collect(options, console)
    with stage(console, "Splitting with near-duplicates kept together"):
        parts = split(corpus, options.seed)
    labels = parts.train.classes
    _show_split(parts, labels, console)
    with stage(console, "Training the tokenizer, encoding the training documents"):
        tokenizer = train_tokenizer(parts.train.texts, _VOCABULARY)
        documents = tokenized(tokenizer, parts.train)
    model = _train(options, labels, tokenizer, documents, console)
    held_out = _hold_out(model, tokenized(tokenizer, parts.test), console)
    _judge(model, labels, documents, held_out, console)

    options.out.mkdir(parents=True, exist_ok=True)
    _export(options.out, model, labels, tokenizer, _choose(held_out, console), console)
    _ask(options.out, held_out.longest, console)
    console.print(f"The demo took {time.monotonic() - start:.0f} s.")


def _collect(options: DemoOptions, console: Console) -> Corpus:
    """Return the user's documents, or source files without the names of packages."""
    size = options.size
    if options.data is None:
        with stage(console, "Collecting source files of installed packages"):
            corpus = installed_packages(
                num_classes=size.classes, per_class=size.per_class, seed=options.seed
            )
        console.print(
            "Task: find the package of a source file. Package names, import aliases and "
            "leading comments are removed. Code copied from other projects is left out."
        )
        return corpus
    with stage(console, f"Reading {options.data}"):
        everything = read_documents(options.data)
    share = size.classes * size.per_class // len(everything.classes)
    kept = cap(everything.labels, max(8, share), options.seed)
    if len(kept) < len(everything):
        console.print(f"[yellow]Drawn at random: {len(kept)} of {len(everything)} documents.[/]")
    return everything.take(kept)


def _show_split(parts: Split, labels: list[str], console: Console) -> None:
    """Print the number of documents of each label, and of groups of near-duplicates."""
    train, test = parts.train, parts.test
    table = plain_table("label", "training", "held out")
    for column in table.columns[1:]:
        column.justify = "right"
    for label in labels[:_LABELS_SHOWN]:
        table.add_row(escape(label), *(str(part.labels.count(label)) for part in (train, test)))
    if len(labels) > _LABELS_SHOWN:
        table.add_row(f"{len(labels) - _LABELS_SHOWN} more labels", "", "")
    table.add_section()
    table.add_row("documents", str(len(train)), str(len(test)))
    console.print(table)
    console.print(
        f"{len(train) + len(test)} documents, {len(test)} of them held out; {parts.groups} if "
        "near-duplicates count once."
    )


def _train(
    options: DemoOptions,
    labels: list[str],
    tokenizer: Tokenizer,
    documents: list[Document],
    console: Console,
) -> DocumentClassifier:
    mechanism, size = options.mechanism, options.size
    config = ClassifierConfig(
        mechanism=mechanism,
        vocab_size=tokenizer.get_vocab_size(),
        num_labels=len(labels),
        dim=64,
        depth=2,
        ffn_dim=128,
        window=8,
        max_length=_AFT_FULL_TOKENS if mechanism == "aft_full" else None,
        pooling="attention",
    )
    model = build(config, options.seed)
    with _progress(console, "loss {task.fields[loss]:.2f}") as progress:
        shown = progress.add_task(f"Training {mechanism}", total=1.0, loss=float("nan"))
        result = fit(
            model,
            documents,
            labels,
            seed=options.seed,
            steps=size.steps,
            max_seconds=size.max_seconds,
            report=lambda done, loss: progress.update(shown, completed=done, loss=loss),
        )
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"Trained {parameters:,} parameters in {result.steps} steps, {result.seconds:.0f} s."
    )
    if result.was_cut_short:
        console.print(
            f"[yellow]Training stopped after {size.max_seconds:.0f} s, before its {size.steps} "
            "steps. Accuracy may be lower, and another run may give another result.[/]"
        )
    return model


def _hold_out(model: DocumentClassifier, test: list[Document], console: Console) -> HeldOut:
    limit = min(model.max_length or MAX_TOKENS, MAX_TOKENS)
    held_out = hold_out(test, limit)
    if held_out.left_out:
        source = f"limit of {model.config.mechanism}" if model.max_length else "limit of the demo"
        console.print(
            f"{held_out.left_out} held-out documents are left out, for the baselines too, because "
            f"they exceed {limit:,} tokens, the {source}."
        )
    return held_out


def _judge(
    model: DocumentClassifier,
    labels: list[str],
    train: list[Document],
    held_out: HeldOut,
    console: Console,
) -> None:
    name, whole = model.config.mechanism, held_out.documents
    first = [replace(each, ids=each.ids[:_BEGINNING]) for each in whole]
    with _progress(console, "{task.completed}/{task.total}") as progress:
        shown = progress.add_task("Judging on held-out documents", total=2 * len(whole))
        answers = {
            title: predict(model, documents, labels, lambda: progress.advance(shown))
            for title, documents in (
                (f"{name}, first {_BEGINNING} tokens", first),
                (f"[bold]{name}, whole documents[/]", whole),
            )
        }
    with stage(console, "Training the baseline"):
        table = accuracies(train, held_out, answers)
    console.print(table)


def _choose(held_out: HeldOut, console: Console) -> Document:
    tokens = len(held_out.longest)
    if tokens <= LONG:
        console.print(
            f"[yellow]No held-out document within the model's limit has more than {LONG:,} tokens. "
            f"The longest one is posted, with {tokens:,} tokens.[/]"
        )
    return held_out.longest


def _export(
    out: Path,
    model: DocumentClassifier,
    labels: list[str],
    tokenizer: Tokenizer,
    document: Document,
    console: Console,
) -> None:
    """Write the model, the document and the bundle."""
    save(out / "model.pt", model=model, labels=labels, tokenizer=tokenizer.to_str())
    console.print(f"Model: [bold]{escape(str(out / 'model.pt'))}[/]")
    with replacing_file(out / "document.txt") as aside:
        aside.write_bytes(document.text.encode())
    export(out / "model.pt", to="onnx", out=out / BUNDLE, force=True, console=console)


def _ask(out: Path, document: Document, console: Console) -> None:
    with serving(out / BUNDLE, out / "server.log") as port:
        path = escape(str(out / "document.txt"))
        console.print(f"Serving on http://{HOST}:{port}; posting {path} to /infer")
        answer = ask(port, document.text)
    table = Table.grid(padding=(0, 2))
    for name, text in answer_rows(answer, document):
        table.add_row(name, text)
    console.print("\nThe server's answer")
    console.print(table)


def answer_rows(answer: dict[str, Any], document: Document) -> Iterator[tuple[str, str]]:
    """Yield the server's answer for a document beside the truth, as names and texts."""
    is_right = answer["label"] == document.label
    verdict = "[green]right[/]" if is_right else f"[red]wrong[/], it is {escape(document.label)}"
    yield "label", f"[bold]{escape(answer['label'])}[/] ({verdict})"
    best = sorted(answer["scores"].items(), key=lambda item: -item[1])[:3]
    yield "scores", ", ".join(f"{escape(name)} {score:.3f}" for name, score in best)
    yield "tokens", f"{answer['tokens_used']:,} used of {answer['tokens_total']:,}"
    yield "truncated", "yes" if answer["truncated"] else "no"
    for name, seconds in answer["timings"].items():
        yield name.removesuffix("_seconds"), f"{seconds * 1000:,.1f} ms"


def _progress(console: Console, detail: str) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(detail),
        TimeElapsedColumn(),
        console=console,
    )
