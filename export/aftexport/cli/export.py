"""``aftexport MODEL --to ...``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from aftexport._version import __version__
from aftexport.cli import triton
from aftexport.cli.options import add_loading_options
from aftexport.console import escape
from aftexport.system.arguments import lengths, make_parser, positive
from aftexport.system.gc import collection_paused

if TYPE_CHECKING:
    from aftexport.bundle.bundle import Bundle

_EPILOG = """\
A model file may be
  a checkpoint written by aftexport.save,
  a state dict (.pt, .safetensors), bare or in a training checkpoint, with
    --factory package.module:factory,
  a torch.export program (.pt2),
  a folder of config.json and model.safetensors,
  a pickled module, bare or under "model" in a dict, only with --allow-pickle: it
    runs whatever code it holds.
Without a file, --factory alone exports the module as its factory returns it.

Subcommands (aftexport COMMAND --help tells more)
  aftexport verify BUNDLE             compare a bundle with PyTorch's outputs again
  aftexport inspect BUNDLE|MODEL      what it holds, and which path each operator takes
  aftexport build BUNDLE              build its TensorRT engine for this machine
  aftexport bench BUNDLE              time it: by length, by stage, against PyTorch
  aftexport fuse IN.onnx OUT.onnx     make operators of the linear attention in any model
  aftexport demo                      train a small model, export it, serve it, ask it

Exit status: 0 done; 1 parity outside tolerance; 2 bad input, 130 interrupted and
143 terminated, nothing written.
"""


def run(words: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = make_parser(
        "aftexport",
        "Export a linear-attention model to a verified bundle.",
        _EPILOG,
    )
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="the model file or folder")
    add("--to", required=True, choices=["onnx", "trt", "trt-rtx", "triton"],
        help="trt: and a TensorRT engine, built on the GPU that is to run it; trt-rtx: and a "
        "portable one, built here, GPU or not; triton: no bundle but a model repository of "
        "Triton, of a model or of a bundle")  # fmt: skip
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="the bundle's folder (default: MODEL.bundle); the repository (MODEL.triton)",
    )
    add("--precision", default="fp32", choices=["fp32", "fp16", "bf16", "int8", "auto"],
        help="fp16: weights and activations; bf16, int8: the products of the fused encoder "
        "kernels, but with an engine bf16 of weights and activations; sums stay wide; "
        "auto: of each of those products the cheapest of int8, bf16 and fp32 that holds "
        "--tolerance, measured here; weights and activations stay fp32, for fp16 is "
        "of a whole model (default: fp32)")  # fmt: skip
    add("--tolerance", type=float, metavar="X",
        help="with --precision auto: on the model's error (default: that of fp32)")  # fmt: skip
    add("--max-length", type=int, metavar="N", help="most tokens of a document")
    add("--vocab-size", type=positive, metavar="N",
        help="token ids are below N (default: the rows of the model's embedding)")  # fmt: skip
    add("--opset", type=int, default=20, metavar="N", help="ONNX opset, 18 to 25 (default: 20)")
    add("--no-batching", action="store_true", help="give each document a run of its own, for a "
        "model that computes over the whole batch")  # fmt: skip
    add("--no-verify", action="store_true", help="do not compare with PyTorch")
    add(
        "--force",
        action="store_true",
        help="replace a bundle, or a model in a repository, that is there",
    )
    add_loading_options(parser)
    _add_engine_options(parser)
    triton.add_options(parser)
    add("--labels", metavar="A,B,...", help="class names, where the file has none")
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, where the file has none")
    add("--version", action="version", version=f"aftexport {__version__}")
    options = parser.parse_args(words)

    from aftexport.engines.tensorrt.settings import EngineOptions

    path = options.model
    if path is None and options.factory is None:
        parser.error("a model file, or --factory PACKAGE.MODULE:FACTORY, is required")
    engine = EngineOptions(
        min_length=options.min_length,
        opt_lengths=tuple(options.opt_length),
        max_batch=options.max_batch,
        workspace_mib=options.workspace,
        compute_capabilities=tuple(options.compute_capability),
    )

    def write(**place: Any) -> "Bundle":
        with collection_paused():
            from aftexport.pipeline.export import export  # takes torch, which a bundle does not

        return export(
            path,
            precision=options.precision,
            tolerance=options.tolerance,
            max_length=options.max_length,
            vocab_size=options.vocab_size,
            timing_cache=options.timing_cache,
            opset=options.opset,
            check_parity=not options.no_verify,
            batching=not options.no_batching,
            factory=options.factory,
            allow_pickle=options.allow_pickle,
            labels=[name.strip() for name in options.labels.split(",")]
            if options.labels is not None
            else None,
            tokenizer=options.tokenizer,
            **place,
        )

    if options.to == "triton":
        return triton.write(parser, options, path, engine, write)
    triton.check_absent(parser, options)
    bundle = write(to=options.to, out=options.out, engine=engine, force=options.force)
    Console(emoji=False).print(f"Bundle: [bold]{escape(str(bundle.path))}[/]", soft_wrap=True)
    return 0


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("of an engine").add_argument
    add("--min-length", type=positive, metavar="N", help="fewest tokens (default: 1)")
    add("--opt-length", type=lengths, default=[], metavar="N,...",
        help="lengths to be fast at, a profile for each (default: 2048 or longest)")  # fmt: skip
    add("--max-batch", type=positive, metavar="N", help="most documents at once (default: 8)")
    add("--workspace", type=positive, metavar="MIB", help="most scratch memory of a layer")
    add("--timing-cache", type=Path, metavar="FILE",
        help="kernel timings, read where it exists and written back; trt only")  # fmt: skip
    add("--compute-capability", type=lengths, default=[], metavar="N,...",
        help="the GPUs, 86 for 8.6; trt-rtx only (default: 80,86,89,120)")  # fmt: skip
