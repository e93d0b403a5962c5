from pathlib import Path

import pytest
import tiny_models
import torch
from commands import assert_refused, listing, run_here

from aftexport.checkpoint import from_factory
from aftexport.errors import UsageError


@pytest.mark.parametrize(
    "factory",
    [
        "tiny_models",
        ":Bag",
        "tiny_models:",
        ".tiny_models:Bag",
        "tiny_models:Absent",
        "no_such_module:make",
        "tiny_models:raising",
        "tiny_models:exiting",
        "tiny_models:number",
        "tiny_models:VOCABULARY",
        "tiny_models:AftSimple",
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
    torch.save(tiny_models.Bag().state_dict(), tmp_path / "model.pt")
    before = listing(tmp_path)
    outcome = run_here([tmp_path / "model.pt", "--to", "onnx", "--factory", factory], capsys)
    assert_refused(outcome, "--factory", factory)
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("factory", "remedy"),
    [
        ("tiny_models:AftSimple", "without required arguments"),
        ("tiny_models:raising", r"from tiny_models import raising; raising\(\)"),
    ],
)
def test_raising_factory_differs_from_missing_arguments(factory: str, remedy: str) -> None:
    """The error tells a factory that raises from one that needs arguments."""
    with pytest.raises(UsageError, match=remedy):
        from_factory(factory)
