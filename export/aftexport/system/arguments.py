"""Parsers for the command line, the types of their options, and callables that an option names."""

import argparse
import importlib
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from aftexport.errors import UsageError
from aftexport.system.process import is_completing

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest option for an unknown one."""

    example = ""
    """A command line with the arguments that are required."""

    def parse_args(  # type: ignore[override]  # the namespace of a caller is not supported
        self, args: Sequence[str]
    ) -> argparse.Namespace:
        if is_completing():
            from aftexport.system.completion import complete

            complete(self)
        check_options(args, set(_OPTION.findall(self.format_usage())), self.prog)
        return super().parse_args(args)

    def error(self, message: str) -> NoReturn:
        see = f"Write {self.example}, or see" if self.example else "See"
        self.exit(2, f"error: {self.prog}: {message}.\n  {see} {self.prog} --help.\n")


def make_parser(
    name: str, description: str, epilog: str = "", *, example: str = ""
) -> argparse.ArgumentParser:
    """Return a parser that keeps the line breaks of its texts."""
    parser = _Parser(
        prog=name,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.example = example
    return parser


def positive(text: str) -> int:
    """Parse an option with a count of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return value


def path(text: str) -> Path:
    """Parse an option with a file or folder; an empty text does not mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def lengths(text: str) -> list[int]:
    """Parse an option with several counts, ``N,N,...``."""
    return [positive(word) for word in text.split(",")]


_MIN_LIKENESS = 0.7


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like ``name``; None if none is like it."""
    return next(iter(get_close_matches(name, list(known), 1, _MIN_LIKENESS)), None)


def check_options(words: Sequence[str], known: Collection[str], program: str) -> None:
    """Refuse a mistyped option with a suggestion; other unknown options are left to the parser."""
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known and (likely := nearest(name, known)):
            raise UsageError(
                f"{program} expected one of its options, got {name}.",
                f"Write {likely}, or see {program} --help.",
            )


_PLACEHOLDER = re.compile(r"\b(BUNDLE|MODEL|PATH)\b")


def check_command(
    words: Sequence[str], commands: Mapping[str, str], program: str, subject: str
) -> None:
    """Refuse a mistyped command with a suggestion.

    ``commands``: what to write for each word that a user may mean, with words of other programs.
    """
    word, *given = words
    subject_follows = bool(given) and not given[0].startswith("-")
    is_file = Path(word).exists() and not (word in commands and subject_follows)
    if word.startswith("-") or "/" in word or is_file:
        return
    if likely := nearest(word.lower(), commands):
        right = commands[likely]
        if subject_follows:
            right = _PLACEHOLDER.sub(lambda _: given[0], right)
        raise UsageError(
            f"{program} expected {subject} or a command, got {word}.",
            f"Write {right}, or name an existing file.",
        )


HELP = "help"


def help_last(words: Sequence[str]) -> list[str]:
    """Return ``help COMMAND`` as ``COMMAND --help``. Write ./help for a file with this name."""
    return [*words[1:2], "--help"] if words[:1] == [HELP] else [*words]


def import_callable(name: str, option: str) -> Any:
    """Import the callable that an option names; raise UsageError if it cannot be imported."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise UsageError(
            f"{option} must be package.module:callable, got {name!r}.",
            f"Write it as package.module:{option.removeprefix('--')}.",
        )
    import_from_here()
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise UsageError(
            f"{option} {name}: the import raised {type(error).__name__}: {error}.",
            "Check the name, and that it can be imported from this folder.",
        ) from error
    return target


def import_from_here() -> None:
    """Add the working folder to the import path, as ``python`` itself does."""
    if "" not in sys.path:
        sys.path.insert(0, "")
