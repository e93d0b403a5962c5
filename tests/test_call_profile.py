"""One request and one export run few files of the product."""

import re
from pathlib import Path

import pytest
from commands import run_python

SCRIPT = Path(__file__).parent / "support" / "call_profile.py"


@pytest.mark.parametrize(
    ("kind", "fixture", "max_files"),
    [
        ("infer", "bundle_folder", 40),
        pytest.param("export", "checkpoint_file", 186, marks=pytest.mark.slow),
    ],
)
def test_own_files_are_few(
    kind: str, fixture: str, max_files: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    outcome = run_python(SCRIPT, kind, request.getfixturevalue(fixture), cwd=tmp_path)
    found = re.search(r"(\d+) functions in (\d+) files$", outcome.out.strip())
    assert found is not None, outcome
    assert 0 < int(found[2]) <= max_files, outcome.out
