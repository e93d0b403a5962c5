"""The list of skips that continuous integration allows."""

import tomllib
from pathlib import Path

import pytest
import skips

ENTRIES = tomllib.loads(skips.LIST.read_text("utf-8"))["skip"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["reason"])
def test_entry_is_reason_of_test(entry: dict[str, str]) -> None:
    assert entry["when"] in skips.CONDITIONS
    # A wheel's name is put before the rest of the text.
    text = entry["reason"].partition(" is not built ")[2] or entry["reason"]
    sources = Path(__file__).parent.rglob("test_*.py")
    others = (Path(__file__).with_name("conftest.py"), *sources)
    assert any(text in path.read_text("utf-8") for path in others if path != Path(__file__))


def test_reason_needs_its_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no tritonserver with the backend onnxruntime is on the PATH"
    monkeypatch.setitem(skips.CONDITIONS, "no tritonserver", lambda: True)
    assert skips.allowed(reason)
    monkeypatch.setitem(skips.CONDITIONS, "no tritonserver", lambda: False)
    assert not skips.allowed(reason)
    assert not skips.allowed("no clang++")
