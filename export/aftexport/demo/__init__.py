"""The demo: train a small model, judge it, export it, serve it and query it."""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tokenizers import Tokenizer

from aftexport.checkpoint import save
from aftexport.demo.documents import Document, Example, tokenized
from aftexport.demo.judging import HeldOut, hold_out
from aftexport.demo.options import BUNDLE, DemoOptions, Size
from aftexport.demo.series_run import run_series
from aftexport.demo.server import HOST, ask, serving
from aftexport.demo.split import split
from aftexport.demo.tasks import TASKS, Task
from aftexport.demo.tokenizer import train_tokenizer
from aftexport.demo.training import build, fit, predict
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.pipeline.export import export
from aftexport.system.console import escape, stage
from aftexport.system.files import replacing_file

__all__ = ["DemoOptions", "Size", "run"]

MAX_TOKENS = 16_000
LONG = 10_000
"""Minimum tokens of the posted document, if the mechanism accepts such a document."""

_VOCABULARY = 2048
_AFT_FULL_TOKENS = 2048  # the bias is a T x T matrix: 1 GB per layer for 16,000 tokens


def run(options: DemoOptions, console: Console) -> None:
    """Train a model of documents, export it, serve it and post a long document to it.

    The folder ``options.out`` then contains ``model.pt``, ``bundle/``, ``document.txt`` (the
    posted document) and ``server.log``, and ``heads.json`` if the task describes its head. For
    series it contains ``features.json`` and ``series.npy`` instead of ``document.txt``.

    Args:
        options: the task and its settings.
        console: console for progress and results.

    Raises:
        AftexportError: if the options or the documents are invalid, or the export, its parity
            or the server fails.
    """
    start = time.monotonic()
    options.check()
    if options.task == "series":
        run_series(options, console)
        return
    kind = TASKS[options.task]
    corpus = kind.collect(options, console)
    with stage(console, "Splitting with near-duplicates kept together"):
        parts = split(corpus, options.seed)
        task = kind.of(parts.train)
    task.show_split(parts, console)
    with stage(console, "Training the tokenizer, encoding the training documents"):
        tokenizer = train_tokenizer(parts.train.texts, _VOCABULARY)
        documents = tokenized(tokenizer, parts.train)
    model = _train(options, task, tokenizer, documents, console)
    task = _tuned(model, task, documents, console)
    held_out = _hold_out(model, tokenized(tokenizer, parts.test), console)
    _judge(model, task, documents, held_out, console)

    options.out.mkdir(parents=True, exist_ok=True)
    _export(options.out, model, task, tokenizer, _choose(held_out, console), console)
    _ask(options.out, task, held_out.longest, console)
    console.print(f"The demo took {time.monotonic() - start:.0f} s.")


def _train(
    options: DemoOptions,
    task: Task,
    tokenizer: Tokenizer,
    documents: list[Document],
    console: Console,
) -> DocumentClassifier:
    mechanism = options.mechanism
    config = ClassifierConfig(
        mechanism=mechanism,
        vocab_size=tokenizer.get_vocab_size(),
        num_labels=len(task.names),
        dim=64,
        depth=2,
        ffn_dim=128,
        window=task.window,
        max_length=_AFT_FULL_TOKENS if mechanism == "aft_full" else None,
        pooling="attention",
        problem_type=task.problem_type,
    )
    model = build(config, options.seed)
    steps = options.size.steps or task.steps
    examples = [Example(document.ids, task.target(document)) for document in documents]
    with _progress(console, "loss {task.fields[loss]:.2f}") as progress:
        shown = progress.add_task(f"Training {mechanism}", total=1.0, loss=float("nan"))
        result = fit(
            model,
            examples,
            seed=options.seed,
            crops=task.crops.for_layer(mechanism),
            steps=steps,
            max_seconds=options.size.max_seconds,
            report=lambda done, loss: progress.update(shown, completed=done, loss=loss),
        )
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"Trained {parameters:,} parameters in {result.steps} steps, {result.seconds:.0f} s."
    )
    if result.was_cut_short:
        console.print(
            f"[yellow]Training stopped after {options.size.max_seconds:.0f} s, before its "
            f"{steps} steps. Accuracy may be lower, and another run may give another "
            "result.[/]"
        )
    return model


def _tuned(
    model: DocumentClassifier, task: Task, documents: list[Document], console: Console
) -> Task:
    """Return the task with settings for the model's outputs for some training documents."""
    limit = min(model.max_length or MAX_TOKENS, MAX_TOKENS)
    fitting = [document for document in documents if len(document) <= limit]
    if not fitting or task.tuned_on == 0:
        return task
    some = fitting[:: -(-len(fitting) // task.tuned_on)]  # they are sorted by package
    with stage(console, "Choosing thresholds on training documents"):
        return task.tuned(some, predict(model, some))


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
    task: Task,
    train: list[Document],
    held_out: HeldOut,
    console: Console,
) -> None:
    with _progress(console, "{task.completed}/{task.total}") as progress:
        shown = progress.add_task("Judging on whole documents", total=len(held_out.documents))
        outputs = predict(model, held_out.documents, report=lambda: progress.advance(shown))
    with stage(console, "Training the baseline"):
        table = task.results(train, held_out, outputs, model.config.mechanism)
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
    task: Task,
    tokenizer: Tokenizer,
    document: Document,
    console: Console,
) -> None:
    """Write the model, the document and the bundle."""
    save(out / "model.pt", model=model, labels=task.names, tokenizer=tokenizer.to_str())
    console.print(f"Model: [bold]{escape(str(out / 'model.pt'))}[/]")
    with replacing_file(out / "document.txt") as aside:
        aside.write_bytes(document.text.encode())
    heads = None
    if task.head is not None:
        heads = out / "heads.json"
        with replacing_file(heads) as aside:
            aside.write_text(json.dumps({"logits": task.head.model_dump(mode="json")}), "utf-8")
    export(out / "model.pt", to="onnx", out=out / BUNDLE, heads=heads, force=True, console=console)


def _ask(out: Path, task: Task, document: Document, console: Console) -> None:
    with serving(out / BUNDLE, out / "server.log") as port:
        path = escape(str(out / "document.txt"))
        console.print(f"Serving on http://{HOST}:{port}; posting {path} to /infer")
        answer = ask(port, document.text, evidence=task.evidence)
    table = Table.grid(padding=(0, 2))
    for name, text in (*task.answer_rows(answer, document), *_common_rows(answer)):
        table.add_row(name, text)
    console.print("\nThe server's answer")
    console.print(table)


def _common_rows(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of an answer of any task."""
    rows = [
        ("tokens", f"{answer['tokens_used']:,} used of {answer['tokens_total']:,}"),
        ("truncated", "yes" if answer["truncated"] else "no"),
    ]
    for name, seconds in answer["timings"].items():
        rows.append((name.removesuffix("_seconds"), f"{seconds * 1000:,.1f} ms"))
    return rows


def _progress(console: Console, detail: str) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(detail),
        TimeElapsedColumn(),
        console=console,
    )
