"""The command ``aftexport MODEL|BUNDLE --to triton``."""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from aftexport.errors import ParityError
from aftexport.system.console import escape, stage

if TYPE_CHECKING:
    from aftexport.bundle.bundle import Bundle
    from aftexport.engines.tensorrt.settings import EngineOptions

_OWN = ("name", "mounted")
_OF_A_BUNDLE = {"to", "model", "out", "force", "max_batch", *_OWN}
"""The options that are allowed if the input is a bundle, which needs no export."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a Triton repository."""
    add = parser.add_argument_group("Triton options").add_argument
    add("--name", help="name of the model in the repository (default: the name of the file)")
    add("--mounted", metavar="DIR",
        help="path of the repository on Triton's machine, from which the kernels are loaded "
        "(default: /models)")  # fmt: skip


def check_absent(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with an error if a Triton option was given for another target."""
    if any(getattr(options, name) is not None for name in _OWN):
        parser.error(f"--name and --mounted need --to triton, got --to {options.to}")


def write(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    path: Path | None,
    engine: "EngineOptions",
    export: "Callable[..., Bundle]",
) -> int:
    """Write the repository; return the exit status.

    Args:
        parser: the parser of the options.
        options: the parsed options.
        path: the model file or a bundle; None if there is only a factory.
        engine: the engine options; they do not apply to a repository of a model.
        export: the function that writes the bundle of the model.
    """
    from aftexport.bundle.bundle import Bundle, is_bundle
    from aftexport.deploy.triton import MOUNTED, check_place, write_repository
    from aftexport.system.files import aside_folder

    console = Console(emoji=False)
    model = path or Path(options.factory.rpartition(":")[2])
    model = model if model.name else model.resolve()
    out = options.out or model.with_suffix(".triton")
    name, mounted = options.name or model.stem, options.mounted or MOUNTED
    check_place(out, name, mounted, options.force)
    with ExitStack() as stack:
        if path is not None and is_bundle(path):
            _refuse_export_options(parser, options)
            with stage(console, f"Checking {path}"):
                bundle = Bundle.open(path)
        else:
            aside = stack.enter_context(aside_folder(out)) / f"{name}.bundle"
            bundle = _exported(export, aside, engine)
        folder = write_repository(
            bundle,
            out,
            name=name,
            mounted=mounted,
            max_batch=options.max_batch,
            force=options.force,
            console=console,
        )
    _print_start(console, bundle, folder, mounted)
    return 0


def _exported(export: "Callable[..., Bundle]", folder: Path, engine: "EngineOptions") -> "Bundle":
    try:
        return export(to="onnx", out=folder, engine=replace(engine, max_batch=None))
    except ParityError as error:
        raise ParityError(
            error.problem,
            "Try --precision fp32. Nothing was written; export with --to onnx to keep the bundle "
            "for inspection.",
        ) from error


def _print_start(console: Console, bundle: "Bundle", folder: Path, mounted: str) -> None:
    """Print the command that starts Triton.

    Args:
        console: the console of the export.
        bundle: the bundle of the model.
        folder: the folder of the model in the repository.
        mounted: path of the repository on Triton's machine.
    """
    import aftplugins
    from aftexport.deploy.triton import start_command

    needs_kernels = bundle.manifest.engine is None and bundle.manifest.operators
    if needs_kernels and (reason := aftplugins.missing("onnxruntime")):
        console.print(f"[yellow]{escape(reason)}[/]", soft_wrap=True)
    console.print(f"Triton model: [bold]{escape(str(folder))}[/]", soft_wrap=True)
    repository = escape(str(folder.parent))
    console.print(f"Mount {repository} as {escape(mounted)} and run:", soft_wrap=True)
    console.print(f"  {escape(start_command(folder, mounted))}", soft_wrap=True)


def _refuse_export_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    unused = [
        name
        for name, value in vars(options).items()
        if name not in _OF_A_BUNDLE and value != parser.get_default(name)
    ]
    if unused:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        parser.error(f"expected a model for {words}, got a bundle; leave the option out")
