"""The command ``aftexport MODEL --to TARGET``."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from aftexport._version import __version__
from aftexport.cli import triton
from aftexport.cli.options import add_loading_options
from aftexport.errors import UsageError
from aftexport.system.arguments import lengths, make_parser, positive
from aftexport.system.console import escape
from aftexport.system.process import collection_paused

if TYPE_CHECKING:
    from aftexport.bundle.bundle import Bundle
    from aftexport.engines.tensorrt.settings import EngineOptions

_EPILOG = """\
A model file is one of these:
  a checkpoint written by aftexport.save
  a state dict (.pt, .safetensors), bare or in a training checkpoint, with
    --factory package.module:factory
  a torch.export program (.pt2)
  a folder with config.json and model.safetensors
  a folder that save_pretrained of the transformers library wrote
  a folder of sentence-transformers, with modules.json
  a plain .onnx file, whose own outputs are the reference
  a pickled module, bare or under "model" in a dict, with --allow-pickle. Loading it
    runs code from the file.
Without a file, --factory exports the module that the factory returns.

Subcommands (see aftexport COMMAND --help):
  aftexport verify BUNDLE             compare a bundle with PyTorch again
  aftexport inspect BUNDLE|MODEL      show its contents and the path of each operator
  aftexport calibrate BUNDLE          fit its probabilities on labelled documents
  aftexport build BUNDLE              build its TensorRT engine for this machine
  aftexport bench BUNDLE              time it by length and operator, against PyTorch
  aftexport fuse IN.onnx OUT.onnx     replace linear attention in any model by operators
  aftexport unfuse BUNDLE OUT.onnx    write a bundle's model in standard operators only
  aftexport demo                      train, export, serve and query a small model

Exit status:
  0    the bundle or the repository was written
  1    parity is outside tolerance
  2    the input is invalid; nothing was written
  130  interrupted; nothing was written
  143  terminated; nothing was written
