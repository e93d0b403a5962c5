"""Completion of command lines in shells.

argcomplete's scripts run the command at each Tab, with the line in variables of the environment.
"""

import os
from argparse import ArgumentParser
from collections.abc import Collection

from aftexport.system.process import COMPLETION_START


def words_before() -> list[str]:
    """Return the words between the program and the word that is completed."""
    from argcomplete.lexers import split_line

    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    return list(words[int(os.environ[COMPLETION_START]) :])


def complete(parser: ArgumentParser, commands: Collection[str] = ()) -> None:
    """Print what may follow to the shell, and end the process.

    Args:
        parser: the parser of the command; its subcommand is a word of its name.
        commands: words that are offered beside files for the first argument.
    """
    import argcomplete
    from argcomplete.completers import FilesCompleter

    os.environ[COMPLETION_START] = str(int(os.environ[COMPLETION_START]) + parser.prog.count(" "))
    if commands:
        first = parser._get_positional_actions()[0]
        first.completer = lambda prefix, **_: [  # type: ignore[attr-defined]
            *(word for word in commands if word.startswith(prefix)),
            *FilesCompleter()(prefix),
        ]
    argcomplete.autocomplete(parser, always_complete_options=False)
