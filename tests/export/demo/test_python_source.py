import textwrap

import pytest

from aftexport.demo.python_source import (
    KINDS,
    OUTSIDE,
    USES,
    find_lines,
    find_tokens,
    find_uses,
    is_readable,
    line_starts,
)

EXAMPLES = {
    "classes": ("class A: pass", "x = 'class A'"),
    "concurrency": ("async def f(): pass", "import asynchronous"),
    "files": ("text = path.read_text()", "opened = reopen('a')"),
    "generators": ("def f():\n    yield from x", "yields = 1"),
    "networking": ("from urllib.request import urlopen", "from .socket import a"),
    "raised errors": ("raise ValueError", "raised = 1"),
    "regular expressions": ("import os, re", "import res"),
    "type hints": ("def f(x: int): pass", "f = {x: int}"),
}


@pytest.mark.parametrize("use", USES)
def test_use_is_found_at_its_place(use: str) -> None:
    with_use, without = EXAMPLES[use]
    prefix = "\N{SNOWMAN} = 1\n".replace("\N{SNOWMAN}", "\N{GREEK SMALL LETTER PI}")
    ((name, place),) = find_uses(prefix + with_use)
    assert name == use
    assert place >= len(prefix.encode())
    assert find_uses(prefix + without) == ()


MORE = [
    ("concurrency", "import concurrent.futures"),
    ("concurrency", "async def f():\n    async with x: await y"),
    ("type hints", "def f() -> int: pass"),
    ("type hints", "x: int = 1"),
    ("type hints", "f = lambda x: x\ndef g(*args: int): pass"),
    ("generators", "def f():\n    x = yield"),
    ("files", "with open('a') as f: pass"),
]


@pytest.mark.parametrize(("use", "text"), MORE)
def test_other_forms_are_found(use: str, text: str) -> None:
    assert {name for name, _ in find_uses(text)} == {use}


def test_places_count_bytes() -> None:
    text = "x = '\N{SNOWMAN}'; import re"
    assert find_uses(text) == (("regular expressions", text.encode().index(b"import")),)


SOURCE = textwrap.dedent(
    '''
    """Docstring

    of two lines."""
    # a comment
    x = 1  # not a line of its own
    y = """
    # not a comment
    """
    def f():
        "docstring"
        z = ("a"
             # a comment between strings
             "b")
        "not a docstring"
    '''
)


def test_prose_lines_are_comments_and_docstrings() -> None:
    lines = [line for line in SOURCE.splitlines() if line.strip()]
    found = find_lines(SOURCE)
    assert len(found) == len(lines)
    prose = [line.strip() for line, (_, is_prose) in zip(lines, found, strict=True) if is_prose]
    assert prose == [
        '"""Docstring',
        'of two lines."""',
        "# a comment",
        '"docstring"',
        "# a comment between strings",
    ]


def test_lines_begin_at_first_character() -> None:
    content = SOURCE.encode()
    for place, _ in find_lines(SOURCE):
        assert not content[place : place + 1].isspace()
        assert not content[:place].rpartition(b"\n")[2].strip()


def test_line_starts_count_bytes() -> None:
    assert line_starts("\N{SNOWMAN}\n\na") == [0, 4, 5]


@pytest.mark.parametrize(
    "text", ["print 'python 2'", "def f(:", "x = 1\0", "\ufeffx = 1", "(" * 500 + ")" * 500]
)
def test_unreadable_source_is_told_apart(text: str) -> None:
    assert not is_readable(text)
    assert is_readable("x = 1\n")


def test_tokens_have_kinds_and_places() -> None:
    text = "def f(x):\n    '''\N{SNOWMAN}\n'''; return 1.5  # \N{SNOWMAN} one\n"
    content = text.encode()
    found = [(kind, content[start:end].decode()) for kind, start, end in find_tokens(text)]
    assert found == [
        ("keyword", "def"),
        ("name", "f"),
        ("operator", "("),
        ("name", "x"),
        ("operator", ")"),
        ("operator", ":"),
        ("string", "'''\N{SNOWMAN}\n'''"),
        ("operator", ";"),
        ("keyword", "return"),
        ("number", "1.5"),
        ("comment", "# \N{SNOWMAN} one"),
    ]
    assert {kind for kind, _, _ in find_tokens(text)} == set(KINDS) - {OUTSIDE}


def test_every_kind_of_formatted_string_is_known() -> None:
    """Before Python 3.12, an f-string is one token."""
    kinds = [kind for kind, _, _ in find_tokens("f'a{x}b'")]
    assert kinds[0] == kinds[-1] == "string"
    assert set(kinds) <= {"string", "operator", "name"}
