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
    "assertions": ("assert x", "assertion = x"),
    "classes": ("class A: pass", "x = 'class A: pass'"),
    "comprehensions": ("x = [y for y in z]", "for y in z: pass"),
    "decorators": ("@f\ndef g(): pass", "x = a @ b"),
    "f-strings": ("x = f'{y}'", "x = '{y}'"),
    "handled errors": ("try: x\nfinally: y", "tried = x"),
    "lambdas": ("f = lambda x: x", "lambdas = 1"),
    "raised errors": ("raise ValueError", "raised = 1"),
    "type hints": ("def f(x: int): pass", "f = {x: int}"),
    "while loops": ("while x: pass", "# while x"),
}


@pytest.mark.parametrize("use", USES)
def test_use_is_found_after_its_prefix(use: str) -> None:
    with_use, without = EXAMPLES[use]
    prefix = "\N{GREEK SMALL LETTER PI} = 1\n"
    ((name, place),) = find_uses(prefix + with_use)
    assert name == use
    assert place >= len(prefix.encode())
    assert find_uses(prefix + without) == ()


MORE = [
    ("type hints", "def f() -> int: pass"),
    ("type hints", "x: int = 1"),
    ("type hints", "def g(*args: int, **kwargs: int): pass"),
    ("comprehensions", "x = sum(y for y in z), {y for y in z}, {y: y for y in z}"),
    ("handled errors", "try: x\nexcept* ValueError: y"),
    ("decorators", "@f\nasync def g(): pass"),
]


@pytest.mark.parametrize(("use", "text"), MORE)
def test_other_forms_are_found(use: str, text: str) -> None:
    assert {name for name, _ in find_uses(text)} == {use}


def test_places_count_bytes() -> None:
    text = "x = '\N{SNOWMAN}'; assert x\n@f\nclass A: pass\n"
    content = text.encode()
    places = {"assertions": b"assert", "decorators": b"f\n", "classes": b"class"}
    assert find_uses(text) == tuple((use, content.index(part)) for use, part in places.items())


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
