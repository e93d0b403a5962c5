from pathlib import Path

import pytest
import torch
import toy
from commands import assert_refused, listing, run_here

from aftexport.checkpoint import from_factory
from aftexport.errors import UsageError


@pytest.mark.parametrize(
    "factory",
    [
        "toy",
        ":Bag",
        "toy:",
        ".toy:Bag",
        "toy:Absent",
        "no_such_module:make",
        "toy:raising",
        "toy:exiting",
        "toy:number",
        "toy:VOCABULARY",
        "toy:AftSimple",
        "factory_with_syntax_error:make",
        "factory_that_divides_by_zero:make",
    ],
)
def test_bad_factory_is_refused(
    factory: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "factory_with_syntax_error.py").write_text("def (")
    (tmp_path / "factory_that_divides_by_zero.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    torch.save(toy.Bag().state_dict(), tmp_path / "model.pt")
    before = listing(tmp_path)
    outcome = run_here([tmp_path / "model.pt", "--to", "onnx", "--factory", factory], capsys)
    assert_refused(outcome, "--factory", factory)
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("factory", "remedy"),
    [
        ("toy:AftSimple", "without required arguments"),
        ("toy:raising", r"from toy import raising; raising\(\)"),
    ],
)
def test_raising_factory_differs_from_missing_arguments(factory: str, remedy: str) -> None:
    """The error tells a factory that raises from one that needs arguments."""
    with pytest.raises(UsageError, match=remedy):
        from_factory(factory)
