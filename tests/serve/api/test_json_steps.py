"""Bodies that are parsed in steps have the values of the parser, and are bounded."""

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from pydantic_core import from_json

from aftexport.errors import InputError
from aftserve.api import json_steps
from aftserve.api.json_steps import parse_in_steps
from aftserve.errors import DocumentTooLongError

MIB = 1 << 20
MAX_ENTRIES = {"texts": 3}
CHARACTERS = ["a", '"', "\\", "é", "😀", "\n", "\u2028", " "]


def random_value(random: Random, depth: int = 0) -> Any:
    """Return a value of JSON whose numbers have at most 25 digits."""
    count = random.randrange(6)
    match random.randrange(8 if depth < 4 else 6):
        case 0:
            return random.choice([None, True, False])
        case 1:
            return random.randrange(-(10**18), 10**22)
        case 2:
            return random.random() * 10 ** random.randrange(-5, 5)
        case 3:
            return "".join(random.choices(CHARACTERS, k=random.choice([count, 8 * count])))
        case 4:
            return [random.randrange(100) for _ in range(count)]
        case 5:
            widths = [random.choice([2, 2, 3]) for _ in range(count)]
            return [[float(random.randrange(9)) for _ in range(width)] for width in widths]
        case 6:
            return [random_value(random, depth + 1) for _ in range(count)]
        case _:
            names = ["".join(random.choices(CHARACTERS, k=count)) for _ in range(count)]
            return {name: random_value(random, depth + 1) for name in names}


def parsed(body: bytes, held: list[int] | None = None) -> tuple[Any, int]:
    """Return the value of a body and the number of steps."""
    steps = parse_in_steps(body, (held if held is not None else list[int]()).append, MAX_ENTRIES)
    count = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count
        count += 1


def plain(value: Any) -> Any:
    """Return a value without arrays; numbers become floats, as in an array of both kinds."""
    match value:
        case np.ndarray():
            return plain(value.tolist())
        case list():
            return [plain(one) for one in value]
        case dict():
            return {name: plain(one) for name, one in value.items()}
        case bool() | None | str():
            return value
    return float(value)


@pytest.fixture(params=[26, 64, 1 << 13])
def step_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps so short that values are cut in every way; a number has at most 25 bytes."""
    monkeypatch.setattr(json_steps, "_NUMBER_BYTES", request.param)
    monkeypatch.setattr(json_steps, "_TEXT_BYTES", request.param)
    monkeypatch.setattr(json_steps, "_MIN_ARRAY_BYTES", 0)


@pytest.mark.usefixtures("step_bytes")
def test_values_are_those_of_parser() -> None:
    random = Random(0)
    for _ in range(500):
        value = random_value(random)
        is_ascii, indent = random.random() < 0.5, random.choice([None, 1])
        body = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()
        assert plain(parsed(body)[0]) == plain(from_json(body))


@pytest.mark.usefixtures("step_bytes")
def test_refusals_are_those_of_parser() -> None:
    random, refused = Random(0), 0
    for _ in range(1000):
        body = bytearray(json.dumps(random_value(random), ensure_ascii=False).encode())
        body[random.randrange(len(body))] = random.choice(b'[]{},:"\\1e-. tn\xff\xd8u')
        try:
            expected = from_json(bytes(body), allow_inf_nan=False)
        except ValueError:
            refused += 1
            with pytest.raises(ValueError):  # noqa: PT011  # the parser's own words differ
                parsed(bytes(body))
        else:
            assert plain(parsed(bytes(body))[0]) == plain(expected)
    assert refused > 500


@pytest.fixture
def few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the maximum number of values, so that a short body exceeds it."""
    monkeypatch.setattr(json_steps, "MAX_VALUES", 1 << 12)


