"""The options of a command, filled from the fields of a dataclass of ``aftexport.options``.

The type of a field gives the parser of its values, and the text below it is the help.
"""

import argparse
import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from aftexport.errors import UsageError
from aftexport.options import ModelSource
from aftexport.system.arguments import lengths, positive

Options = TypeVar("Options")


def add_options(
    parser: "argparse._ActionsContainer", described: type, *, required: str = "", without: str = ""
) -> dict[str, argparse.Action]:
    """Add an option for each field of a dataclass but ``without``; return them by field.

    The options of a dataclass in its fields are added too.
    """
    types, texts = get_type_hints(described, include_extras=True), _texts(described)
    groups: dict[str | None, Any] = {None: parser}
    actions: dict[str, argparse.Action] = {}
    for one in fields(described):
        kind, title = types[one.name], one.metadata.get("group")
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        if is_dataclass(kind):
            actions |= add_options(groups[title], kind)  # type: ignore[arg-type]
        elif one.name != without:
            words = _words(kind) | {"help": _help(one, texts[one.name])}
            if "metavar" in one.metadata:
                words["metavar"] = one.metadata["metavar"]
            if one.name == required:
                words |= {"required": True, "help": texts[one.name]}
            elif kind is not bool:
                words["default"] = one.default
            actions[one.name] = groups[title].add_argument(_flag(one), **words)
    return actions


def read_options(described: type[Options], given: argparse.Namespace, **own: Any) -> Options:
    """Return the dataclass of parsed options, with other values for the fields in ``own``.

    Raises:
        UsageError: if a name of NAME=VALUE is missing, or has two values.
    """
    types = get_type_hints(described, include_extras=True)
    for one in fields(described):  # type: ignore[arg-type]
        kind = types[one.name]
        if one.name in own:
            continue
        if is_dataclass(kind):
            own[one.name] = read_options(kind, given)  # type: ignore[arg-type]
            continue
        value = getattr(given, _flag(one)[2:].replace("-", "_"))
        if one.default is True:
            value = not value
        elif any(get_origin(part) is Mapping for part in _parts(kind)):
            value = _by_name(value, one, may_be_single=str in _parts(kind))
        own[one.name] = tuple(value) if isinstance(value, list) else value
    return described(**own)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that runs PyTorch for a bundle; see ``read_source``."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="MODEL",
        help="model file or folder from which the bundle was exported",
    )
    add_options(parser, ModelSource, without="path")


def add_json_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command whose results are numbers: JSON as the output, or in a file."""
    parser.add_argument(
        "--json", action="store_true", help="print the results as JSON in place of tables"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="also write the results to FILE in JSON"
    )


def read_source(given: argparse.Namespace) -> ModelSource:
    """Return the source that the options of ``add_source_options`` name."""
    return read_options(ModelSource, given, path=given.model)


def _flag(one: "Field[Any]") -> str:
    word = one.name.replace("_", "-")
    return str(one.metadata.get("flag", f"--no-{word}" if one.default is True else f"--{word}"))


def _help(one: "Field[Any]", text: str) -> str:
    if one.default is True:
        return text.removeprefix("False: ")  # the flag is for False
    return f"{text} (default: {one.default})" if isinstance(one.default, str) else text


def _texts(described: type) -> dict[str, str]:
    """Return the text below each field, on one line. Python keeps it only in the source."""
    (tree,) = ast.parse(inspect.getsource(described)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        one.target.id: " ".join(str(text.value.value).split())
        for one, text in pairwise(tree.body)
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _parts(kind: Any) -> list[Any]:
    """Return the types of a union but None, or the only type."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [part for part in parts if part is not NoneType]


def _words(kind: Any) -> dict[str, Any]:
    """Return the words of ``add_argument`` for a type."""
    parts = _parts(kind)
    match get_origin(parts[0]):
        case _ if kind is bool:
            return {"action": "store_true"}
        case _ if any(get_origin(part) is Mapping for part in parts):
            return {"action": "append"}
        case origin if origin is Literal:
            # A union of a word and a path is a text: a path of that name is another value.
            return {"choices": get_args(parts[0])} if len(parts) == 1 else {}
        case origin if origin in (Sequence, tuple):
            is_text = get_args(parts[0])[0] is str
            return {
                "type": _names if is_text else lengths,
                "metavar": "A,B,..." if is_text else "N,...",
            }
        case origin if origin is Annotated:
            return {"type": positive, "metavar": "N"}
    if Path in parts:
        return {"type": Path, "metavar": "FILE"}
    return {"type": parts[0], "metavar": {int: "N", float: "X"}.get(parts[0])}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _by_name(
    given: Sequence[str] | None, one: "Field[Any]", *, may_be_single: bool
) -> str | dict[str, str] | None:
    """Return the values of an option that is given once for each name, or its only value."""
    if given is None or (may_be_single and len(given) == 1 and "=" not in given[0]):
        return given[0] if given else None
    option, value = _flag(one), one.metadata["metavar"].rpartition("=")[2].lstrip("]")
    values: dict[str, str] = {}
    for words in given:
        name, is_named, word = words.partition("=")
        if not is_named or name in values:
            single = f"{option} {value} for the only output, or " if may_be_single else ""
            raise UsageError(
                f"{option} must be given once for each name, as NAME={value}, got {words!r}"
                + (" twice." if is_named else "."),
                f"Give {single}{option} NAME={value} for each of several.",
            )
        values[name] = word
    return values
