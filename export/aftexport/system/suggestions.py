"""The known option or command that is most like an unknown one."""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from aftexport.errors import UsageError

_MIN_LIKENESS = 0.7


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like ``name``; None if none is like it."""
    return next(iter(get_close_matches(name, list(known), 1, _MIN_LIKENESS)), None)


def check_options(words: Sequence[str], known: Collection[str], program: str) -> None:
    """Refuse a mistyped option with a suggestion; other unknown options are left to the parser.

    Args:
        words: words of the command line.
        known: options of the command, such as ``--out``.
        program: name of the command.

    Raises:
        UsageError: if an unknown option is like a known one.
    """
    for word in words:
        if word == "--":
            return
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known and (likely := nearest(name, known)):
            raise UsageError(
                f"{program} expected one of its options, got {name}.",
                f"Write {likely}, or see {program} --help.",
            )


def check_command(word: str, commands: Collection[str], program: str, subject: str) -> None:
    """Refuse a mistyped command with a suggestion.

    Args:
        word: first word of the command line.
        commands: names of the subcommands.
        program: name of the command.
        subject: meaning of other first words, such as a model file.

    Raises:
        UsageError: if the word is like a command, has no slash, and no file has its name.
    """
    if word in commands or word.startswith("-") or "/" in word or Path(word).exists():
        return
    if likely := nearest(word, commands):
        raise UsageError(
            f"{program} expected {subject} or a command, got {word}, which does not exist.",
            f"Write {program} {likely}, or name an existing file.",
        )
