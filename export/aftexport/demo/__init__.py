"""The demo: train a small classifier, judge it, export it, serve it and query it."""

import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer

from aftexport.bundle.bundle import is_bundle
from aftexport.checkpoint import save
from aftexport.console import escape, stage
from aftexport.demo.baseline import byte_regression, majority
from aftexport.demo.corpus import Corpus, cap, installed_packages
from aftexport.demo.judging import HeldOut, hold_out
from aftexport.demo.own_documents import read_documents
from aftexport.demo.server import HOST, ask, serving
from aftexport.demo.split import Split, split
from aftexport.demo.tokenizer import encode, train_tokenizer
from aftexport.demo.training import MAX_SECONDS, STEPS, build, fit, predict
from aftexport.errors import UsageError
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.operators.mechanisms import MECHANISMS
from aftexport.pipeline.export import export
from aftexport.system.files import replacing_file

MAX_TOKENS = 16_000
LONG = 10_000
"""Minimum tokens of the posted document, if the mechanism accepts such a document."""

_BUNDLE = "bundle"
_CLASSES = 8
_DOCUMENTS_PER_CLASS = 250
_MAX_DOCUMENTS = _CLASSES * _DOCUMENTS_PER_CLASS
_LABELS_SHOWN = 20
_VOCABULARY = 2048
_AFT_FULL_TOKENS = 2048  # the bias is a T x T matrix: 1 GB per layer for 16,000 tokens


def run(*, mechanism: str, data: Path | None, out: Path, seed: int, console: Console) -> None:
    """Train a document classifier, export it, serve it and post a long document to it.

    The folder ``out`` then contains ``model.pt``, ``bundle/``, ``document.txt`` (the posted
    document) and ``server.log``.

    Args:
        mechanism: one of ``MECHANISMS``.
        data: the user's documents, ``.csv`` or ``.jsonl``; None for source files
            of the packages installed here.
        out: the folder, which is created if it does not exist.
        seed: seed of the choice of documents, the split, the initial weights and the training.
        console: console for progress and results.

    Raises:
        AftexportError: if the arguments or the documents are invalid, or the export, its parity
            or the server fails.
    """
    start = time.monotonic()
    _check(mechanism, out, seed)
    corpus = _documents(data, seed, console)
    with stage(console, "Splitting with near-duplicates kept together"):
        parts = split(corpus, seed)
    _print_split(parts, console)
    with stage(console, "Training the tokenizer, encoding the training documents"):
        tokenizer = train_tokenizer(parts.train.texts, _VOCABULARY)
        training_documents = encode(tokenizer, parts.train.texts)
    model = _train(mechanism, tokenizer, parts.train, training_documents, seed, console)
    held_out = _hold_out(model, parts.test, tokenizer, console)
    _judge(model, parts.train, held_out, console)

    out.mkdir(parents=True, exist_ok=True)
    save(out / "model.pt", model=model, labels=parts.train.classes, tokenizer=tokenizer.to_str())
    console.print(f"Model: [bold]{escape(str(out / 'model.pt'))}[/]")
    chosen = _choose(held_out, console)
    text, label = held_out.corpus.texts[chosen], held_out.corpus.labels[chosen]
    with replacing_file(out / "document.txt") as aside:
        aside.write_bytes(text.encode())
    bundle = out / _BUNDLE
    export(out / "model.pt", to="onnx", out=bundle, force=True, console=console)

    with serving(bundle, out / "server.log") as port:
        document = escape(str(out / "document.txt"))
        console.print(f"Serving on http://{HOST}:{port}; posting {document} to /infer")
        answer = ask(port, text)
    _print_answer(answer, label, console)
    console.print(f"The demo took {time.monotonic() - start:.0f} s.")


def _check(mechanism: str, out: Path, seed: int) -> None:
    if mechanism not in MECHANISMS:
        raise UsageError(
            f"--mechanism must be a known mechanism, got {mechanism!r}.",
            f"Choose one of {', '.join(MECHANISMS)}.",
        )
    if not 0 <= seed < 2**32:
        raise UsageError(
            f"--seed must be from 0 to 4294967295, got {seed}.", "Give a number in this range."
        )
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out must be a folder, got the file {out}.", "Choose a folder.")
    bundle = out / _BUNDLE
    if bundle.exists() and not is_bundle(bundle) and (bundle.is_file() or any(bundle.iterdir())):
        raise UsageError(f"{bundle} exists and is not a bundle.", "Choose another --out.")


