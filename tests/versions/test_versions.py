"""The matrix of versions, its record and the table of the documentation."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from aftexport.system.internals import torch_operators, torch_shapes, torch_translation
from versions.matrix import ROOT, Known, digest_tests, read_matrix
from versions.suite import Outcome, free_constraints, names_with, put_row, read_record, read_report

TESTS, ENVIRONMENTS = read_matrix()


def test_matrix_names_existing_tests() -> None:
    texts = [(ROOT / path).read_text("utf-8") for path in TESTS]
    names = [name for e in ENVIRONMENTS for known in e.known for name in known.tests]
    assert all(any(f"def {name}(" in text for text in texts) for name in names)
    assert len({e.name for e in ENVIRONMENTS}) == len(ENVIRONMENTS)


def test_record_is_of_matrix() -> None:
    environments = {e.name: e for e in ENVIRONMENTS}
    rows = read_record()
    assert rows
    for row in rows:
        environment = environments[row["name"]]
        assert row["python"] == environment.python
        assert row["limits"] == [known.reason for known in environment.known]
        for requirement in map(Requirement, environment.packages):
            version = Version(row["versions"][requirement.name])
            assert requirement.specifier.contains(version.public)


@pytest.mark.parametrize("module", [torch_operators, torch_shapes, torch_translation])
def test_record_covers_versions_of_internals(module: ModuleType) -> None:
    tried = [Version(row["versions"]["torch"]) for row in read_record()]
    for version in (module.VERSIONS.oldest, module.VERSIONS.newest):
        assert any(v.release[:2] == Version(version).release for v in tried), version


def test_installed_packages_are_not_constrained() -> None:
    lines = free_constraints(["torch", "jinja2"])
    assert not [line for line in lines if line.lower().startswith(("torch==", "jinja2=="))]
    assert [line for line in lines if line.startswith("numpy==")]


def test_report_of_pytest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(
        "<testsuites><testsuite><testcase name='test_a'/><testcase name='test_b[1]'><failure/>"
        "</testcase><testcase name='test_c'><skipped/></testcase></testsuite></testsuites>"
    )
    assert read_report(path, 3) == Outcome(1, 1, ("test_b[1]",), 3)


def test_known_failure_must_fail() -> None:
    outcome = Outcome(1, 0, ("test_b[1]", "test_b[2]"), 3)
    assert outcome.unexpected([Known(("test_b",), "")]) == []
    assert outcome.unexpected([]) == ["test_b"]
    assert outcome.unexpected([Known(("test_a", "test_b"), "")]) == ["test_a (passes)"]


def test_row_replaces_earlier_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("versions.suite.RECORD", tmp_path / "record.json")
    for row in ({"name": "b"}, {"name": "a"}, {"name": "b", "passed": 2}):
        put_row(row)
    assert json.loads((tmp_path / "record.json").read_text()) == [
        {"name": "a"},
        {"name": "b", "passed": 2},
    ]


def test_new_test_makes_row_missing() -> None:
    old = {"tests/a.py": "def test_one(): ...", "tests/b.py": "class A:\n def test_two(self): ..."}
    edited = old | {"tests/a.py": "# More.\ndef test_one(): return"}
    new = old | {"tests/a.py": "def test_one(): ...\ndef test_three(): ..."}
    rows = [{"name": "early", "tests": digest_tests(old)}]
    assert names_with(digest_tests(edited), rows) == {"early"}
    assert names_with(digest_tests(new), rows) == set()
    assert names_with(digest_tests({"tests/a.py": old["tests/a.py"]}), rows) == set()


def test_changelog_names_every_version() -> None:
    text = " ".join((ROOT / "CHANGELOG.md").read_text("utf-8").split())
    sentences = text.partition("The test suite runs with torch")[2].partition("`make")[0]
    for row in read_record():
        torch = ".".join(row["versions"]["torch"].split(".")[:2])
        assert {torch, row["python"]} - {"3.11"} <= set(re.findall(r"\d+\.\d+", sentences))
