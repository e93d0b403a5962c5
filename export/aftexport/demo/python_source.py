"""Facts about Python source code: the constructs in it, its lines, and its tokens.

Places are bytes of the UTF-8 text, counted from its start.
"""

import ast
import io
import keyword
import tokenize
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate

USES = ("assertions", "classes", "comprehensions", "decorators", "f-strings", "handled errors",
        "lambdas", "raised errors", "type hints", "while loops")  # fmt: skip
"""The constructs of ``find_uses``."""
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_USES: Mapping[type[ast.AST], str] = {
    ast.AnnAssign: "type hints",
    ast.Assert: "assertions",
    ast.ClassDef: "classes",
    ast.JoinedStr: "f-strings",
    ast.Lambda: "lambdas",
    ast.Raise: "raised errors",
    ast.Try: "handled errors",
    ast.TryStar: "handled errors",
    ast.While: "while loops",
    **dict.fromkeys(_COMPREHENSIONS, "comprehensions"),
}
"""The construct of each node; decorators and type hints are parts of other nodes too."""
OUTSIDE = "O"
"""The kind of characters outside the tokens of Python, such as indentation."""
KINDS = (OUTSIDE, "comment", "keyword", "name", "number", "operator", "string")
"""The kinds of tokens of ``find_tokens``, and ``OUTSIDE``."""
_KINDS = {
    "COMMENT": "comment",
    "FSTRING_END": "string",  # parts of f-strings are tokens since Python 3.12
    "FSTRING_MIDDLE": "string",
    "FSTRING_START": "string",
    "NAME": "name",
    "NUMBER": "number",
    "OP": "operator",
    "STRING": "string",
}
_FILES = 4096
"""Number of files whose facts are kept: training and judging both ask for them."""
_BLANKS = " \t\f\n"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_readable(text: str) -> bool:
    """Return whether this Python can parse a source file."""
    try:
        _tree(text)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return any(token.type == tokenize.ENDMARKER for token in tokens)
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError):
        return False


@lru_cache(maxsize=_FILES)
def find_uses(text: str) -> tuple[tuple[str, int], ...]:
    """Return each construct of ``USES`` in a source file, with its place, in the order of places.

    The place of a decorator or a type hint is that of its expression.
    """
    lines = line_starts(text)
    found = [
        (use, lines[node.lineno - 1] + node.col_offset)
        for parent in ast.walk(_tree(text))
        for use, node in _uses_of(parent)
    ]
    return tuple(sorted(found, key=lambda use: use[1]))


def _uses_of(node: ast.AST) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    use = _USES.get(type(node))
    if use is not None and isinstance(node, ast.stmt | ast.expr):
        yield use, node
    match node:
        case ast.ClassDef():
            yield from (("decorators", decorator) for decorator in node.decorator_list)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (("decorators", decorator) for decorator in node.decorator_list)
            if node.returns is not None:
                yield "type hints", node.returns
        case ast.arg(annotation=ast.expr() as annotation):
            yield "type hints", annotation


@lru_cache(maxsize=_FILES)
def find_lines(text: str) -> tuple[tuple[int, bool], ...]:
    """Return each line that is not blank: its first character's place, and whether it is prose.

    Prose lines are those that begin with a comment, and those of docstrings.
    """
    prose = {
        number
        for node in ast.walk(_tree(text))
        if isinstance(node, _DOCUMENTED)
        for first in node.body[:1]
        if isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
        for number in range(first.lineno, (first.end_lineno or first.lineno) + 1)
    }
    lines = text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT and not lines[row - 1][:column].strip(_BLANKS):
            prose.add(row)
    found = []
    for number, (start, line) in enumerate(zip(line_starts(text), lines, strict=True), 1):
        if stripped := line.lstrip(_BLANKS):
            found.append((start + len(line) - len(stripped), number in prose))
    return tuple(found)


def find_tokens(text: str) -> list[tuple[str, int, int]]:
    """Return the kind, the place and the end of each token of a source file, in order."""
    starts, lines = line_starts(text), text.split("\n")

    def place(row: int, column: int) -> int:
        line = lines[row - 1]
        return starts[row - 1] + (column if line.isascii() else len(line[:column].encode()))

    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = _KINDS.get(tokenize.tok_name[token.type])
        if kind is not None:
            kind = "keyword" if kind == "name" and keyword.iskeyword(token.string) else kind
            found.append((kind, place(*token.start), place(*token.end)))
    return found


def line_starts(text: str) -> list[int]:
    """Return the place of each line, which ``ast`` and ``tokenize`` number from 1."""
    return [0, *accumulate(len(line.encode()) + 1 for line in text.split("\n")[:-1])]


def _tree(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # escapes of older code
        return ast.parse(text)