def _documents(data: Path | None, seed: int, console: Console) -> Corpus:
    if data is None:
        with stage(console, "Collecting source files of installed packages"):
            corpus = installed_packages(
                num_classes=_CLASSES, per_class=_DOCUMENTS_PER_CLASS, seed=seed
            )
        console.print(
            "Task: find the package of a source file. Package names, import aliases and leading "
            "comments are removed. Code copied from other projects is left out."
        )
        return corpus
    with stage(console, f"Reading {data}"):
        everything = read_documents(data)
    kept = cap(everything.labels, max(8, _MAX_DOCUMENTS // len(everything.classes)), seed)
    if len(kept) < len(everything):
        console.print(f"[yellow]Drawn at random: {len(kept)} of {len(everything)} documents.[/]")
    return everything.take(kept)


def _print_split(parts: Split, console: Console) -> None:
    table = Table("label", "training", "held out", box=box.SIMPLE_HEAD)
    table.columns[1].justify = table.columns[2].justify = "right"
    classes = parts.train.classes
    for label in classes[:_LABELS_SHOWN]:
        counts = [str(part.labels.count(label)) for part in (parts.train, parts.test)]
        table.add_row(escape(label), *counts)
    if len(classes) > _LABELS_SHOWN:
        table.add_row(f"{len(classes) - _LABELS_SHOWN} more labels", "", "")
    table.add_section()
    table.add_row("documents", str(len(parts.train)), str(len(parts.test)))
    console.print(table)
    total = len(parts.train) + len(parts.test)
    console.print(f"{total} documents; {parts.groups} if near-duplicates count once.")


def _train(
    mechanism: str,
    tokenizer: Tokenizer,
    train: Corpus,
    documents: list[list[int]],
    seed: int,
    console: Console,
) -> DocumentClassifier:
    config = ClassifierConfig(
        mechanism=mechanism,
        vocab_size=tokenizer.get_vocab_size(),
        num_labels=len(train.classes),
        dim=64,
        depth=2,
        ffn_dim=128,
        window=8,
        max_length=_AFT_FULL_TOKENS if mechanism == "aft_full" else None,
        pooling="attention",
    )
    model = build(config, seed)
    targets = [train.classes.index(label) for label in train.labels]
    with _progress(console, "loss {task.fields[loss]:.2f}") as progress:
        task = progress.add_task(f"Training {mechanism}", total=1.0, loss=float("nan"))
        result = fit(
            model,
            documents,
            targets,
            seed=seed,
            report=lambda done, loss: progress.update(task, completed=done, loss=loss),
        )
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"Trained {parameters:,} parameters in {result.steps} steps, {result.seconds:.0f} s."
    )
    if result.was_cut_short:
        console.print(
            f"[yellow]Training stopped after {MAX_SECONDS:.0f} s, before its {STEPS} steps. "
            "Accuracy may be lower, and another run may give another result.[/]"
        )
    return model


def _hold_out(
    model: DocumentClassifier, test: Corpus, tokenizer: Tokenizer, console: Console
) -> HeldOut:
    limit = min(model.max_length or MAX_TOKENS, MAX_TOKENS)
    held_out = hold_out(test, tokenizer, limit)
    if held_out.left_out:
        source = f"limit of {model.config.mechanism}" if model.max_length else "limit of the demo"
        console.print(
            f"{held_out.left_out} held-out documents are left out, for the baselines too, because "
            f"they exceed {limit:,} tokens, the {source}."
        )
    return held_out


def _judge(model: DocumentClassifier, train: Corpus, held_out: HeldOut, console: Console) -> None:
    texts, count = held_out.corpus.texts, len(held_out.corpus)
    with _progress(console, "{task.completed}/{task.total}") as progress:
        task = progress.add_task("Judging on whole documents", total=count)
        classes = predict(model, held_out.documents, report=lambda: progress.advance(task))
    with stage(console, "Training the baseline"):
        by_bytes = byte_regression(train, texts)
    results = {
        "always the most common label": majority(train, texts),
        "logistic regression on bytes": by_bytes,
        f"[bold]{model.config.mechanism}[/]": [train.classes[i] for i in classes],
    }
    table = Table("classifier", f"accuracy, {count} held-out documents", box=box.SIMPLE_HEAD)
    table.columns[1].justify = "right"
    for name, answers in results.items():
        table.add_row(name, f"{held_out.accuracy(answers):.1%}")
    console.print(table)


def _choose(held_out: HeldOut, console: Console) -> int:
    tokens = len(held_out.documents[held_out.longest])
    if tokens <= LONG:
        console.print(
            f"[yellow]No held-out document within the model's limit has more than {LONG:,} tokens. "
            f"The longest one is posted, with {tokens:,} tokens.[/]"
        )
    return held_out.longest


def _print_answer(answer: dict[str, Any], label: str, console: Console) -> None:
    is_right = answer["label"] == label
    verdict = "[green]right[/]" if is_right else f"[red]wrong[/], it is {escape(label)}"
    table = Table.grid(padding=(0, 2))
    table.add_row("label", f"[bold]{escape(answer['label'])}[/] ({verdict})")
    best = sorted(answer["scores"].items(), key=lambda item: -item[1])[:3]
    table.add_row("scores", ", ".join(f"{escape(name)} {score:.3f}" for name, score in best))
    table.add_row("tokens", f"{answer['tokens_used']:,} used of {answer['tokens_total']:,}")
    table.add_row("truncated", "yes" if answer["truncated"] else "no")
    for name, seconds in answer["timings"].items():
        table.add_row(name.removesuffix("_seconds"), f"{seconds * 1000:,.1f} ms")
    console.print("\nThe server's answer")
    console.print(table)


def _progress(console: Console, detail: str) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(detail),
        TimeElapsedColumn(),
        console=console,
    )
