import numpy as np
import pytest

from aftexport.bundle.golden import Case, pack_cases, unpack_cases

IDS = {"input_ids": np.zeros((2, 3), np.int64)}


def test_cases_survive_packing_the_models_first() -> None:
    cases = [
        Case("b", "AftSimple", {"query": np.ones((1, 1))}, np.ones((1, 1))),
        Case("z", "model", IDS, np.ones((2, 3))),
        Case("a", "model", IDS, np.ones((2, 3))),
    ]
    read = unpack_cases(pack_cases(cases))
    assert [(case.subject, case.name) for case in read] == [
        ("model", "a"), ("model", "z"), ("AftSimple", "b")
    ]  # fmt: skip
    np.testing.assert_array_equal(read[0].inputs["input_ids"], IDS["input_ids"])


def test_case_without_reference_is_refused() -> None:
    tensors = pack_cases([Case("a", "model", IDS, np.ones((2, 3)))])
    del tensors["model/a/expected"]
    with pytest.raises(ValueError, match="model/a is incomplete"):
        unpack_cases(tensors)
