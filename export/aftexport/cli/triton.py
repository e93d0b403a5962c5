"""``aftexport MODEL|BUNDLE --to triton``."""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from aftexport.bundle.bundle import Bundle
    from aftexport.engines.tensorrt.settings import EngineOptions

_OWN = ("name", "mounted")
_OF_A_BUNDLE = {"to", "model", "out", "force", "max_batch", *_OWN}
"""What may be said where there is nothing left to export."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a repository is, beside what a model is."""
    add = parser.add_argument_group("of a Triton repository").add_argument
    add("--name", help="of the model in it (default: the file's)")
    add("--mounted", metavar="DIR",
        help="where Triton finds the repository; the kernels are loaded from there "
        "(default: /models)")  # fmt: skip


def check_absent(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses those options for anything else; exits."""
    if any(getattr(options, name) is not None for name in _OWN):
        parser.error("--name and --mounted are for --to triton")


def write(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    path: Path | None,
    engine: "EngineOptions",
    export: "Callable[..., Bundle]",
) -> int:
    """Writes the repository; returns the exit status.

    Args:
        parser: that the options are of.
        options: as they were given.
        path: the model file, or a bundle; None for a factory alone.
        engine: what was asked of one; a repository of a model has none.
        export: writes the bundle of the model.
    """
    import aftplugins
    from aftexport.bundle.bundle import Bundle, is_bundle
    from aftexport.console import escape, stage
    from aftexport.deploy.triton import MOUNTED, check_place, start_command, write_repository
    from aftexport.errors import ParityError
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
            try:
                bundle = export(to="onnx", out=aside, engine=replace(engine, max_batch=None))
            except ParityError as error:
                raise ParityError(
                    error.problem,
                    "Nothing was written. --to onnx keeps the bundle for a look; "
                    "try --precision fp32.",
                ) from error
        folder = write_repository(
            bundle,
            out,
            name=name,
            mounted=mounted,
            max_batch=options.max_batch,
            force=options.force,
            console=console,
        )
    by_body = bundle.manifest.engine is None and bundle.manifest.operators
    if by_body and (reason := aftplugins.missing("onnxruntime")):
        console.print(f"[yellow]{escape(reason)}[/]", soft_wrap=True)
    console.print(f"Model of Triton: [bold]{escape(str(folder))}[/]", soft_wrap=True)
    console.print(f"Where {escape(str(out))} is {escape(mounted)}:", soft_wrap=True)
    console.print(f"  {escape(start_command(folder, mounted))}", soft_wrap=True)
    return 0


def _refuse_export_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    given = [
        name
        for name, value in vars(options).items()
        if name not in _OF_A_BUNDLE and value != parser.get_default(name)
    ]
    if given:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        parser.error(f"{words}: of the export of a model; this is a bundle already")
