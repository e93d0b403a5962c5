"""The jobs of the benchmark: train a model, export it, answer through its bundle, judge."""

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from aftexport.bench.timing import peak_mib, sample
from aftserve.predictor import Predictor
from benchmarks.documents import debian
from benchmarks.documents.compose import WINDOW, Document, Task, draw_many, make_tasks, windows_of
from benchmarks.documents.contenders import (
    BAG,
    MAX_PARTS,
    MAX_SOFTMAX,
    PARTS,
    POOLINGS,
    SOFTMAX,
    TITLES,
    WINDOWS,
    Answers,
    Bundle,
    answers_of,
    config_of,
    fit_bag,
    recipe_of,
    write_bundle,
)
from benchmarks.documents.measures import make_judge
from benchmarks.documents.texts import FOLDER, PACKAGE, Data, build_data, download
from benchmarks.record import Refusals, Row, start
from train_whole_documents import Recipe, train

LENGTHS = (512, 2_048, 8_192, 32_768, 131_072)
TOKENS_OF_A_LENGTH = 1 << 20
"""The tokens of the test documents of one length, which are at most ``MAX_DOCUMENTS``."""
MAX_DOCUMENTS = 96
VALIDATION = {512: 64, 2_048: 64, 8_192: 32, 32_768: 8}
"""The documents of the validation by length: for thresholds, aggregation and calibration."""
CHECKED = {256: 32, 1_024: 16, 4_096: 8}
"""The documents of the validation that choose the best weights."""
SERVED, DEBIAN = "served", "debian"
"""The names of the rows with times and memory, and of those of Debian's files."""
_TEST, _VALID, _CHECK = 1, 2, 3


@dataclass(frozen=True)
class Job:
    """A model to train for a task."""

    task: str
    model: str
    seed: int
    recipe: Recipe
    pooling: str
    lengths: tuple[int, ...]

    @property
    def bundle(self) -> Path:
        """The folder of the model's bundle."""
        return FOLDER / "bundles" / f"{self.task}-{self.model}-{self.seed}"


def run(options: argparse.Namespace, console: Console) -> list[Row]:
    """Run the jobs that ``options`` name; write a record after each job and return its rows."""
    recipe = Recipe(seconds=options.seconds)
    lengths = tuple(sorted(options.tokens))
    jobs = [
        Job(task, model, seed, recipe_of(model, recipe), options.pooling or POOLINGS[task], lengths)
        for seed in range(options.seeds)
        for task in options.task
        for model in options.model
        if seed == 0 or model not in PARTS
    ]
    facts = {name: {"title": title} for name, title in TITLES.items()}
    out = start("documents", options, facts, options.seeds)
    command = " ".join(["python", "-m", "benchmarks.documents", *sys.argv[1:]])
    refusals, rows = Refusals(), list[Row]()
    further = {"package": PACKAGE, "recipe": asdict(recipe), "commands": [command]}
    if not debian.FOLDER.exists():
        refusals.left_out.append(f"Debian's files: {debian.FOLDER} is absent")
    console.print("Reading, splitting and encoding the texts")
    data = build_data(options.package or download(), options.families, options.texts)
    for job, measured in _in_processes(jobs, data, options.processes):
        rows += measured
        console.print(f"{job.task}, {job.model}, seed {job.seed}: {_short(measured)}")
        out.write(rows, refusals, **further)
    for job in jobs:
        if (job.task, job.seed) == (options.task[0], 0) and job.model not in (BAG, *PARTS):
            rows += _alone(measure_served, job, data, options.threads)
            out.write(rows, refusals, **further)
    console.print(f"Rows in {out.path}")
    refusals.show(console)
    return rows


def _in_processes(
    jobs: Sequence[Job], data: Data, processes: int
) -> Iterator[tuple[Job, list[Row]]]:
    """Yield the rows of each job, which has one thread of a process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_keep, initargs=(data,)) as pool:
        yield from zip(jobs, pool.map(_run_kept, jobs), strict=True)


_kept: list[Data] = []


def _keep(data: Data) -> None:
    torch.set_num_threads(1)
    _kept.append(data)


def _run_kept(job: Job) -> list[Row]:
    return run_job(job, _kept[0])


def _alone(function: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
    """Run a function in a process of its own, whose memory is measured."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


