"""The ``aftserve`` command."""

import sys
from collections.abc import Sequence
from itertools import takewhile

from rich.console import Console

from aftexport import __version__
from aftexport.errors import AftexportError
from aftexport.system.arguments import HELP, check_command, help_last
from aftexport.system.console import accept_any_terminal, escape
from aftexport.system.installation import missing_module_error
from aftexport.system.process import exit_status, is_completing
from aftserve.cli import batch, deploy, health, key, predict
from aftserve.observability import tracing
from aftserve.observability.logging import unblock_output

COMMANDS = {
    "key": key.run,
    "deploy": deploy.run,
    "batch": batch.run,
    "predict": predict.run,
    "health": health.run,
}
"""The subcommands; other words start the server. Write ./key for a bundle with such a name."""
_SERVE = "serve"
"""A word that may stand before the bundle. Write ./serve for a bundle with this name."""

_OF_AFTEXPORT = ("bench", "build", "calibrate", "demo", "fuse", "inspect", "unfuse", "verify")
_NEAR = {
    **{word: f"aftexport {word}" for word in _OF_AFTEXPORT},
    **dict.fromkeys(("run", "start", "server"), "aftserve BUNDLE"),
    **dict.fromkeys(("infer", "classify"), "aftserve predict BUNDLE FILE"),
    **dict.fromkeys(("export", "convert"), "aftexport MODEL --to onnx"),
    "version": "aftserve --version",
}
"""What to write in place of commands of aftexport and of other programs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve a bundle until told to stop, or run a subcommand; return the exit status.

    The server's status is 0 if it was stopped and 1 if it failed. It is 2 if the bundle or a
    setting cannot be used, and 130 if the command was interrupted before it served.
    """
    if is_completing():
        _complete()
    words = _command_first(help_last(sys.argv[1:] if arguments is None else arguments))
    if words == ["--version"]:
        print(f"aftserve {__version__}")
        return 0
    command = COMMANDS.get(words[0]) if words else None
    if words[:1] == [_SERVE]:
        words = words[1:]
    accept_any_terminal()
    if command is None:
        unblock_output()
    errors = Console(stderr=True, soft_wrap=True, emoji=False)
    tracing.leave_out_unknown_propagators()
    try:
        if command is not None:
            return command(words[1:])
        if words:
            own = {word: f"aftserve {word}" for word in (*COMMANDS, _SERVE, HELP)}
            check_command(words, _NEAR | own, "aftserve", "a bundle")
        if {"-h", "--help"} & {*takewhile("--".__ne__, words)}:
            from aftserve.cli.setting_help import print_help

            print_help()
            return 0
        from aftserve.settings import Settings

        settings = Settings.read(words)
        # Only now, because --help needs neither the web framework nor an engine.
        from aftserve.api.adapters.adapter import import_adapters
        from aftserve.server import serve

        import_adapters(settings.api)  # a wrong name is refused before the bundle is loaded
        return serve(settings, Console(emoji=False))
    except KeyboardInterrupt as stop:
        return exit_status(stop)
    except AftexportError as error:
        errors.print(f"[bold red]error:[/] {escape(error.problem)}\n  {escape(error.remedy)}")
        return error.exit_code
    except ModuleNotFoundError as error:
        missing = missing_module_error(error)
        if missing is None:
            raise
        errors.print(f"[bold red]error:[/] {escape(missing.problem)}\n  {escape(missing.remedy)}")
        return missing.exit_code


def _complete() -> None:
    """Complete a command line in the shell."""
    from aftexport.system.completion import complete, words_before

    words = words_before()
    if words and words[0] in COMMANDS:
        COMMANDS[words[0]]([])  # completes when it has its parser
    from aftserve.cli.setting_help import setting_parser

    complete(setting_parser(), COMMANDS)


def _command_first(words: list[str]) -> list[str]:
    """Return a command line that has flags before its subcommand with the subcommand first."""
    if not words or not words[0].startswith("-"):
        return words
    from aftserve.setting_sources import takes_value
    from aftserve.settings import Settings

    flag = None
    for i, word in enumerate(words):
        if word == "--":
            break
        if word.startswith("-"):
            flag = word if takes_value(word, Settings.model_fields) else None
        elif (
            flag is not None and flag.removeprefix("--").replace("-", "_") in Settings.model_fields
        ):
            flag = None
        elif word in {*COMMANDS, _SERVE}:
            return [word, *words[:i], *words[i + 1 :]]
        elif flag is None:
            break
        else:  # the value of a flag of a subcommand
            flag = None
    return words
