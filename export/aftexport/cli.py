"""The ``aftexport`` command."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from aftexport import __version__
from aftexport.errors import AftexportError
from aftexport.report import accept_any_terminal

_EXPORT_EPILOG = """\
A model file may be
  a checkpoint written by aftexport.save,
  a bare state dict (.pt, .safetensors), with --model package.module:factory,
  a torch.export program (.pt2),
  a folder of config.json and model.safetensors,
  a pickled module, only with --allow-pickle: it runs whatever code it holds.

Subcommands (aftexport COMMAND --help tells more)
  aftexport verify BUNDLE             compare a bundle with PyTorch's outputs again
  aftexport inspect BUNDLE|MODEL      what it holds, and which path each operator takes
  aftexport build BUNDLE              build its TensorRT engine for this machine
  aftexport bench BUNDLE              time it: by length, by stage, against PyTorch
  aftexport demo                      train a small model, export it, serve it, ask it

Exit status: 0 done; 1 parity outside tolerance; 2 bad input, nothing written.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = {
        "verify": _verify,
        "inspect": _inspect,
        "build": _build,
        "bench": _bench,
        "demo": _demo,
    }
    accept_any_terminal()
    errors = Console(stderr=True, soft_wrap=True)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: errors.print(
                f"[yellow]warning:[/] {escape(str(message))}"
            )
            if words and words[0] in commands:
                return commands[words[0]](words[1:])
            return _export(words)
    except AftexportError as error:
        errors.print(f"[bold red]error:[/] {escape(error.problem)}\n  {escape(error.remedy)}")
        return error.exit_code
    except OSError as error:
        place = escape(str(error.filename or "the disk"))
        errors.print(f"[bold red]error:[/] {place}: {error.strerror}.\n  Check the path.")
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "onnxscript", "scipy", "sklearn"):
            raise
        extra = "demo" if error.name in ("scipy", "sklearn") else "torch"
        errors.print(
            f"[bold red]error:[/] This needs {error.name}, which is not installed.\n"
            f"  Run: pip install 'aftexport\\[{extra}]'"
        )
        return 2
    except KeyboardInterrupt:
        errors.print("interrupted; no bundle was written")
        return 130


def _parser(name: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=name,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_loading_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        dest="factory",
        metavar="PACKAGE.MODULE:FACTORY",
        help="a callable without arguments that returns the module of a state dict",
    )
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="load a pickled module; only for files you trust",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("of an engine").add_argument
    add("--min-length", type=_positive, metavar="N", help="fewest tokens (default: 1)")
    add("--opt-length", type=_lengths, default=[], metavar="N,...",
        help="lengths to be fast at, a profile for each (default: 2048 or longest)")  # fmt: skip
    add("--max-batch", type=_positive, metavar="N", help="most documents at once (default: 8)")
    add("--workspace", type=_positive, metavar="MIB", help="most scratch memory of a layer")
    add("--timing-cache", type=Path, metavar="FILE",
        help="kernel timings, read where it exists and written back; trt only")  # fmt: skip
    add("--compute-capability", type=_lengths, default=[], metavar="N,...",
        help="the GPUs, 86 for 8.6; trt-rtx only (default: 80,86,89,120)")  # fmt: skip


def _export(words: list[str]) -> int:
    parser = _parser(
        "aftexport",
        "Export a linear-attention model to a verified bundle.",
        _EXPORT_EPILOG,
    )
    add = parser.add_argument
    add("model", type=Path, help="the model file or folder")
    add("--to", required=True, choices=["onnx", "trt", "trt-rtx"],
        help="trt: and a TensorRT engine, built on the GPU that is to run it; trt-rtx: and a "
        "portable one, built here, GPU or not")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="the bundle's folder (default: MODEL.bundle)")
    add("--precision", default="fp32", choices=["fp32", "fp16", "bf16", "int8"],
        help="fp16: weights and activations; bf16, int8: the products of the fused encoder "
        "kernels, but with an engine bf16 of weights and activations; sums stay wide "
        "(default: fp32)")  # fmt: skip
    add("--max-length", type=int, metavar="N", help="most tokens of a document")
    add("--opset", type=int, default=20, metavar="N", help="ONNX opset, 18 to 25 (default: 20)")
    add("--no-verify", action="store_true", help="do not compare with PyTorch")
    add("--force", action="store_true", help="replace a bundle that is there")
    _add_loading_options(parser)
    _add_engine_options(parser)
    add("--labels", metavar="A,B,...", help="class names, where the file has none")
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, where the file has none")
    add("--version", action="version", version=f"aftexport {__version__}")
    options = parser.parse_args(words)

    from aftexport.engines.settings import EngineOptions
    from aftexport.exporter import export

    export(
        options.model,
        to=options.to,
        out=options.out,
        precision=options.precision,
        max_length=options.max_length,
        engine=EngineOptions(
            min_length=options.min_length,
            opt_lengths=tuple(options.opt_length),
            max_batch=options.max_batch,
            workspace_mib=options.workspace,
            compute_capabilities=tuple(options.compute_capability),
        ),
        timing_cache=options.timing_cache,
        opset=options.opset,
        check_parity=not options.no_verify,
        force=options.force,
        factory=options.factory,
        allow_pickle=options.allow_pickle,
        labels=options.labels.split(",") if options.labels is not None else None,
        tokenizer=options.tokenizer,
    )
    return 0


