"""The ``aftserve`` command."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from aftexport import __version__
from aftexport.errors import AftexportError
from aftexport.report import accept_any_terminal

_PACKAGES = ("fastapi", "limits", "prometheus_client", "pydantic_settings", "uvicorn")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves a bundle until it is told to stop, or makes an API key; returns the exit status.

    0: stopped on request; 1: the server failed; 2: the bundle or a setting cannot be used.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"aftserve {__version__}")
        return 0
    accept_any_terminal()
    errors = Console(stderr=True, soft_wrap=True)
    try:
        if words[:1] == ["key"]:
            return _key(words[1:])
        from aftserve.server import serve
        from aftserve.settings import Settings

        return serve(Settings.read(words), Console())
    except AftexportError as error:
        errors.print(f"[bold red]error:[/] {escape(error.problem)}\n  {escape(error.remedy)}")
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        errors.print(
            f"[bold red]error:[/] The server needs {error.name}, which is not installed.\n"
            "  Run: pip install 'aftexport\\[serve]'"
        )
        return 2


def _key(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="aftserve key",
        description="Make an API key: it is printed once, and its digest for --api-keys FILE.",
    )
    parser.add_argument("name", metavar="NAME", help="of who is to have it")
    parser.add_argument("rate", metavar="RATE", nargs="?", help="such as 60/minute; any without")
    parser.add_argument("--admin", action="store_true", help="it may ask for POST /reload")
    options = parser.parse_args(words)

    from aftserve.keys import make_key

    key, section = make_key(options.name, options.rate, admin=options.admin)
    print(f"For {options.name}, shown this once:\n\n{key}\n\nFor the server's file:\n\n{section}")
    return 0
