"""torch.onnx's table of translations is read once, and no export changes it for another."""

import ast
import operator

import pytest

from aftexport.capture.capture import capture
from aftexport.lowering.to_onnx import lower
from aftexport.lowering.translation_table import shared_table
from aftexport.nn import DocumentClassifier
from aftexport.system.internals.torch_translation import ONNXRegistry


def test_second_export_parses_nothing(
    classifier: DocumentClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lower(capture(classifier))
    parsed: list[object] = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda *a, **k: (parsed.append(a), parse(*a, **k))[1])
    assert lower(capture(classifier)) == first
    assert len(parsed) < 20  # 500 without the shared table


def test_added_translation_stays_out_of_the_table() -> None:
    with shared_table():
        first = ONNXRegistry().from_torchlib(opset_version=20)
        first.register_op(operator.floordiv, lambda x, y: x)
        second = ONNXRegistry().from_torchlib(opset_version=20)
    assert len(first.functions[operator.floordiv]) > len(second.functions[operator.floordiv])
    assert second.opset_version == 20


def test_other_users_of_torch_onnx_get_their_own_table() -> None:
    original = vars(ONNXRegistry)["from_torchlib"]
    with pytest.raises(ValueError, match="in the block"), shared_table():
        raise ValueError("in the block")
    assert vars(ONNXRegistry)["from_torchlib"] is original
