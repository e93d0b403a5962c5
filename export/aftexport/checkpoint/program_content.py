"""Checks of the text in a ``torch.export`` archive that torch evaluates, imports or calls.

The graph module becomes Python source, which contains the names of the archive unchanged. Targets
are attributes of the module torch.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aftexport.checkpoint.program_operators import is_allowed
from aftexport.errors import CheckpointError

SAFE_FORM = "Export it again with torch.export.save, or give its state dict and --factory."
_EXPRESSION_TOKEN = re.compile(
    r"\s+|'[su]\d+'|'-?\d+\.\d+'|precision=53\b|\w+(?:\.\d+)?|!=|[-+*/(),<>=&|~]"
)
_EXPRESSION_WORDS = frozenset(
    {"Symbol", "Integer", "Rational", "Float", "Add", "Mul", "Max", "Min", "Mod", "PythonMod"}
    | {"FloorDiv", "CeilDiv", "CleanDiv", "IntTrueDiv", "FloatTrueDiv", "ToFloat", "TruncToInt"}
    | {"CeilToInt", "FloorToInt", "RoundToInt", "TruncToFloat", "OpaqueUnaryFn_sqrt"}
    | {"Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Abs", "And", "Or", "Not"}
    | {"positive", "nonnegative", "integer", "True", "False", "precision=53"}
)
_SIZE = re.compile(r"L\['\w+'\](\['\w+'\]|\[\d+\])*\.size\(\)\[\d+\]")
_POWER = re.compile(
    r"Pow\(Symbol\('[su]\d+'(, \w+=True)*\), Integer\([2-8]\)\)|\b[su]\d+\*\*[2-8]\b(?!\s*\*\*)"
)
"""A small power of one symbol: the evaluation of other powers may not end."""
_SYMBOL = re.compile(r"[a-z]{1,3}\d{1,6}")
_MAX_POWER = 8
_MAX_EXPRESSION_CHARACTERS = 2000
_LOCAL_NAMES = ("name", "as_name")
_ATTRIBUTE_NAMES = (
    "parameter_name", "buffer_name", "tensor_constant_name", "custom_obj_name",
    "user_input_name", "fqn",
)  # fmt: skip
_SIZE_ARGUMENTS = frozenset({"size", "repeats", "output_size", "dims"})
_COUNT_OPERATORS = re.compile(
    r"torch\.ops\.aten\.(arange|linspace|logspace|eye|randperm|one_hot|bincount|histc|pad"
    r"|constant_pad_nd|repeat_interleave|nonzero_static|(tril|triu)_indices|\w+_window)\.\w+"
)
_MAX_AXES = 64
_MAX_ELEMENTS = 1 << 28
"""The maximum elements of a tensor whose size comes from numbers in the text."""


def check_content(path: Path, content: Any) -> None:
    """Check all parts of the JSON in an archive that torch evaluates, imports or calls.

    Args:
        path: the archive, for the error.
        content: the decoded JSON of one member.

    Raises:
        CheckpointError: if an expression, guard, structure, name, operator or size is refused;
            the error names it.
    """
    for item in _dicts_in(content):
        _check_expressions(path, item)
        _check_names(path, item)
        _check_node(path, item)


def _dicts_in(content: Any) -> Iterator[dict[str, Any]]:
    stack = [content]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
            yield item


def _check_expressions(path: Path, item: dict[str, Any]) -> None:
    expression = item.get("expr_str", "")
    if not isinstance(expression, str) or not _is_arithmetic(expression):
        _refuse(path, "shape expression", expression)
    for guard in item.get("guards_code") or []:
        if not isinstance(guard, str) or not _is_arithmetic(_SIZE.sub("s0", guard)):
            _refuse(path, "guard expression", guard)
    for symbol in item.get("range_constraints") or {}:
        if not _SYMBOL.fullmatch(symbol):
            _refuse(path, "symbol", symbol)
    for name in ("in_spec", "out_spec"):
        if (spec := item.get(name)) and not _is_plain_structure(json.loads(spec)[1]):
            _refuse(path, "structure of inputs", spec)


def _check_names(path: Path, item: dict[str, Any]) -> None:
    names = [item[key] for key in _LOCAL_NAMES if key in item]
    names += item.get("forward_arg_names") or []
    names += _keywords(item["in_spec"]) if item.get("in_spec") else []
    for name in names:
        if isinstance(name, str) and name and not name.isidentifier():
            _refuse(path, "name", name)
    for name in (item[key] for key in _ATTRIBUTE_NAMES if key in item):
        if isinstance(name, str) and (not name.isprintable() or set(name) & {'"', "\\"}):
            _refuse(path, "name", name)


def _keywords(spec: str) -> list[str]:
    """Return the names of arguments in a structure of inputs, ``(arguments, keywords)``."""
    top = json.loads(spec)[1]
    children = top.get("children_spec") or []
    names = []
    for child in (top, *children):
        context = child.get("context")
        keys = json.loads(context) if isinstance(context, str) else context
        names += keys if isinstance(keys, list) else []
    return names


def _check_node(path: Path, item: dict[str, Any]) -> None:
    for target in (item.get("target"), item.get("as_operator")):
        if isinstance(target, str) and not (is_allowed(target) or _is_small_power(item)):
            raise CheckpointError(
                path,
                "its graph may call only functional operators of aten and operators of aftexport, "
                f"got {target[:100]!r}",
                "Export the model without it, or give its state dict and --factory.",
            )
    target, inputs = item.get("target"), item.get("inputs")
    if not isinstance(target, str) or not isinstance(inputs, list):
        return
    for argument in inputs:
        numbers = [abs(number) for number in _integers(argument.get("arg")) if number]
        if argument.get("name") in _SIZE_ARGUMENTS:
            elements = math.prod(numbers[:_MAX_AXES])
        elif _COUNT_OPERATORS.fullmatch(target):
            elements = max(numbers, default=0)
        else:
            continue
        if elements > _MAX_ELEMENTS:
            raise CheckpointError(
                path,
                f"a tensor in it may have at most {_MAX_ELEMENTS} elements, got {target[:100]!r} "
                f"with {argument['name']} {numbers[:8]}",
                SAFE_FORM,
            )


def _is_small_power(item: dict[str, Any]) -> bool:
    """Return whether a node is the power of a size to a small number in the text."""
    inputs = item.get("inputs") or [{}]
    exponent = inputs[-1].get("arg", {}).get("as_int")
    return (
        item.get("target") == "_operator.pow"
        and len(inputs) == 2
        and isinstance(exponent, int)
        and 0 <= exponent <= _MAX_POWER
    )


def _integers(argument: Any) -> list[int]:
    """Return the integers in an argument of a node, also those among symbols."""
    stack, integers = [argument], []
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, int):
            integers.append(int(item))
    return integers


def _refuse(path: Path, subject: str, text: object) -> None:
    raise CheckpointError(path, f"its {subject} {str(text)[:80]!r} may be code", SAFE_FORM)


def _is_plain_structure(spec: Any) -> bool:
    """Return whether a structure has only tuples, lists and dicts; others import a class."""
    if not isinstance(spec, dict):
        return False
    context = spec.get("context")
    keys = json.loads(context) if isinstance(context, str) else context
    return (
        spec.get("type") in (None, "builtins.tuple", "builtins.list", "builtins.dict")
        and (keys is None or (isinstance(keys, list) and all(isinstance(k, str) for k in keys)))
        and all(_is_plain_structure(child) for child in spec.get("children_spec", []))
    )


def _is_arithmetic(expression: str) -> bool:
    """Return whether an expression has only sums and products of symbols, without code."""
    if len(expression) > _MAX_EXPRESSION_CHARACTERS:
        return False
    expression = _POWER.sub("s0", expression)
    tokens = _EXPRESSION_TOKEN.findall(expression)
    words = [t for t in tokens if t[0].isalpha() or t[0] == "_"]
    return (
        "".join(tokens) == expression
        and "**" not in expression
        and all(w in _EXPRESSION_WORDS or re.fullmatch(r"[su]\d+", w) for w in words)
    )