"""


def run(words: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    options = parser.parse_args(words)
    path = options.model
    if path is None and options.factory is None:
        parser.error("a model file, or --factory PACKAGE.MODULE:FACTORY, is required")
    engine = _engine_options(options)
    if options.to == "triton":
        return triton.write(parser, options, path, engine, partial(_export, options))
    triton.check_absent(parser, options)
    bundle = _export(options, to=options.to, out=options.out, engine=engine, force=options.force)
    Console(emoji=False).print(f"Bundle: [bold]{escape(str(bundle.path))}[/]", soft_wrap=True)
    return 0


def _export(options: argparse.Namespace, **place: Any) -> "Bundle":
    """Export the model to a bundle.

    Args:
        options: the parsed options.
        place: the options of ``export`` that depend on the target.
    """
    with collection_paused():
        from aftexport.pipeline.export import export  # imports torch; a bundle needs no torch

    labels = options.labels
    return export(
        options.model,
        precision=options.precision,
        tolerance=options.tolerance,
        max_length=options.max_length,
        vocab_size=options.vocab_size,
        features=options.features,
        feature_file=options.feature_file,
        inputs=_named(options.input, "--input", "KIND"),
        timing_cache=options.timing_cache,
        opset=options.opset,
        check_parity=not options.no_verify,
        batching=not options.no_batching,
        factory=options.factory,
        allow_pickle=options.allow_pickle,
        trust_remote_code=options.trust_remote_code,
        labels=[name.strip() for name in labels.split(",")] if labels is not None else None,
        task=_task(options.task),
        heads=options.heads,
        tokenizer=options.tokenizer,
        **place,
    )


def _task(given: Sequence[str]) -> str | dict[str, str] | None:
    """Return the task of the only output, or that of each output by its name.

    Raises:
        UsageError: if tasks with and without names are mixed, or an output has two.
    """
    if not given or (len(given) == 1 and "=" not in given[0]):
        return given[0] if given else None
    return _named(given, "--task", "TASK")


def _named(given: Sequence[str], option: str, value: str) -> dict[str, str]:
    """Return the values of an option that is given once for each name, as NAME=VALUE.

    Raises:
        UsageError: if a name is missing, or has two values.
    """
    values: dict[str, str] = {}
    for words in given:
        name, is_named, word = words.partition("=")
        if not is_named or name in values:
            single = (
                f"Give {option} {value} for the only output, or " if value == "TASK" else "Give "
            )
            raise UsageError(
                f"{option} must be given once for each name, as NAME={value}, got {words!r}"
                + (" twice." if is_named else "."),
                f"{single}{option} NAME={value} for each of several.",
            )
        values[name] = word
    return values


def _engine_options(options: argparse.Namespace) -> "EngineOptions":
    from aftexport.engines.tensorrt.settings import EngineOptions

    return EngineOptions(
        min_length=options.min_length,
        opt_lengths=tuple(options.opt_length),
        max_batch=options.max_batch,
        workspace_mib=options.workspace,
        compute_capabilities=tuple(options.compute_capability),
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "aftexport",
        "Export a linear-attention model to a verified bundle.",
        _EPILOG,
    )
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="model file or folder, see below")
    _add_target_options(parser)
    _add_graph_options(parser)
    add_loading_options(parser)
    _add_engine_options(parser)
    triton.add_options(parser)
    _add_head_options(parser)
    add("--tokenizer", metavar="FILE|bytes",
        help="path of a tokenizer.json; or bytes, if the model's ids are the bytes of the text in "
        "UTF-8, 0 to 255 (default: the tokenizer in the model file)")  # fmt: skip
    add("--version", action="version", version=f"aftexport {__version__}")
    return parser


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--to", required=True, choices=["onnx", "trt", "trt-rtx", "triton"],
        help="onnx: a bundle with the ONNX model; trt: also a TensorRT engine, built on the GPU "
        "that will run it; trt-rtx: also a portable TensorRT-RTX engine, built with or without "
        "a GPU; triton: a model repository of Triton instead of a bundle, from a model or a "
        "bundle")  # fmt: skip
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the bundle (default: MODEL.bundle) or of the Triton repository "
        "(default: MODEL.triton)",
    )
    add("--precision", default="fp32", choices=["fp32", "fp16", "bf16", "int8", "auto"],
        help="fp16: 16-bit weights and activations; bf16, int8: only the products of the fused "
        "encoder kernels, but for an engine bf16 weights and activations; auto: for each of "
        "these products the cheapest of int8, bf16 and fp32 within --tolerance, measured here, "
        "with fp32 weights and activations; sums are always float32 or wider "
        "(default: fp32)")  # fmt: skip
    add("--tolerance", type=float, metavar="X",
        help="maximum error of the model with --precision auto (default: that of "
        "fp32)")  # fmt: skip


def _add_graph_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the graph, of its comparison with PyTorch, and of its folder."""
    add = parser.add_argument
    add("--max-length", type=int, metavar="N",
        help="maximum tokens of a document (default: the model's own limit; 16384 for an engine "
        "without one)")  # fmt: skip
    add("--vocab-size", type=positive, metavar="N",
        help="number of token ids (default: the rows of the model's embedding)")  # fmt: skip
    add("--features", type=positive, metavar="N",
        help="number of features of each token, for a model that takes input_features [batch, "
        "tokens, N] instead of token ids (default: num_features of the module or its "
        "config)")  # fmt: skip
    add("--feature-file", type=Path, metavar="FILE",
        help="JSON file with names, mean and scale of the features; the server normalizes values "
        "by (x - mean) / scale")  # fmt: skip
    add("--input", action="append", default=[], metavar="NAME=KIND",
        help="extra input for the parameter NAME of forward; repeat it for several. Of each "
        "document: number, vector:K, category or categories:K; of each token: token_category. A "
        "category may end in :N, for integers below N (default: the rows of the table that looks "
        "them up); a number or vector in :MIN..MAX, for numbers from MIN to MAX")  # fmt: skip
    add("--opset", type=int, metavar="N", help="ONNX opset, 18 to 25 (default: 20)")
    add("--no-batching", action="store_true", help="run each document separately, for a model "
        "that computes over the whole batch")  # fmt: skip
    add("--no-verify", action="store_true", help="do not compare with PyTorch")
    add(
        "--force",
        action="store_true",
        help="replace an existing bundle, or an existing model in a repository",
    )


def _add_head_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", action="append", default=[], metavar="[NAME=]TASK",
        help="task of the only output, or of the output NAME; repeat it for several: "
        "single_label_classification, multi_label_classification, binary_classification, "
        "regression, token_classification or feature_extraction (default: that of the file; the "
        "first for two or more logits of a document)")  # fmt: skip
    add("--labels", metavar="A,B,...",
        help="names of the classes or values of the only output (default: those of the file, or "
        "class_0, class_1, ...)")  # fmt: skip
    add("--heads", type=Path, metavar="FILE",
        help="JSON file of the head of each output, with names, thresholds or units (default: "
        "from --task and --labels)")  # fmt: skip


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine options").add_argument
    add("--min-length", type=positive, metavar="N",
        help="minimum tokens of a document (default: 1)")  # fmt: skip
    add("--opt-length", type=lengths, default=[], metavar="N,...",
        help="lengths to optimize for, one profile for each (default: 2048, within the minimum "
        "and the maximum)")  # fmt: skip
    add("--max-batch", type=positive, metavar="N",
        help="maximum documents in a run (default: 8)")  # fmt: skip
    add("--workspace", type=positive, metavar="MIB",
        help="maximum scratch memory of a layer in MiB (default: TensorRT's own "
        "limit)")  # fmt: skip
    add("--timing-cache", type=Path, metavar="FILE",
        help="file of TensorRT kernel timings, read if it exists and written back; only with "
        "--to trt")  # fmt: skip
    add("--compute-capability", type=lengths, default=[], metavar="N,...",
        help="compute capabilities of the GPUs, 86 for 8.6; only with --to trt-rtx "
        "(default: 80,86,89,120)")  # fmt: skip
