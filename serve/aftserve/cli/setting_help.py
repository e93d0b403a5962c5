"""The text of ``aftserve --help``: the commands, and the settings in groups."""

from argparse import (
    SUPPRESS,
    ArgumentParser,
    BooleanOptionalAction,
    RawDescriptionHelpFormatter,
)
from collections.abc import Mapping
from typing import Any, get_args

from pydantic.fields import FieldInfo

from aftserve.settings import Settings

COMMANDS = {
    "batch": "classify a folder or a Parquet file of documents with Ray Data",
    "deploy": "serve a bundle from several processes or machines with Ray Serve",
    "health": "ask a server on this machine for its health",
    "key": "make an API key",
    "predict": "classify files and tables of documents in this process",
}
"""The commands beside serving, and their effects."""
GROUPS: Mapping[str, Mapping[str, str | None]] = {
    "settings that matter first": {"port": "N", "host": "ADDRESS,...", "api_keys": "FILE"},
    "files and interfaces": {
        "config": "FILE",
        "model_name": "NAME",
        "api": "NAME,...",
        "grpc_port": "N",
        "uds": "PATH",
        "ssl_certfile": "FILE",
        "ssl_keyfile": "FILE",
        "allowed_hosts": "NAME,...",
        "cors_origins": "ORIGIN,...",
    },
    "engine and long documents": {
        "engine": None,
        "provider": None,
        "threads": "N",
        "long_documents": None,
        "memory_budget_mib": "MIB",
        "spill": "FOLDER",
        "budget_tokens": "N",
        "idle_seconds": "SECONDS",
    },
    "limits of requests": {
        "max_tokens": "N",
        "max_characters": "N",
        "max_documents": "N",
        "max_body_mib": "MIB",
        "max_array_mib": "MIB",
        "max_arrays_mib": "MIB",
        "max_buffered_mib": "MIB",
    },
    "times": {
        "deadline_seconds": "SECONDS",
        "max_queue_seconds": "SECONDS",
        "receive_seconds": "SECONDS",
        "keep_alive_seconds": "SECONDS",
        "grpc_ping_seconds": "SECONDS",
        "grpc_min_ping_seconds": "SECONDS",
        "stall_seconds": "SECONDS",
        "drain_seconds": "SECONDS",
        "shutdown_seconds": "SECONDS",
    },
    "comparison with PyTorch": {
        "reference": "PATH",
        "reference_factory": "CALLABLE",
        "reference_allow_pickle": None,
        "reference_trust_remote_code": None,
        "shadow": "SHARE",
        "on_breach": None,
    },
    "log": {"log_format": None, "log_level": None},
}
"""The settings with a flag; for the values of each but switches and choices a word."""
_USAGE = """\
aftserve [BUNDLE ...] [--SETTING VALUE ...]
       aftserve COMMAND ...
       aftserve --version"""
_DESCRIPTION = """\
Serve bundles over HTTP. BUNDLE is a folder written by aftexport, or a folder of such folders, and
the current folder if it is left out. SIGHUP reads all of them again.
"""
_EPILOG = """\
A flag overrides its variable, such as AFTSERVE_PORT, which overrides the file of --config.

Exit status: 0 stopped on request; 1 it failed; 2 the bundle or a setting cannot be used; 130
interrupted before it served.
"""


def print_help() -> None:
    """Print the help."""
    parser = setting_parser(has_commands=True)
    parser.print_help()


def setting_parser(*, has_commands: bool = False) -> ArgumentParser:
    """Return a parser of the settings, after the bundles or with a line for each command."""
    parser = ArgumentParser(
        prog="aftserve",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        add_help=False,
    )
    commands = parser.add_argument_group("commands, each with its own --help")
    for name, effect in COMMANDS.items() if has_commands else ():
        commands.add_argument(name, metavar=name, help=effect)
    if not has_commands:
        parser.add_argument("bundles", nargs="*")
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, word in names.items():
            field = Settings.model_fields[name]
            group.add_argument(
                f"--{name.replace('_', '-')}", help=_help(field), **_form(field, word)
            )
    return parser


def _form(field: FieldInfo, word: str | None) -> dict[str, Any]:
    """Return the form of a flag in argparse."""
    if field.annotation is bool:
        return {"action": BooleanOptionalAction, "default": SUPPRESS}
    return {"metavar": word} if word else {"choices": get_args(field.annotation)}


def _help(field: FieldInfo) -> str:
    """Return the description of a setting, and its default if that is a value."""
    text = str(field.description).replace("%", "%%")
    default = ",".join(field.default) if isinstance(field.default, list) else field.default
    has_value = default not in (None, "") and field.annotation is not bool
    return f"{text} (default: {default})" if has_value else text
