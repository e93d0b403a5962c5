"""The command ``aftexport MODEL|BUNDLE --to triton``."""

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from aftexport.errors import ParityError
from aftexport.options import ExportOptions
from aftexport.system.console import escape, stage

if TYPE_CHECKING:
    from aftexport.bundle.bundle import Bundle

TARGET = "triton"
"""The value of ``--to``, which only the command line has."""
_MEANINGS = {
    "to": "; triton: a model repository of Triton instead of a bundle, from a model or a bundle",
    "out": " or of the Triton repository (default: MODEL.triton)",
    "force": ", or an existing model in a repository",
}
"""The further meanings of options of an export."""
_OWN = ("name", "mounted")
_OF_A_BUNDLE = {"to", "model", "out", "force", "max_batch", "quiet", *_OWN}
"""The options that are allowed if the input is a bundle, which needs no export."""


def add_options(parser: argparse.ArgumentParser, actions: Mapping[str, argparse.Action]) -> None:
    """Add the options of a Triton repository, and the target to those of an export."""
    add = parser.add_argument_group("Triton options").add_argument
    add("--name", help="name of the model in the repository (default: the name of the file)")
    add("--mounted", metavar="DIR",
        help="path of the repository on Triton's machine, from which the kernels are loaded "
        "(default: /models)")  # fmt: skip
    to = actions["to"]
    to.choices = [*(to.choices or ()), TARGET]
    for name, more in _MEANINGS.items():
        actions[name].help = f"{actions[name].help}{more}"


def check_absent(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with an error if a Triton option was given for another target."""
    if any(getattr(options, name) is not None for name in _OWN):
        parser.error(f"--name and --mounted need --to triton, got --to {options.to}")


def write(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    options: ExportOptions,
    export: "Callable[[ExportOptions], Bundle]",
    console: Console,
) -> int:
    """Write the repository of a bundle, or of a model by ``export``; return the exit status."""
    from aftexport.bundle.bundle import Bundle, is_bundle
    from aftexport.deploy.triton import MOUNTED, check_place, write_repository
    from aftexport.system.files import aside_folder

    if options.long_documents is not None:
        parser.error("--long-documents needs --to onnx, got --to triton, which cuts no documents")
    path = given.model
    model = path or Path(given.factory.rpartition(":")[2])
    model = model if model.name else model.resolve()
    out = given.out or model.with_suffix(".triton")
    name, mounted = given.name or model.stem, given.mounted or MOUNTED
    check_place(out, name, mounted, given.force)
    with ExitStack() as stack:
        if path is not None and is_bundle(path):
            _refuse_export_options(parser, given)
            with stage(console, f"Checking {path}"):
                bundle = Bundle.open(path)
        else:
            aside = stack.enter_context(aside_folder(out)) / f"{name}.bundle"
            bundle = _exported(export, options, aside)
        folder = write_repository(
            bundle,
            out,
            name=name,
            mounted=mounted,
            max_batch=given.max_batch,
            force=given.force,
            console=console,
        )
    _print_start(console, bundle, folder, mounted)
    return 0


def _exported(
    export: "Callable[[ExportOptions], Bundle]", options: ExportOptions, folder: Path
) -> "Bundle":
    engine = replace(options.engine, max_batch=None)  # of the repository, not of an engine
    try:
        return export(replace(options, to="onnx", out=folder, force=False, engine=engine))
    except ParityError as error:
        raise ParityError(
            error.problem,
            "Try --precision fp32. Nothing was written; export with --to onnx to keep the bundle "
            "for inspection.",
        ) from error


def _print_start(console: Console, bundle: "Bundle", folder: Path, mounted: str) -> None:
    """Print the command that starts Triton, on whose machine ``mounted`` is the repository."""
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
