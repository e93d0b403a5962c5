"""Python's public names as Markdown, from their source and docstrings."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

_SECTION = re.compile(r"(?m)^(Args|Attributes|Raises|Returns|Yields):\n")
_ITEM = re.compile(r"((?:\*{0,2}\w+)(?:, \w+)*): (.*)", re.DOTALL)
_WIDTH = 100
Function = ast.FunctionDef | ast.AsyncFunctionDef


def plain(text: str) -> str:
    """Return text in one line, in which Markdown marks nothing but code."""
    parts = re.split(r"(`+[^`]+`+)", " ".join(text.split()))
    shown = [re.sub(r"([*<\\]|\b_|_\b)", r"\\\1", part) for part in parts[::2]]
    code = [f"`{part.strip('`')}`" for part in parts[1::2]]
    return "".join(a + b for a, b in zip(shown, [*code, ""], strict=True))


def python_names(*paths: str) -> str:
    """Return a section for each name; of a module ``package.module.*``, for each public one.

    ``package.Class:one,two`` shows only these members.
    """
    sections = []
    for path in paths:
        name, _, chosen = path.partition(":")
        parent, _, last = name.rpartition(".")
        module = import_module(parent)
        names = public_names(module) if last == "*" else [last]
        members = chosen.split(",") if chosen else None
        sections += [_section(f"{parent}.{n}", getattr(module, n), members) for n in names]
    return "\n\n".join(sections)


def public_names(module: ModuleType) -> list[str]:
    """Return the classes and functions of ``__all__``, or else the public classes."""
    if hasattr(module, "__all__"):
        values = {name: getattr(module, name) for name in module.__all__}
        return [n for n, v in values.items() if inspect.isclass(v) or inspect.isfunction(v)]
    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
    ]


def _section(name: str, value: Any, members: list[str] | None) -> str:
    source = textwrap.dedent(inspect.getsource(value))
    (node,) = ast.parse(source).body
    blocks = [f"### {name}"]
    if isinstance(node, ast.ClassDef):
        blocks += _class(source, node, value, members)
    else:
        assert isinstance(node, Function)
        blocks += [_signature(source, node, node.name), *_docstring(node)]
    return "\n\n".join(blocks)


def _class(
    source: str, node: ast.ClassDef, value: type, members: list[str] | None
) -> Iterator[str]:
    methods = {
        n.name: n
        for n in node.body
        if isinstance(n, Function) and not _has_decorator(n, "overload")
    }
    fields = list(_fields(source, node, members))
    if issubclass(value, Exception):
        yield f"A subclass of `{_public_base(value).__name__}`."
    elif "__init__" in methods:
        yield _signature(source, methods["__init__"], node.name)
    elif fields and not any(text for _, text in fields):
        yield _fence(node.name, [one for one, _ in fields], "")
    yield from _docstring(node)
    if any(text for _, text in fields):
        yield "\n".join(f"- `{one}`: {plain(text)}" for one, text in fields)
    shown = [
        method
        for name, method in methods.items()
        if (name == "__call__" or name[0] != "_") and (members is None or name in members)
    ]
    short = [method for method in shown if not _SECTION.search(ast.get_docstring(method) or "")]
    if short:
        yield "Members:"
        yield "\n".join(_short_member(source, method) for method in short)
    for method in shown:
        if method not in short:
            yield f"#### {node.name}.{method.name}"
            yield _signature(source, method, method.name)
            yield from _docstring(method)


def _short_member(source: str, method: Function) -> str:
    """Return a property, or a method whose docstring has no sections, as an item."""
    parameters, result = _parameters(source, method)
    call = f"({', '.join(parameters)}){result}"
    if _has_decorator(method, "property"):
        call = result.replace(" -> ", ": ")
    text = plain(ast.get_docstring(method) or "")
    return f"- `{method.name}{call}`" + (f": {text}" if text else "")


def _public_base(value: type) -> type:
    """Return the nearest base whose name is public."""
    return next(base for base in value.__mro__[1:] if not base.__name__.startswith("_"))


def _has_decorator(node: ast.ClassDef | Function, name: str) -> bool:
    return any(name in ast.unparse(decorator) for decorator in node.decorator_list)


def _fields(
    source: str, node: ast.ClassDef, members: list[str] | None
) -> Iterator[tuple[str, str]]:
    """Yield the fields of a dataclass, and the docstrings after them."""
    if not _has_decorator(node, "dataclass"):
        return
    for i, each in enumerate(node.body):
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        if each.target.id.startswith("_") or (members and each.target.id not in members):
            continue
        after = node.body[i + 1] if i + 1 < len(node.body) else None
        has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = str(after.value.value) if has_text else ""  # type: ignore[union-attr]
        yield f"{each.target.id}: {_field_type(source, each)}", text


def _field_type(source: str, field: ast.AnnAssign) -> str:
    """Return the type and the default of a field."""
    kind = _segment(source, field.annotation)
    default = field.value
    if isinstance(default, ast.Call) and ast.unparse(default.func) == "field":
        words = {word.arg: word.value for word in default.keywords}
        if factory := words.get("default_factory"):
            return f"{kind} = {_segment(source, factory)}()"
        default = words.get("default")
    return kind if default is None else f"{kind} = {_segment(source, default)}"


def _segment(source: str, node: ast.AST) -> str:
    """Return the source of a node in one line."""
    return " ".join((ast.get_source_segment(source, node) or "").split())


def _signature(source: str, function: Function, name: str) -> str:
    return _fence(name, *_parameters(source, function))


def _parameters(source: str, function: Function) -> tuple[list[str], str]:
    """Return the parameters but ``self``, and the arrow with the type of the result."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    shown = [_parameter(source, a, d) for a, d in zip(positional, defaults, strict=True)]
    if positional and positional[0].arg in ("self", "cls"):
        del shown[0]
    if given.vararg:
        shown.append("*" + _segment(source, given.vararg))
    elif given.kwonlyargs:
        shown.append("*")
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    shown += [_parameter(source, a, d) for a, d in pairs]
    if given.kwarg:
        shown.append("**" + _segment(source, given.kwarg))
    has_result = function.returns is not None and function.name != "__init__"
    return shown, f" -> {_segment(source, function.returns)}" if has_result else ""


