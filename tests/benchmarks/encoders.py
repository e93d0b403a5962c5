"""Encoders of transformers in the shapes of ModernBERT-base and BERT-base, by every contender.

A contender has a process of its own, so that no threads or memory of another disturb it. The
contenders take turns, once in each round. All run one document without padding.
"""

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from aftexport.bench.timing import peak_mib, sample
from benchmarks import setup
from benchmarks.contenders import ENCODERS as CONTENDERS
from benchmarks.contenders import MISSING
from benchmarks.limits import in_billions, interleave, register_rates
from benchmarks.model import relative_error, try_contender
from benchmarks.processor import read_processor
from benchmarks.record import Refusals, Row, start
from benchmarks.task import CALIBRATION_DOCUMENTS, VOCABULARY, Model, Task
from benchmarks.workloads import SOFTMAX, Workload

LENGTHS = (128, 512, 2_048, 8_192)
_LABELS, _CALIBRATION_TOKENS = 10, 256
_CALLS = 3
"""The calls of a contender in one round, after a call that is not timed."""
_PROGRAM, _STANDARD, _MODEL, _EXPECTED = "program.pt2", "standard.onnx", "model", "expected-{}.npy"


@dataclass(frozen=True)
class Shape:
    """The sizes of an encoder of the library, and its class."""

    stem: str  # the start of the names of its classes
    layers: int
    settings: Mapping[str, Any]
    dim: int = 768

    def build(self, layers: int) -> Any:
        """Return the classifier with random weights."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{self.stem}Config")(
            vocab_size=VOCABULARY, hidden_size=self.dim, num_attention_heads=12,
            num_hidden_layers=layers, num_labels=_LABELS, max_position_embeddings=LENGTHS[-1],
            pad_token_id=0, **self.settings,
        )  # fmt: skip
        return getattr(transformers, f"{self.stem}ForSequenceClassification")(config).eval()


_IDS = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
SHAPES = {
    "modernbert": Shape("ModernBert", 22, {"intermediate_size": 1_152, **_IDS}),
    "bert": Shape("Bert", 12, {"intermediate_size": 3_072}),
}


class _Encoder(nn.Module):
    """A classifier of the library for documents without padding, as its users call it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids).logits
        return logits


@dataclass(frozen=True, eq=False)
class EncoderModel(Model):
    """An encoder, whose graphs are files of a folder."""

    folder: Path

    def graph(self, precision: str = "fp32") -> onnx.ModelProto:
        """Return the graph of our bundle."""
        return onnx.load(self.folder / precision / "model.onnx")

    @cached_property
    def standard_graph(self) -> onnx.ModelProto:
        """The graph that PyTorch's own exporter writes."""
        return onnx.load(self.folder / _STANDARD)

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The captured program, for every length."""
        return torch.export.load(self.folder / _PROGRAM)

    def calibration(self) -> list[dict[str, NDArray[np.int64]]]:
        """Return documents on which a contender finds the ranges of activations."""
        random = np.random.default_rng(1)
        shape = (CALIBRATION_DOCUMENTS, 1, _CALIBRATION_TOKENS)
        return [{"input_ids": ids} for ids in random.integers(1, VOCABULARY, shape)]


def run(options: argparse.Namespace, console: Console) -> None:
    """Time the encoders that ``options`` name; write a record after each length."""
    rounds = options.rounds or 3
    names = [*(options.contender or CONTENDERS)]
    refusals = Refusals(left_out=[f"{name}: {reason}" for name, reason in MISSING.items()])
    out = start("encoders", options, {n: CONTENDERS[n].facts for n in names}, rounds)
    limits = register_rates(options.threads)
    rows: list[Row] = []
    for name in options.shape or SHAPES:
        layers = options.layers or SHAPES[name].layers
        with tempfile.TemporaryDirectory() as folder:
            places = _Places(Path(folder), name, layers, options.threads)
            for precision in ("standard", *_own_precisions(names)):
                console.print(f"{name}, {layers} layers: writing {precision}")
                _alone(_write, places, precision)
            for tokens in sorted(options.tokens or LENGTHS):
                console.print(f"{name}, {tokens:,} tokens")
                seconds = interleave({kind: rate.run for kind, rate in limits.items()}, rounds)
                shared = {"limits": in_billions(limits, seconds)}
                measured = _take_turns(places, names, tokens, rounds, refusals)
                rows += [row | shared for row in measured]
                out.write(rows, refusals)
    console.print(_table(rows))
    console.print(f"{read_processor().title}, {options.threads} threads; rows in {out.path}")
    refusals.show(console)


@dataclass(frozen=True)
class _Places:
    """The folder of an encoder's files, and its sizes."""

    folder: Path
    shape: str
    layers: int
    threads: int