def listed(entry: bytes, size: int, start: bytes = b"[", end: bytes = b"]") -> bytes:
    """Return a body of about this size that repeats an entry."""
    return start + entry + (b"," + entry) * (size // (len(entry) + 1)) + end


@pytest.mark.parametrize(
    "entry",
    [b"{}", b'""', b"true", b"[true]", b'[1,""]', b"[[1],[]]", b"[1],[]", b'{"":[]}', b"[[[[]]]]"],
)
@pytest.mark.usefixtures("few_values")
def test_many_values_are_refused(entry: bytes) -> None:
    assert parsed(listed(entry, 1000))[0]
    with pytest.raises(DocumentTooLongError, match="at most 4096 values"):
        parsed(listed(entry, MIB // 8))


@pytest.mark.usefixtures("few_values")
def test_members_of_object_are_counted() -> None:
    with pytest.raises(DocumentTooLongError):
        parsed(listed(b'"":1', MIB // 8, b"{", b"}"))


@pytest.mark.parametrize(
    "body", [b"[" * 40, b'{"a":' * 40, b"[[1]," + b"[" * 33 + b"]" * 33 + b"]"]
)
def test_deep_nesting_is_refused(body: bytes) -> None:
    with pytest.raises(InputError, match="at most 32 lists and objects in each other"):
        parsed(body)


@pytest.mark.parametrize(
    ("entry", "shape"),
    [(b"1", ()), (b"0.25", ()), (b"[]", (0,)), (b"[1,2]", (2,)), (b"[[1]]", (1, 1))],
)
def test_numbers_become_one_array(entry: bytes, shape: tuple[int, ...]) -> None:
    """Half a MiB takes dozens of steps, and eight bytes for each number."""
    body = listed(entry, MIB // 2)
    held = list[int]()
    array, steps = parsed(body, held)
    assert isinstance(array, np.ndarray)
    assert array.shape == (1 + (MIB // 2) // (len(entry) + 1), *shape)
    assert steps > len(body) >> 14
    assert array.nbytes <= sum(held)


def test_long_text_takes_many_steps() -> None:
    text = 'é\\😀\n"' * 60_000
    for is_ascii in (True, False):
        value, steps = parsed(json.dumps({"text": text}, ensure_ascii=is_ascii).encode())
        assert value == {"text": text}
        assert steps > 30


def test_long_text_is_held_by_size() -> None:
    """One character beyond 16 bits makes each take four bytes."""
    held = list[int]()
    text, _ = parsed(json.dumps("a" * MIB + "\U0001f600", ensure_ascii=False).encode(), held)
    assert len(text) == MIB + 1
    assert sum(held) >= 4 * len(text)


def test_short_arrays_of_fields_are_lists() -> None:
    value, _ = parsed(b'{"shape": [1, 2], "data": [' + b"1," * 100 + b"1]}")
    assert value["shape"] == [1, 2]
    assert isinstance(value["data"], np.ndarray)


@pytest.mark.parametrize(
    "body",
    [b'"\\ud83d"', b'"a\\ud83d b"', b'"\\ude00"', b'"\\ud83d\\u0041"', b'"\\u12"', b'"\\', b'"'],
)
def test_broken_escapes_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="at byte"):
        parsed(body)


@pytest.mark.parametrize("entry", [b'"a"', b"[]", b"{}", b"null", b"[" + b"1," * 5000 + b"1]"])
def test_list_of_field_is_limited_early(entry: bytes) -> None:
    body = b'{"texts":%s}'
    assert len(parsed(body % listed(entry, 2 * len(entry) + 2))[0]["texts"]) == 3
    with pytest.raises(DocumentTooLongError, match="texts must have at most 3 entries, got more"):
        parsed(body % (listed(entry, 9 * len(entry)) + b" no JSON"))
    assert len(parsed(b'{"other":%s}' % listed(entry, 9 * len(entry)))[0]["other"]) > 3
    assert len(parsed(b'{"a":{"texts":%s}}' % listed(entry, 9 * len(entry)))[0]["a"]["texts"]) > 3
