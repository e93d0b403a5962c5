"""The ``aftserve`` command."""

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from aftexport import __version__
from aftexport.errors import AftexportError
from aftexport.report import accept_any_terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves a bundle until it is told to stop; returns the exit status."""
    options = _parser().parse_args(arguments)
    accept_any_terminal()
    errors = Console(stderr=True, soft_wrap=True)
    try:
        return _serve(options)
    except AftexportError as error:
        errors.print(f"[bold red]error:[/] {escape(error.problem)}\n  {escape(error.remedy)}")
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "uvicorn"):
            raise
        errors.print(
            f"[bold red]error:[/] The server needs {error.name}, which is not installed.\n"
            "  Run: pip install 'aftexport\\[serve]'"
        )
        return 2


def _serve(options: argparse.Namespace) -> int:
    import uvicorn

    from aftexport.bundle import Bundle
    from aftexport.choice import choose
    from aftexport.engines.onnxruntime import operator_paths
    from aftexport.report import operator_table, stage
    from aftserve.app import create_app
    from aftserve.classifier import Classifier

    console = Console()
    with stage(console, f"Checking {options.bundle}"):
        bundle = Bundle.open(options.bundle)
    # Apart from the stage below: building an engine shows its own progress.
    choice = choose(
        bundle, options.engine, threads=options.threads, arena=options.arena, console=console
    )
    console.print(f"Engine: {escape(choice.reason)}", soft_wrap=True)
    limits = [limit for limit in (choice.max_tokens, options.max_tokens) if limit is not None]
    with stage(console, "Loading the model"):
        classifier = Classifier(bundle, choice.engine, max_tokens=min(limits, default=None))
        # The first run allocates and picks kernels; no request should wait for that.
        classifier.classify([0])
    if choice.engine.name == "onnxruntime":
        paths = operator_paths(bundle.model_path)
        console.print(operator_table(bundle.manifest.operators, paths))
    # uvicorn hands the signal on once it has shut down; being told to stop is no failure.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    uvicorn.run(create_app(classifier), host=options.host, port=options.port, log_level="info")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aftserve",
        description="Serve a bundle over HTTP: POST /infer, GET /healthz, /readyz, /docs.",
        epilog="Exit status: 0 stopped on request; 2 the bundle or an option cannot be used.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="a folder that aftexport wrote")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=_port, default=8000, help="port to listen on (default: 8000)")
    add("--engine", default="auto", choices=["auto", "onnxruntime", "tensorrt"],
        help="auto: TensorRT where the bundle has an engine and the machine its GPU. An engine "
        "is a program: serve bundles you trust (default: auto)")  # fmt: skip
    add("--threads", type=_positive, default=0, metavar="N",
        help="threads of the engine (default: one for each core)")  # fmt: skip
    add("--arena", action="store_true",
        help="keep the memory of the longest document so far for the next one "
        "(default: give it back after each)")  # fmt: skip
    add("--max-tokens", type=_positive, metavar="N",
        help="refuse longer documents (default: the model's own limit)")  # fmt: skip
    add("--version", action="version", version=f"aftserve {__version__}")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{text} is no port")
    return value