def run_job(job: Job, data: Data) -> list[Row]:
    """Train, export and judge a model; return a row for each contender and length."""
    task = make_tasks(data.labels)[job.task]
    valid = data.parts["valid"]
    counts = {n: count for n, count in VALIDATION.items() if n <= max(lengths_of(job))}
    validation = _joined(draw_many(task, valid, counts, _VALID))
    draw = partial(task.draw, data.parts["train"])
    vocabulary = data.tokenizer.get_vocab_size()
    if job.model == BAG:
        answers = fit_bag(draw, job.recipe, vocabulary, job.seed)
        return _judge(job, data, task, answers, validation)
    counts = {WINDOW: 64} if job.model == WINDOWS else CHECKED
    checks = _joined(draw_many(task, valid, counts, _CHECK))
    config = config_of(job.model, job.pooling, task, vocabulary)
    trained = train(config, draw, checks, job.recipe, job.seed)
    write_bundle(trained, task, job.bundle)
    with Predictor(job.bundle, threads=1) as predictor:
        answers = answers_of(job.model, Bundle(predictor, task), validation)
        rows = _judge(job, data, task, answers, validation)
    return [row | {"steps": trained.steps, "trained_tokens": trained.tokens} for row in rows]


def _judge(
    job: Job, data: Data, task: Task, answers: Answers, validation: list[Document]
) -> list[Row]:
    """Return the rows of a model's contenders, of the test documents and of Debian's files."""
    scores = answers(validation)
    judges = {name: make_judge(task, own, validation) for name, own in scores.items()}
    counts = {n: test_count(n) for n in lengths_of(job)}
    groups = [
        (job.task, tokens, documents)
        for tokens, documents in draw_many(task, data.parts["test"], counts, _TEST).items()
    ]
    if job.task == "contains" and job.model != SOFTMAX:
        files = debian.read_files(data.tokenizer, data.labels, debian.FOLDER)
        groups += [(DEBIAN, int(median(len(f.ids) for f in files)), files)] if files else []
    rows = []
    for name, tokens, documents in groups:
        for contender, own in answers(documents).items():
            measured = judges[contender].measure(own, documents)
            row = {"mechanism": name, "tokens": tokens, "contender": contender, "seed": job.seed}
            rows.append(row | measured)
    return rows


def lengths_of(job: Job) -> list[int]:
    """Return the lengths of the documents that a model answers."""
    greatest = {SOFTMAX: MAX_SOFTMAX, **dict.fromkeys(PARTS, MAX_PARTS)}.get(job.model)
    return [n for n in job.lengths if greatest is None or n <= greatest]


def test_count(tokens: int) -> int:
    """Return the number of test documents of a length."""
    return min(MAX_DOCUMENTS, max(1, TOKENS_OF_A_LENGTH // tokens))


def measure_served(job: Job, data: Data, threads: int) -> list[Row]:
    """Return the seconds and the memory of a bundle for one document of each length."""
    task, rows = make_tasks(data.labels)[job.task], []
    with Predictor(job.bundle, threads=threads) as predictor:
        bundle = Bundle(predictor, task)
        for tokens, (document,) in draw_many(
            task, data.parts["test"], dict.fromkeys(lengths_of(job), 1), _TEST
        ).items():
            runs = {job.model: [document.ids]}
            if job.model == WINDOWS:
                runs = {"window_max": windows_of(document.ids), "first": [document.ids[:WINDOW]]}
            for contender, ids in runs.items():
                call = partial(bundle.scores, ids)
                call()
                seconds = median(sample({contender: call}, 3)[contender])
                rows.append({
                    "mechanism": SERVED, "tokens": tokens, "contender": contender, "seed": job.seed,
                    "seconds": seconds, "tokens_per_second": tokens / seconds,
                    "peak_mib": peak_mib(call),
                })  # fmt: skip
    return rows


def _joined(documents: dict[int, list[Document]]) -> list[Document]:
    return [each for own in documents.values() for each in own]


def _short(rows: Sequence[Row]) -> str:
    """Return the F1 of each contender by length."""
    return "; ".join(
        f"{row['contender']} {row['mechanism']} {row['tokens']:,} {row['f1']:.2f}" for row in rows
    )