def _verify(words: list[str]) -> int:
    parser = _parser(
        "aftexport verify",
        "Compare a bundle with the PyTorch outputs stored in it. Needs no torch.",
        "Exit status: 0 within tolerance; 1 outside; 2 could not run.",
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument(
        "--portable", action="store_true", help="use the portable bodies, not the fused kernels"
    )
    parser.add_argument(
        "--provider",
        choices=["cpu", "cuda"],
        default="cpu",
        help="ONNX Runtime's execution provider",
    )
    options = parser.parse_args(words)

    from aftexport.bundle import Bundle
    from aftexport.report import parity_table, stage
    from aftexport.verification import verify

    console = Console()
    bundle = Bundle.open(options.bundle)
    with stage(console, f"Checking {options.bundle}"):
        results = verify(bundle, fused=not options.portable, provider=options.provider)
    console.print(parity_table(results))
    return 0 if all(r.passed for r in results) else 1


def _inspect(words: list[str]) -> int:
    parser = _parser(
        "aftexport inspect", "Show what a bundle or a model file holds; nothing is changed."
    )
    parser.add_argument("path", type=Path, metavar="BUNDLE|MODEL")
    _add_loading_options(parser)
    options = parser.parse_args(words)

    from aftexport.bundle import is_bundle
    from aftexport.inspection import show_bundle, show_checkpoint

    if is_bundle(options.path):
        show_bundle(options.path, Console())
    else:
        show_checkpoint(
            options.path,
            Console(),
            factory=options.factory,
            allow_pickle=options.allow_pickle,
        )
    return 0


def _build(words: list[str]) -> int:
    parser = _parser(
        "aftexport build",
        "Build a bundle's TensorRT engine for this machine, unless one is there that fits. "
        "The bundle is left as it is; the engine goes to the cache.",
        "The cache: AFTEXPORT_CACHE, or else aftexport below XDG_CACHE_HOME or ~/.cache.\n"
        "Exit status: 0 it is there; 1 parity outside tolerance; 2 it cannot be built here.",
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--rebuild", action="store_true", help="build it even so")
    parser.add_argument("--timing-cache", type=Path, metavar="FILE", help="see aftexport --help")
    options = parser.parse_args(words)

    from aftexport.build import build
    from aftexport.bundle import Bundle
    from aftexport.report import engine_table, stage

    console = Console()
    with stage(console, f"Checking {options.bundle}"):
        bundle = Bundle.open(options.bundle)
    file = build(
        bundle, rebuild=options.rebuild, timing_cache=options.timing_cache, console=console
    )
    console.print(engine_table(file.read_record()))
    console.print(f"Engine: [bold]{escape(str(file.engine))}[/]", soft_wrap=True)
    return 0


_BENCH_EPILOG = """\
Each length is timed with one document of random tokens. The contenders take turns,
A B C A B C, and the median of each is shown:
  onnxruntime  the bundle as aftserve runs it, with the fused kernels built here
  portable     the same file by the portable bodies alone, in standard operators
  torch        the PyTorch module the bundle was exported from: it needs --model,
               because a bundle does not hold the module

The peak is the memory a call takes over what the process held before it (Linux only).

  aftexport bench model.bundle
  aftexport bench model.bundle --model model.pt --lengths 1024,8192 --threads 2
  aftexport bench model.bundle --against none --json bench.json

Exit status: 0 done; 2 bad input, or an engine failed.
"""


def _bench(words: list[str]) -> int:
    parser = _parser(
        "aftexport bench",
        "Time a bundle on this machine: milliseconds, tokens a second and peak memory by the "
        "length of the document, and which operators take the time.",
        _BENCH_EPILOG,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="a folder that aftexport wrote")
    add("--lengths", type=_lengths, metavar="N,N,...",
        help="tokens of the documents (default: 1024,4096,16384, or fewer)")  # fmt: skip
    add("--engine", default="onnxruntime", choices=["onnxruntime"], help="what runs the bundle")
    add("--threads", type=_positive, default=0, metavar="N",
        help="threads of every contender (default: one for each core)")  # fmt: skip
    add("--rounds", type=_positive, default=5, metavar="N",
        help="timed calls of each; 3 where one takes over 0.1 s (default: 5)")  # fmt: skip
    add("--against", metavar="portable,torch",
        help="or none (default: portable, and torch where --model is given)")  # fmt: skip
    add("--model", type=Path, metavar="MODEL",
        help="the model file or folder the bundle was exported from")  # fmt: skip
    add("--factory", metavar="PACKAGE.MODULE:FACTORY",
        help="a callable that returns the module, where MODEL is a state dict")  # fmt: skip
    add("--allow-pickle", action="store_true",
        help="load a pickled module; only for files you trust")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args(words)

    from aftexport.benchmark import show

    show(
        options.bundle,
        lengths=options.lengths,
        threads=options.threads,
        rounds=options.rounds,
        against=options.against.split(",") if options.against is not None else None,
        model=options.model,
        factory=options.factory,
        allow_pickle=options.allow_pickle,
        json_file=options.json,
        console=Console(),
    )
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _lengths(text: str) -> list[int]:
    return [_positive(word) for word in text.split(",")]


def _demo(words: list[str]) -> int:
    parser = _parser(
        "aftexport demo",
        "Train a small document classifier, export it, check parity, serve it, and classify "
        "a held-out document of more than 10,000 tokens over HTTP.",
    )
    add = parser.add_argument
    add("--mechanism", default="aft_local", help="one of the seven (default: aft_local)")
    add("--data", type=Path, metavar="FILE", help="your documents: .csv or .jsonl with text, label")
    add("--out", type=Path, default=Path("build/demo"), metavar="DIR",
        help="where the results go (default: build/demo)")  # fmt: skip
    add("--seed", type=int, default=0, help="of split, initial weights and training (default: 0)")
    options = parser.parse_args(words)

    from aftexport.demo import run

    run(
        mechanism=options.mechanism,
        data=options.data,
        out=options.out,
        seed=options.seed,
        console=Console(),
    )
    return 0
