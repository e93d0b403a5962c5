"""The sources of settings beside flags: environment variables, and the file of ``--config``."""

import json
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource

from aftexport.errors import UsageError
from aftexport.system.arguments import check_options, nearest

PREFIX = "AFTSERVE_"
"""Prefix of the variables."""
ONLY_IN_FILE = ("models",)
"""The settings that have neither a flag nor a variable."""
_WITHOUT_FLAG = ("bundles", *ONLY_IN_FILE)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
"""A name that needs no quotes in TOML."""
_PORTS = (f"{PREFIX}PORT", f"{PREFIX}GRPC_PORT")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
"""Start of AFTSERVE_PORT as Kubernetes sets it in every pod beside a service named aftserve."""
_SERVICE_VARIABLE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
"""Ends of the other variables that Kubernetes sets for a service."""


class Variables(EnvSettingsSource):
    """The environment variables, without empty variables and those of Kubernetes."""

    # An empty variable counts as unset, as in OpenTelemetry, because a script may leave one empty.

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls, env_ignore_empty=True)
        self.env_vars = {
            name: value
            for name, value in self.env_vars.items()
            if not (name.upper() in _PORTS and _SERVICE_URL.match(value or ""))
        }


class ConfigFile(PydanticBaseSettingsSource):
    """The TOML file of ``--config``."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Raise NotImplementedError: the file is read as a whole."""
        raise NotImplementedError

    def __call__(self) -> dict[str, Any]:
        """Return the content of the file; empty without one."""
        path = self.current_state.get("config")
        if path is None:
            return {}
        try:
            return tomllib.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"--config {path}: {error}.", "Check the file.") from error


def check_variables(names: Collection[str]) -> None:
    """Refuse variables that would be ignored: unknown settings, and an empty file of keys."""
    known = [f"{PREFIX}{name.upper()}" for name in names if name not in ONLY_IN_FILE]
    for name, value in os.environ.items():
        name = name.upper()
        if name == f"{PREFIX}API_KEYS" and not value:
            raise UsageError(
                f"{name} is empty: the server would answer requests without API keys.",
                "Unset it, or name the file.",
            )
        if not name.startswith(PREFIX) or name in known or _SERVICE_VARIABLE.search(name):
            continue
        if name.endswith("_PORT") and _SERVICE_URL.match(value):
            continue
        raise UsageError(f"{name} is not a setting.", f"Unset it, or see {suggest(name, known)}.")


def check_flags(arguments: Sequence[str], fields: Mapping[str, FieldInfo]) -> None:
    """Refuse an unknown flag that is like a known one, with a suggestion."""
    flags = {_flag(name) for name in fields if name not in _WITHOUT_FLAG}
    switches = {_flag(f"no_{name}") for name, field in fields.items() if field.annotation is bool}
    # A flag of one part of a setting, such as --ray.autoscaling_config, is left to the parser.
    given = [word for word in arguments if "." not in word.partition("=")[0]]
    check_options(given, {"--help", *flags, *switches}, "aftserve")


def split_words(
    arguments: Sequence[str], fields: Mapping[str, FieldInfo]
) -> tuple[list[str], list[str]]:
    """Split a command line into its flags with values, and other words, as all after ``--``."""
    flags, others, rest = list[str](), list[str](), iter(arguments)
    for word in rest:
        if word == "--":
            others += rest
        elif not word.startswith("-") or word == "-":
            others.append(word)
        elif takes_value(word, fields):
            flags += [word, *islice(rest, 1)]
        else:
            flags.append(word)
    return flags, others


def takes_value(word: str, fields: Mapping[str, FieldInfo]) -> bool:
    """Return whether the next word is the value of this flag, as it is unless it is a switch."""
    booleans = [name for name, field in fields.items() if field.annotation is bool]
    alone = {"--help", *(_flag(f"{no}{name}") for name in booleans for no in ("", "no_"))}
    return word.startswith("--") and "=" not in word and word not in alone


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def section(*names: str) -> str:
    """Return the title of a model's section in TOML, whose name has dots between the parts."""
    name = ".".join(names)
    return f"[models.{name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)}]"


def explain(
    error: ValidationError, known: Collection[str], known_of_models: Collection[str]
) -> UsageError:
    """Return the error of the first unusable value, by the name that the user gave."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    match first["type"], first["loc"]:
        case "extra_forbidden", ("models", str(model), str(setting)):
            return _unknown_in_section(model, setting, first["input"], known_of_models)
        case "extra_forbidden", _:
            return UsageError(
                f"{name} in the file of --config is not a setting.",
                f"Remove it, or see {suggest(name, known)}.",
            )
        case _, ("bundles", *_):
            given = "bundle"
        case _, ("models", *_):
            given = f"{name} in the file of --config"
        case _:
            given = _flag(name)
    message = first["msg"][:1].lower() + first["msg"][1:]
    return UsageError(f"{given}: {message}.", "See aftserve --help.")


def _unknown_in_section(name: str, setting: str, value: Any, known: Collection[str]) -> UsageError:
    """Return the error of an unknown setting of a model."""
    # A table in place of its value is the rest of a model's name, which lacks quotes.
    if not isinstance(value, Mapping):
        return UsageError(
            f"{section(name)} {setting} in the file of --config is not a setting of a model.",
            f"Remove it, or see {suggest(setting, known)}.",
        )
    parts = [name, setting]
    while len(value) == 1:
        ((part, inner),) = value.items()
        if not isinstance(inner, Mapping):
            break
        parts, value = [*parts, part], inner
    whole = ".".join(parts)
    return UsageError(
        f"[models.{whole}] in the file of --config is not the section of a model.",
        f"Write {section(*parts)} if {whole} is the name of the model.",
    )


def suggest(name: str, known: Collection[str]) -> str:
    """Return the known name that is most like an unknown one, if any, or the command's help."""
    likely = nearest(name, known)
    return f"{likely} or aftserve --help" if likely else "aftserve --help"
