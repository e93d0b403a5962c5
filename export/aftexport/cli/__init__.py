"""The command line ``aftexport``."""

import errno
import sys
import warnings
from collections.abc import Sequence

from rich.console import Console

from aftexport.cli import bench, build, calibrate, demo, export, fuse, inspect, unfuse, verify
from aftexport.errors import AftexportError
from aftexport.system.arguments import HELP, check_command, help_last
from aftexport.system.console import accept_any_terminal, escape
from aftexport.system.installation import missing_module_error
from aftexport.system.process import exit_status, interruptible, is_completing

COMMANDS = {
    "verify": verify.run,
    "inspect": inspect.run,
    "build": build.run,
    "calibrate": calibrate.run,
    "bench": bench.run,
    "fuse": fuse.run,
    "unfuse": unfuse.run,
    "demo": demo.run,
}
"""The subcommands. Any other first word is a model to export."""
_EXTRAS = {"demo": {"torch": "demo", "scipy": "demo"}}
"""Extras that bring all that a command needs, by the module that it misses."""
_EXPORT = "export"
"""A word that may stand before the model. Write ./export for a folder with this name."""
_SHOW, _COMPARE = "aftexport inspect PATH", "aftexport verify BUNDLE"
_SERVE, _EXPORT_TO = "aftserve BUNDLE", "aftexport MODEL --to onnx"
_NEAR = {
    **dict.fromkeys(("serve", "server", "run", "start", "deploy"), _SERVE),
    **dict.fromkeys(("convert", "compile", "package", "save"), _EXPORT_TO),
    **dict.fromkeys(("info", "show", "describe", "summary", "list"), _SHOW),
    **dict.fromkeys(("check", "test", "validate", "compare", "parity"), _COMPARE),
    **dict.fromkeys(("benchmark", "profile", "time"), "aftexport bench BUNDLE"),
    **dict.fromkeys(("optimize", "optimise"), "aftexport fuse IN.onnx OUT.onnx"),
    "quantize": f"{_EXPORT_TO} --precision int8",
    "onnx": _EXPORT_TO,
    "triton": "aftexport MODEL --to triton",
    "batch": "aftserve batch BUNDLE",
    **dict.fromkeys(("predict", "infer", "classify"), "aftserve predict BUNDLE FILE"),
    "version": "aftexport --version",
}
"""What to write in place of words that other programs have as commands."""
_REMEDIES = {
    errno.EDQUOT: "Free disk space there, or choose another disk.",
    errno.EFBIG: "Raise the limit on the size of files (ulimit -f), or choose another disk.",
    errno.ENOSPC: "Free disk space there, or choose another disk.",
}
"""Remedies for system errors whose cause is not the path."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    if is_completing():
        _complete()
    words = help_last(sys.argv[1:] if arguments is None else arguments)
    accept_any_terminal()
    errors = Console(stderr=True, soft_wrap=True, emoji=False)
    try:
        with warnings.catch_warnings(), interruptible():
            warnings.showwarning = lambda message, *_: errors.print(
                f"[yellow]warning:[/] {escape(str(message))}"
            )
            if words and words[0] in COMMANDS:
                return COMMANDS[words[0]](words[1:])
            if words[:1] == [_EXPORT]:
                return export.run(words[1:])
            if words:
                own = {word: f"aftexport {word}" for word in (*COMMANDS, _EXPORT, HELP)}
                check_command(words, _NEAR | own, "aftexport", "a model file")
            return export.run(words)
    except AftexportError as error:
        errors.print(f"[bold red]error:[/] {escape(error.problem)}\n  {escape(error.remedy)}")
        return error.exit_code
    except OSError as error:
        place = escape(str(error.filename or "an output file"))
        remedy = _REMEDIES.get(error.errno or 0, "Check the path.")
        errors.print(f"[bold red]error:[/] {place}: {error.strerror}.\n  {remedy}")
        return 2
    except ModuleNotFoundError as error:
        missing = missing_module_error(error, _EXTRAS.get(words[0]) if words else None)
        if missing is None:
            raise
        errors.print(f"[bold red]error:[/] {escape(missing.problem)}\n  {escape(missing.remedy)}")
        return missing.exit_code
    except KeyboardInterrupt as stop:
        errors.print("interrupted; no bundle was written")
        return exit_status(stop)


def _complete() -> None:
    """Complete a command line in the shell."""
    from aftexport.system.completion import complete, words_before

    words = words_before()
    if words and words[0] in COMMANDS:
        COMMANDS[words[0]]([])  # completes when it has its parser
    complete(export.make_export_parser(), COMMANDS)