def _own_precisions(names: Sequence[str]) -> list[str]:
    return [CONTENDERS[name].precision for name in names if CONTENDERS[name].is_ours]


def _write(places: _Places, precision: str) -> None:
    """Write our bundle of a precision; for ``standard`` the model and the files of the peers."""
    from aftexport.pipeline.export import export

    source = places.folder / _MODEL
    if precision != "standard":
        export(source, out=places.folder / precision, precision=precision, check_parity=False)
        return
    model = SHAPES[places.shape].build(places.layers)
    model.save_pretrained(source)
    axes = {"input_ids": {1: torch.export.Dim("tokens", min=2, max=LENGTHS[-1])}}
    example = torch.ones(1, _CALIBRATION_TOKENS, dtype=torch.int64)
    program = torch.export.export(_Encoder(model), (example,), dynamic_shapes=axes)
    torch.export.save(program, places.folder / _PROGRAM)
    exported = torch.onnx.export(program, dynamo=True, output_names=["logits"], verbose=False)
    assert exported is not None
    exported.save(places.folder / _STANDARD)


def _take_turns(
    places: _Places, names: Sequence[str], tokens: int, rounds: int, refusals: Refusals
) -> list[Row]:
    """Return a row for each contender that can run a document of this length."""
    rows: dict[str, Row] = {}
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in [name for name in names if name in times]:
            row, reason = _alone(_measure, places, name, tokens)
            if row is None:
                refusals.add(places.shape, tokens, name, reason)
                del times[name]
            else:
                times[name] += row["seconds"]
                rows.setdefault(name, row)
    return [rows[name] | {"seconds": median(times[name])} for name in times]


def _measure(places: _Places, name: str, tokens: int) -> tuple[Row | None, str]:
    """Return the row of a contender with the seconds of each call, or None and the reason."""
    setup.prepare(places.threads)
    contender = CONTENDERS[name]
    task = _task(places, tokens, is_ours=contender.is_ours)
    made, reason = try_contender(contender, task, places.threads)
    if made is None:
        return None, reason
    prepared, output = made
    seconds = sample({name: prepared.run}, _CALLS)[name]
    prepared.release()
    return {
        "mechanism": places.shape,
        "layers": places.layers,
        "tokens": tokens,
        "contender": name,
        "seconds": seconds,
        "peak_mib": peak_mib(prepared.run),
        "error_float32": relative_error(output, _expected(places, task)),
    }, ""


def _task(places: _Places, tokens: int, *, is_ours: bool) -> Task:
    """Return the model and a document; only our graph has lengths as an input."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(places.folder / _MODEL).eval()
    generator = torch.Generator().manual_seed(tokens)
    inputs = {"input_ids": torch.randint(1, VOCABULARY, (1, tokens), generator=generator)}
    if is_ours:
        inputs["lengths"] = torch.tensor([tokens])
    workload = Workload(SOFTMAX, 1, tokens, SHAPES[places.shape].dim)
    return Task(workload, EncoderModel(_Encoder(model), places.folder), inputs)


def _expected(places: _Places, task: Task) -> NDArray[np.float32]:
    """Return PyTorch's logits in float32, which the first contender of a length computes."""
    path = places.folder / _EXPECTED.format(task.workload.tokens)
    if not path.exists():
        with torch.inference_mode():
            np.save(path, task.model.module(task.inputs["input_ids"]).numpy())
    expected: NDArray[np.float32] = np.load(path)
    return expected


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a process of its own; a process that is killed gives a reason."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            if function is not _measure:
                raise
            return None, "cannot run: its process was killed, as for lack of memory"


def _table(rows: Sequence[Row]) -> Table:
    """Return the rows as a table for the console."""
    shown = ("mechanism", "tokens", "contender", "seconds", "peak_mib", "error_float32")
    table = Table(*shown)
    for row in rows:
        table.add_row(
            *(f"{v:.3g}" if isinstance(v, float) else str(v) for v in map(row.get, shown))
        )
    return table
