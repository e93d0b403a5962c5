import numpy as np
import pytest

from aftexport.bundle.golden import OPERATOR_OUTPUT, Case, join_outputs, pack_cases, unpack_cases

IDS = {"input_ids": np.zeros((2, 3), np.int64)}


def test_cases_survive_packing_the_models_first() -> None:
    cases = [
        Case("b", "AftSimple", {"query": np.ones((1, 1))}, {OPERATOR_OUTPUT: np.ones((1, 1))}),
        Case("z", "model", IDS, {"logits": np.ones((2, 3))}),
        Case("a", "model", IDS, {"logits": np.ones((2, 3))}),
    ]
    read = unpack_cases(pack_cases(cases))
    assert [(case.subject, case.name) for case in read] == [
        ("model", "a"), ("model", "z"), ("AftSimple", "b")
    ]  # fmt: skip
    np.testing.assert_array_equal(read[0].inputs["input_ids"], IDS["input_ids"])
    assert [case.shape for case in read] == [(2, 3), (2, 3), (1, 1)]


def test_every_output_survives_packing() -> None:
    outputs = {"topic": np.ones((2, 3)), "mood": np.zeros((2, 1)), "tokens": np.ones((2, 3, 4))}
    (read,) = unpack_cases(pack_cases([Case("a", "model", IDS, outputs)]))
    assert read.outputs.keys() == outputs.keys()
    for name, output in outputs.items():
        np.testing.assert_array_equal(read.outputs[name], output)


def test_case_without_reference_is_refused() -> None:
    tensors = pack_cases([Case("a", "model", IDS, {"logits": np.ones((2, 3))})])
    del tensors["model/a/output/logits"]
    with pytest.raises(ValueError, match="model/a is incomplete"):
        unpack_cases(tensors)


def test_joined_state_counts_in_every_row() -> None:
    rows, state = np.zeros((2, 3, 4)), np.arange(12).reshape(2, 1, 2, 3)
    joined = join_outputs({"output": rows, "present_state": state})
    assert joined.shape == (2, 3, 4 + 6)
    np.testing.assert_array_equal(joined[1, :, 4:], [range(6, 12)] * 3)