def _parameter(source: str, argument: ast.arg, default: ast.expr | None) -> str:
    shown = _segment(source, argument)
    return shown if default is None else f"{shown} = {_segment(source, default)}"


def _fence(name: str, parameters: list[str], result: str) -> str:
    """Return a call as code, with a line for each parameter where one line would be long."""
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) > _WIDTH:
        line = f"{name}(\n" + "".join(f"    {one},\n" for one in parameters) + f"){result}"
    return _code(line)


def _code(text: str) -> str:
    return f"```text\n{text}\n```"


def _docstring(node: ast.ClassDef | Function) -> Iterator[str]:
    """Yield the blocks of a docstring: paragraphs, code after ``::``, and lists of its sections."""
    text, *sections = _SECTION.split(ast.get_docstring(node) or "")
    is_code = False
    for block in text.rstrip().split("\n\n"):
        if is_code and block.startswith(" "):
            yield _code(textwrap.dedent(block))
            continue
        is_code = block.endswith("::")
        if block:
            yield plain(block.replace("::", ":") if is_code else block)
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        yield f"{title}:" + _items(textwrap.dedent(body).strip())


def _items(body: str) -> str:
    """Return the items of a section as a list; text without names, such as of Returns, as it is."""
    items = re.split(r"\n(?=\S)", body)
    matches = [_ITEM.fullmatch(item) for item in items]
    if not all(matches):
        return f" {plain(body)}"
    return "\n\n" + "\n".join(f"- `{m[1]}`: {plain(m[2])}" for m in matches if m)
