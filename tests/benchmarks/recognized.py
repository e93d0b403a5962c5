"""Graphs of other people's layers in ONNX Runtime: fused and as they were, in turn."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import onnx
import torch
from export.recognition import layer as sizes
from export.recognition.graphs import BATCH, TOKENS, fused, operators, scripted
from plugins.runner import session_of
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from aftexport.bench.timing import Run, sample
from aftexport.parity import TOLERANCES
from benchmarks.processor import read_processor
from benchmarks.record import write_record

HEADS = 4
RANDOM_FEATURES = 256
SESSIONS = 6
"""The times that both graphs are loaded: the place of memory changes the time by up to 10 %."""
CONTENDERS: dict[str, str] = {}
"""There is one: the graph before."""
SEQUENCES = {
    "Performer, FAVOR+ (einsum)": "performer_softmax_einsum",
    "Performer, FAVOR+ (matmul)": "performer_softmax_matmul",
    "Performer, relu features": "performer_relu_matmul",
    "cosFormer, features side by side": "cosformer_concatenated",
    "cosFormer, two products": "cosformer_two_products",
    "FLatten (einsum)": "focused_einsum",
    "FLatten (matmul)": "focused_matmul",
    "LoFTR, self-attention": "linear_einsum",
    "LoFTR, cross-attention": "cross_matching_matmul",
    "LoFTR, cross-attention with masks": "cross_matching_einsum",
    "cross-attention of other widths": "cross_narrow_matching_matmul",
    "efficient cross-attention": "cross_efficient_matmul",
    "SANA": "linear_padded_tokens_last",
    "SANA, rotary numerator": "rotary_above_matmul",
    "MobileViTv2": "separable_matmul",
    "shared keys (GQA)": "linear_shared_keys_matmul",
    "clamped normalizer": "linear_clamped_matmul",
    "no normalizer": "linear_unnormalized_matmul",
    "AFT-simple with an eps": "simple_with_eps",
    "AFT-full with an eps": "full_with_eps",
    "AFT-local with an eps": "local_with_eps",
}
"""The names of layers of sequences in the tests of recognition, by title."""
IMAGES = {
    "latent diffusion, one head": ("softmax_of_keys_matmul", 1),
    "latent diffusion, four heads": ("softmax_of_keys_matmul", 4),
    "image attention": ("softmax_of_both_matmul", 4),
    "image attention, depthwise": ("softmax_of_both_depthwise", 4),
    "EfficientViT": ("relu_of_both", 4),
    "EfficientViT, depthwise": ("relu_of_both_depthwise", 4),
}
"""The names of layers of images and their heads, by title."""


@dataclass(frozen=True)
class Form:
    """A layer of one form, an input for the export with its dynamic axes, and one to time."""

    title: str
    module: nn.Module
    example: Tensor
    axes: Any
    x: Tensor


def forms(dim: int, tokens: int) -> list[Form]:
    """Return every form at one size."""
    sizes.DIM, sizes.HEADS, sizes.TOKENS = dim, HEADS, tokens
    # These modules read the sizes when they are imported.
    from export.recognition.implementations import aft, feature_products, images, linear_attention

    feature_products.RANDOM_FEATURES = RANDOM_FEATURES
    torch.manual_seed(0)
    layers: dict[str, tuple[str, nn.Module]] = {}
    for module in (aft, feature_products, linear_attention):
        layers |= module.layers()
    pictures = {
        title: images.layers(images.Size(dim, heads, dim // heads))[name][1]
        for title, (name, heads) in IMAGES.items()
    }
    side = round(tokens**0.5)
    sequence, image = torch.randn(1, tokens, dim), torch.randn(1, dim, side, side)
    small, axes = torch.randn(2, dim, 4, 6), {0: "batch", 2: "height", 3: "width"}
    found = [
        Form(title, layers[name][1], torch.randn(2, 12, dim), (BATCH, TOKENS), sequence)
        for title, name in SEQUENCES.items()
    ]
    return found + [Form(title, module, small, axes, image) for title, module in pictures.items()]


def run(options: argparse.Namespace, console: Console) -> None:
    """Time every form, and write the ratios."""
    rounds, (tokens, *_) = options.rounds or 7, options.tokens or [4096]
    rows = [
        measure(form, options.threads, rounds)
        for form in track(forms(options.dim, tokens), "Recognized", console=console)
    ]
    out = options.out or Path("build/bench_recognized.json")
    write_record({"tokens": tokens, "dim": options.dim, "rows": rows}, out)
    table = Table("form", "operators", "before, ms", "fused, ms", "times as fast", "quartiles")
    for row in rows:
        low, high = row["quartiles"]
        table.add_row(
            row["form"], ", ".join(row["operators"]) or "left alone", f"{row['before'] * 1e3:.1f}",
            f"{row['fused'] * 1e3:.1f}", f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(f"{read_processor().title}, {options.threads} threads, {tokens} tokens; {out}")


def measure(form: Form, threads: int, rounds: int) -> dict[str, Any]:
    """Return the medians of processor time, and that of the ratios of each round.

    Raises:
        ArithmeticError: if the fused graph computes other numbers.
    """
    original = scripted(form.module, form.example, axes=form.axes)
    found, changed = fused(original)
    models = {"before": original, "fused": changed if found.has_changes else original}
    expected, output = (np.asarray(call_of(m, form.x, threads)()) for m in models.values())
    error = float(np.abs(output - expected).max() / max(1.0, np.abs(expected).max()))
    if not error < TOLERANCES["fp32"].bound:
        raise ArithmeticError(f"{form.title}: the fused graph is {error:.1e} off")
    seconds: dict[str, list[float]] = {name: [] for name in models}
    ratios: list[float] = []
    for turn in range(SESSIONS):
        order = list(models) if turn % 2 else list(models)[::-1]
        runs = {name: call_of(models[name], form.x, threads) for name in order}
        # Other programs on the machine change processor time little.
        taken = sample(runs, rounds, clock=process_time)
        for name in models:
            seconds[name] += taken[name]
        # A slow contender has fewer rounds, which are the first ones.
        pairs = zip(taken["before"], taken["fused"], strict=False)
        ratios += [own / other for own, other in pairs]
    return {
        "form": form.title,
        "operators": operators(found),
        "notes": [m.note for m in found.matches] + [m.reason for m in found.near_misses],
        **{name: median(taken) for name, taken in seconds.items()},
        "ratio": median(ratios),
        "quartiles": list(np.percentile(ratios, (25, 75))),
    }


def call_of(model: onnx.ModelProto, x: Tensor, threads: int) -> Run:
    """Return a call of a model with the operators of our library, which ran once."""
    session = session_of(model, threads)
    feeds = {session.get_inputs()[0].name: x.numpy()}
    session.run(None, feeds)  # the first run allocates
    return lambda: session.run(None, feeds)[0]
