"""The description of extra inputs, and their values for one document."""

import re
from typing import Any

import numpy as np
import pytest

from aftexport.errors import UsageError
from aftexport.extra_inputs import (
    ExtraInput,
    check_values,
    parse_inputs,
    sample_values,
    stacked,
    values_of,
)

EXTRAS = tuple(
    extra if extra.dtype == "float32" else extra.model_copy(update={"maximum": 4})
    for extra in parse_inputs(
        {
            "age": "number",
            "static": "vector:3",
            "region": "category",
            "flags": "categories:2",
            "types": "token_category",
        }
    )
)
GOOD: dict[str, Any] = {
    "age": 2,
    "static": [1, 0.5, -2],
    "region": 4.0,
    "flags": [0, 4],
    "types": [0, 1, 2],
}


def test_kinds_have_shapes() -> None:
    assert [extra.layout for extra in EXTRAS] == [
        "float32 [batch]",
        "float32 [batch, 3]",
        "int64 [batch]",
        "int64 [batch, 2]",
        "int64 [batch, tokens]",
    ]
    (extra,) = parse_inputs({"flags": "categories:2:7"})
    assert (extra.width, extra.maximum) == (2, 6)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("static", "vector", "must be number, vector:K"),
        ("static", "vector:0", "got 'vector:0'"),
        ("static", "vector:3:4", "got 'vector:3:4'"),
        ("static", "floats:3", "got 'floats:3'"),
        ("static", "vector:999999", "width: expected less than or equal to 65536"),
        ("region", "category:99999999999", "got 'category:99999999999'"),
        ("lengths", "category", "expected another name"),
        ("text", "number", "expected another name"),
        ("evidence_of", "number", "expected another name"),
        ("a b", "number", "ASCII letters"),
    ],
)
def test_bad_options_are_refused(name: str, kind: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_inputs({name: kind})
    assert said in str(error.value)


def test_too_many_inputs_are_refused() -> None:
    with pytest.raises(UsageError, match="up to 16 extra inputs, got 17"):
        parse_inputs({f"x{i}": "number" for i in range(17)})


def test_values_get_their_types() -> None:
    values = check_values(EXTRAS, GOOD, 3)
    assert values.document["age"].dtype == np.float32
    assert values.document["region"].dtype == np.int64
    assert values.to_json() == GOOD
    assert {name: x.shape for name, x in values.batch().items()} == {
        "age": (1,), "static": (1, 3), "region": (1,), "flags": (1, 2), "types": (1, 3),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"static": None}, "expected the input 'static', a list of 3 numbers, got none"),
        ({"static": [1, 2]}, "'static': expected a list of 3 numbers, got a list of 2 numbers"),
        ({"static": 1}, "expected a list of 3 numbers, got one number"),
        ({"static": [1, 2, "3"]}, "expected a list of 3 numbers, got a list with str"),
        ({"static": [1, 2, True]}, "expected a list of 3 numbers, got a list with bool"),
        ({"static": [[1], [2], [3]]}, "expected a list of 3 numbers, got a list with list"),
        ({"static": [1, 2, 1e39]}, "'static': expected finite float32 numbers"),
        ({"static": [1, 2, 10**400]}, "'static': expected finite float32 numbers"),
        ({"static": np.array([1, 2, np.nan])}, "'static': expected finite float32 numbers"),
        ({"static": "abc"}, "expected a list of 3 numbers, got str"),
        ({"static": {"a": 1}}, "expected a list of 3 numbers, got dict"),
        ({"region": 5}, "'region': expected integers from 0 to 4, got 5"),
        ({"region": -1}, "'region': expected integers from 0 to 4, got -1"),
        ({"region": [[1]]}, "'region': expected one number, got a list with list"),
        ({"region": 16777216}, "'region': expected integers from 0 to 4, got 16777216"),
        ({"region": 1.5}, "'region': expected integers from 0 to 4, got 1.5"),
        ({"region": 10**400}, "'region': expected integers from 0 to 4, got inf"),
        ({"types": [0, 1]}, "'types': expected a list of 3 numbers, got a list of 2 numbers"),
        ({"types": np.zeros((3, 1))}, "'types': expected a list of 3 numbers, got an array [3, 1]"),
        ({"type": 1}, "expected the inputs of the model, age, static, region, flags, types, got"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="input") as error:
        check_values(EXTRAS, GOOD | changes, 3)
    assert said in str(error.value)


def test_batch_pads_tokens_by_zero() -> None:
    generator = np.random.default_rng(0)
    documents = [sample_values(EXTRAS, generator, tokens) for tokens in (2, 5)]
    documents[0].tokens["types"][:] = 4
    inputs = stacked(EXTRAS, documents, 5)
    assert inputs["types"][0].tolist() == [4, 4, 0, 0, 0]
    for row, (tokens, document) in enumerate(zip((2, 5), documents, strict=True)):
        assert values_of(EXTRAS, inputs, row, tokens).to_json() == document.to_json()


def test_part_cuts_only_tokens() -> None:
    part = check_values(EXTRAS, GOOD, 3).part(1, 3)
    assert part.to_json() == GOOD | {"types": [1, 2]}


def test_integers_of_tokens_have_no_width() -> None:
    with pytest.raises(ValueError, match="without a width"):
        ExtraInput(name="types", kind="token", dtype="int64", width=2)


@pytest.mark.parametrize(
    ("kind", "good", "bad", "said"),
    [
        ("number:0..120", 120, -1, "expected numbers from 0 to 120, got -1"),
        ("number:0..", 1e30, -0.5, "expected numbers from 0, got -0.5"),
        ("number:..0.1", np.array(0.1, np.float32), 0.2, "expected numbers to 0.1, got 0.2"),
        ("vector:2:-1..1e1", [-1, 10], [0, 11], "expected numbers from -1 to 10, got 11"),
    ],
)
def test_range_of_numbers_is_kept(kind: str, good: Any, bad: Any, said: str) -> None:
    (extra,) = parse_inputs({"age": kind})
    assert ExtraInput.model_validate_json(extra.model_dump_json()) == extra
    extra.checked(good, 1)
    with pytest.raises(ValueError, match=re.escape(said)):
        extra.checked(bad, 1)
    for values in extra.sample(np.random.default_rng(0), 100, 1):
        extra.checked(np.asarray(values), 1)


@pytest.mark.parametrize("kind", ["number:2..1", "number:1", "number:a..b", "category:0..2"])
def test_bad_range_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match="--input age"):
        parse_inputs({"age": kind})
