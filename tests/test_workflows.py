"""The files around the code agree with it: workflows, hooks and templates."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text("utf-8"))
    for path in sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
}
TEMPLATES = {
    path.name: yaml.safe_load(path.read_text("utf-8"))
    for path in sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    if path.name != "config.yml"
}


def read(name: str) -> str:
    return (REPOSITORY / name).read_text("utf-8")


def make_targets() -> set[str]:
    rules = re.findall(r"(?m)^((?:(?:\$\(VENV\)/)?[a-z][\w -]*)+):(?!=)", read("Makefile"))
    return {name.replace("$(VENV)", ".venv") for rule in rules for name in rule.split()}


def called_targets(text: str) -> set[str]:
    """The targets of the ``make`` commands at the start of a line or of a code span."""
    commands = re.findall(r"(?m)(?:^|`|    |\] )(?:\w+=\S+ )*make ([^#`\n]*)", text)
    words = " ".join(re.sub(r'"[^"]*"', "", command) for command in commands).split()
    return {word for word in words if "=" not in word}


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def workflow_targets(name: str) -> set[str]:
    return called_targets("\n".join(step.get("run", "") for step in steps(WORKFLOWS[name])))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_calls_existing_targets(name: str) -> None:
    assert workflow_targets(name) <= make_targets()


def test_make_target_is_read() -> None:
    """The other tests depend on these two patterns."""
    assert {"test", "test-native", ".venv/installed"} <= make_targets()
    text = 'make a-b PART=1  # why\nN=1 make c d A="e f"\nnow `make g` make no'
    assert called_targets(text) == {"a-b", "c", "d", "g"}


def test_contributing_names_existing_targets() -> None:
    for name in ("CONTRIBUTING.md", ".github/PULL_REQUEST_TEMPLATE.md"):
        named = called_targets(read(name))
        assert "test" in named
        assert named <= make_targets()


def test_workflows_cover_ci_targets() -> None:
    script = re.sub(r"(?m)^#.*", "", read(".ci/run"))
    ci = called_targets(script)
    assert {"test", "test-native", "test-cuda"} <= ci
    assert ci <= set().union(*map(workflow_targets, WORKFLOWS))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_has_bounds(name: str) -> None:
    """Each job has a time limit, the least permissions, and actions by their commit."""
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    for title, job in workflow["jobs"].items():
        assert job["timeout-minutes"] <= 90
        assert job.get("permissions", {}) == ({"id-token": "write"} if title == "publish" else {})
    for line in re.findall(r"uses: (?!\./)(.*)", read(f".github/workflows/{name}")):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+", line)


def test_publish_needs_tag() -> None:
    (job,) = [job for job in WORKFLOWS["wheels.yml"]["jobs"].values() if "environment" in job]
    assert "startsWith(github.ref, 'refs/tags/v')" in job["if"]
    assert set(job["needs"]) == WORKFLOWS["wheels.yml"]["jobs"].keys() - {"publish"}


FILES = [
    "aftexport-0.1.0.tar.gz",
    *(f"aftexport-0.1.0-py3-none-manylinux_2_28_{name}.whl" for name in ("x86_64", "aarch64")),
    "aftexport-0.1.0-py3-none-any.whl",
    "aftexport_cuda-0.1.0-py3-none-manylinux_2_28_x86_64.whl",
]


@pytest.mark.parametrize(("tag", "missing", "code"), [
    ("v0.1.0", None, 0), ("v0.1.1", None, 1), *(("v0.1.0", name, 1) for name in FILES)
])  # fmt: skip
def test_publish_compares_tag_with_version(
    tag: str, missing: str | None, code: int, tmp_path: Path
) -> None:
    """Every file of the tag's version must be there."""
    job = WORKFLOWS["wheels.yml"]["jobs"]["publish"]
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    (tmp_path / "dist").mkdir()
    for name in FILES:
        if name != missing:
            (tmp_path / "dist" / name).touch()
    done = subprocess.run(["bash", "-ec", command], cwd=tmp_path, env={"GITHUB_REF_NAME": tag})
    assert done.returncode == code


def test_hooks_have_tested_versions() -> None:
    config = yaml.safe_load(read(".pre-commit-config.yaml"))
    hooks = {hook["id"]: hook for repo in config["repos"] for hook in repo["hooks"]}
    linters = {"actionlint", "clang-format", "hadolint", "oxlint", "zizmor"}
    assert hooks.keys() == {"ruff-check", "ruff-format", *linters}
    pinned = read("constraints.txt").splitlines()
    for hook in hooks.values():
        (tool,) = hook["additional_dependencies"]
        assert tool in pinned
        assert tool.startswith(hook["entry"].split()[0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_fields_are_known(name: str) -> None:
    template = TEMPLATES[name]
    assert template["name"]
    assert template["description"]
    fields = [field for field in template["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"textarea", "input", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_bug_template_asks_for_inspect() -> None:
    fields = [field for field in TEMPLATES["bug.yml"]["body"] if field["type"] != "markdown"]
    required = {field["id"] for field in fields if field["validations"]["required"]}
    assert {"model", "command", "inspect"} <= required


def test_help_lists_targets_by_purpose() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    groups = done.stdout.strip().split("\n\n")
    assert {"Try it", "Develop", "Test", "Measure"} <= {group.splitlines()[0] for group in groups}
    listed = [line.split()[1] for group in groups for line in group.splitlines()[1:]]
    assert {"demo", "test", "lint", "help"} <= set(listed) <= make_targets()
