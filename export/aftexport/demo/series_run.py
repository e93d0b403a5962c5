"""The demo of series: train on features, export, serve, and send a file of ``numpy.save``."""

import time
from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from aftexport.bundle.features import Features
from aftexport.checkpoint import save
from aftexport.demo.documents import Example
from aftexport.demo.options import BUNDLE, DemoOptions
from aftexport.demo.series import (
    MACHINES,
    NAMES,
    STEPS,
    Series,
    features_of,
    find_fault,
    make_series,
    normalized,
    summaries,
)
from aftexport.demo.server import HOST, ask_features, serving
from aftexport.demo.training import Crops, build, fit, predict
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.pipeline.export import export
from aftexport.system.console import escape, plain_table, stage
from aftexport.system.files import replacing_file

SERIES = "series.npy"
"""The file of the series that the demo sends."""
FEATURES = "features.json"
"""The names and the normalization of the sensors."""

_TRAINING_STEPS = 120
_CROPS = Crops(count=64, shortest=256, longest=256)
_WINDOW = 16
_AFT_FULL_STEPS = 2048  # as for documents: the bias is a matrix of every pair
_LENGTHS = (STEPS.start, 1024, 4096, STEPS.stop)
_EVIDENCE = 3


def run_series(options: DemoOptions, console: Console) -> None:
    """Train a model of series, export it, serve it and send it the longest held-out series."""
    begun = time.monotonic()
    per_machine = options.size.per_class or 80
    with stage(console, "Making series"):
        train = make_series(len(MACHINES) * per_machine, 2 * options.seed)
        test = make_series(len(MACHINES) * per_machine // 2, 2 * options.seed + 1)
        features = features_of(train)
    console.print(
        f"Task: find the machine that vibrates slowly, by {len(NAMES)} sensors. The truth "
        f"is known, because the series are made. {len(train)} series, and {len(test)} held out."
    )
    model = _train(options, normalized(train, features), console)
    limit = model.max_length or STEPS.stop
    held_out = [one for one in test if len(one) <= limit]
    with stage(console, "Judging whole series"):
        outputs = predict(model, normalized(held_out, features))
        answers = [MACHINES[int(logits.argmax())] for logits in outputs]
        table = _results(train, held_out, answers, options.mechanism)
    console.print(table)
    _export(options, model, features, console)
    _send(options, max(held_out, key=len), console)
    console.print(f"The demo took {time.monotonic() - begun:.0f} s.")


def _train(options: DemoOptions, train: Sequence[Series], console: Console) -> DocumentClassifier:
    config = ClassifierConfig(
        mechanism=options.mechanism,
        num_features=len(NAMES),
        num_labels=len(MACHINES),
        dim=64,
        depth=2,
        ffn_dim=128,
        window=_WINDOW,
        causal=True,
        max_length=_AFT_FULL_STEPS if options.mechanism == "aft_full" else None,
        pooling="attention",
    )
    model = build(config, options.seed)
    crops = _CROPS.for_layer(options.mechanism)
    with stage(console, f"Training {options.mechanism} on parts of {crops.longest} steps"):
        result = fit(
            model,
            [Example(one.ids, one) for one in train],
            seed=options.seed,
            crops=crops,
            steps=options.size.steps or _TRAINING_STEPS,
            max_seconds=options.size.max_seconds,
        )
    console.print(f"Trained {result.steps} steps in {result.seconds:.0f} s.")
    if result.was_cut_short:
        console.print("[yellow]The time limit ended the training. Accuracy may be lower.[/]")
    return model


def _results(
    train: Sequence[Series], held_out: Sequence[Series], answers: Sequence[str], name: str
) -> Table:
    """Return the accuracy by length of a baseline, the model and the matched filter."""
    baseline = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    baseline.fit(summaries(train), [one.label for one in train])
    found = {
        "logistic regression on means and deviations": baseline.predict(summaries(held_out)),
        f"[bold]{name}[/]": np.array(answers),
        "matched filter that knows the bursts": np.array([find_fault(x.ids) for x in held_out]),
    }
    lengths = np.array([len(one) for one in held_out])
    truth = np.array([one.label for one in held_out])
    pairs = [*pairwise(_LENGTHS)]
    table = plain_table("accuracy", "all", *(f"{a:,} to {b - 1:,} steps" for a, b in pairs))
    for title, labels in found.items():
        right = labels == truth
        shares = [right[(a <= lengths) & (lengths < b)] for a, b in pairs]
        cells = [f"{x.mean():.1%}" if len(x) else "no series" for x in (right, *shares)]
        table.add_row(title, *cells)
    return table


def _export(
    options: DemoOptions, model: DocumentClassifier, features: Features, console: Console
) -> None:
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    save(out / "model.pt", model=model, labels=MACHINES)
    with replacing_file(out / FEATURES) as aside:
        aside.write_text(features.model_dump_json(), "utf-8")
    export(
        out / "model.pt",
        to="onnx",
        out=out / BUNDLE,
        feature_file=out / FEATURES,
        force=True,
        console=console,
    )


def _send(options: DemoOptions, series: Series, console: Console) -> None:
    content = BytesIO()
    np.save(content, series.ids)
    path = options.out / SERIES
    with replacing_file(path) as aside:
        aside.write_bytes(content.getvalue())
    with serving(options.out / BUNDLE, options.out / "server.log") as port:
        console.print(f"Serving on http://{HOST}:{port}; posting {escape(str(path))} to /infer")
        answer = ask_features(port, content.getvalue(), evidence=_EVIDENCE)
    table = Table.grid(padding=(0, 2))
    for name, text in answer_rows(answer, series):
        table.add_row(name, text)
    console.print("\nThe server's answer")
    console.print(table)


def answer_rows(answer: dict[str, Any], series: Series) -> list[tuple[str, str]]:
    """Return the server's answer for a series beside the truth."""
    is_right = answer["label"] == series.label
    verdict = "[green]right[/]" if is_right else f"[red]wrong[/], it is {series.label}"
    scores = sorted(answer["scores"].items(), key=lambda item: -item[1])
    rows = [
        ("label", f"[bold]{answer['label']}[/] ({verdict})"),
        ("scores", ", ".join(f"{name} {score:.3f}" for name, score in scores)),
    ]
    for span in (answer.get("evidence") or {"spans": []})["spans"]:
        steps = f"steps {span['start_token']:,} to {span['end_token'] - 1:,}"
        rows.append(("evidence", f"{span['contribution']:+.2f} {steps}"))
    rows.append(("tokens", f"{answer['tokens_used']:,} used of {answer['tokens_total']:,}"))
    inference = answer["timings"]["inference_seconds"]
    return [*rows, ("inference", f"{inference * 1000:,.1f} ms")]
