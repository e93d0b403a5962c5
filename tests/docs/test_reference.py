"""The reference pages are complete, and name what is there."""

import json
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import onnx
import pytest

import aftexport.nn
import aftserve.client
from aftexport import EngineOptions, ExportOptions, ModelSource
from aftexport.operators.mechanisms import SINGLE_OPERATORS
from aftexport.parity import TOLERANCES
from aftserve.settings import Settings
from docs.pages import BLOCKS, PAGES, REPOSITORY
from docs.python_names import python_names
from docs.reference import commands, settings

CITATION = re.compile(r"\b((?:docs|export|serve|plugins)/[\w/-]+\.md), (\w+)")
"""A page and its heading in an error message."""
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?!-)\b")
OTHERS = {
    *("--rounds", "--tokens", "--mechanism", "--contender", "--chunks", "--model"),  # benchmarks
    *("--recognized", "--record", "--recurrent", "--replace", "--seeds"),  # benchmarks
    *(
        "--parts",
        "--threads",
        "--device",
        "--neighbour",
    ),  # benchmarks, load tests, make gpu-roofline
    *("--continue", "--no-tensorrt", "--bundles", "--help"),  # make gpu-check
    *("--read-only", "--tmpfs", "--stop-timeout", "--build-arg"),  # docker
    *("--model-repository", "--no-deps", "--editable"),  # tritonserver, pip
    *("--json", "--data-binary", "--shell"),  # curl, argcomplete
}
"""Options of other programs that the pages name."""


def test_cited_pages_and_headings_exist() -> None:
    sources = [
        path.read_text("utf-8")
        for folder in ("export", "serve", "plugins")
        for path in (REPOSITORY / folder).rglob("*.py")
    ]
    cited = {match.groups() for text in sources for match in CITATION.finditer(text)}
    assert cited
    for page, heading in cited:
        assert re.search(rf"(?m)^#+ {heading}$", PAGES[page]), (page, heading)


def test_commands_are_listed() -> None:
    programs = {name: import_module(f"{name}.cli").COMMANDS for name in ("aftexport", "aftserve")}
    known = [f"{program} {name}" for program, names in programs.items() for name in names]
    listed = re.findall(r"(?m)^## (.+)", PAGES["docs/cli.md"])
    assert sorted(listed) == sorted([*programs, *known])


def test_options_exist() -> None:
    known = set(OPTION.findall(commands("aftexport") + commands("aftserve") + settings())) | OTHERS
    for name, text in PAGES.items():
        assert set(OPTION.findall(text)) - known == set(), name


def test_settings_are_listed() -> None:
    table = settings()
    flags = [f"`--{name.replace('_', '-')}`" for name in Settings.model_fields]
    assert [flag for flag in flags if flag not in table] == ["`--bundles`", "`--models`"]
    assert "`[models.NAME]`" in table


def test_python_names_are_listed() -> None:
    page = PAGES["docs/python.md"]
    names = [f"aftserve.client.{name}" for name in aftserve.client.__all__]
    names += [f"aftexport.{name}" for name in ("save", "load", "export", "errors.ParityError")]
    names += ["aftserve.Predictor"]
    names += [f"aftexport.nn.{name}" for name in aftexport.nn.__all__ if name != "LAYERS"]
    assert [name for name in names if f"### {name}\n" not in page] == []
    for options in (ExportOptions, EngineOptions, ModelSource):
        _, _, section = page.partition(f"### aftexport.{options.__name__}\n")
        section = section.partition("###")[0]
        assert [f.name for f in fields(options) if f"- `{f.name}: " not in section] == []


def test_signature_names_parameters_and_defaults() -> None:
    text = python_names("aftserve.Predictor")
    assert "    threads: int | None = None,\n" in text
    assert "- `spill`: folder for the values" in text
    assert "#### Predictor.\\_" not in text
    assert "- `bundle: str`: Digest of the bundle." in text


def test_code_of_docstring_is_a_block() -> None:
    assert "\n```text\nS_t = diag(" in python_names("aftexport.nn.GatedLinearAttention")


def test_operators_are_listed() -> None:
    domain = {
        s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == "ai.aftexport"
    }
    mechanisms = {name for name in domain if f"Causal{name}" in domain} | set(SINGLE_OPERATORS)
    listed = re.findall(r"<!-- reference: operator (\w+) -->", PAGES["docs/operators.md"])
    assert sorted(listed) == sorted(mechanisms)


def test_manifest_fields_are_listed(bundle_folder: Path) -> None:
    manifest = json.loads((bundle_folder / "manifest.json").read_text("utf-8"))
    listed = re.findall(r"(?m)^\| `(\w+)` \|", PAGES["docs/bundle.md"])
    assert set(listed) == manifest.keys()


def test_bundle_files_are_listed(bundle_folder: Path) -> None:
    names = [path.name for path in bundle_folder.iterdir()]
    assert [name for name in names if f"`{name}`" not in PAGES["docs/bundle.md"]] == []


def test_addresses_are_listed(client: httpx.Client) -> None:
    document: dict[str, Any] = client.get("/openapi.json").json()
    page = PAGES["docs/http.md"]
    for path in document["paths"]:
        general = re.sub(r"/versions/\{version\}", "", path).replace("{name}", "NAME")
        assert f"`{general}`" in page, path
    for operation in document["paths"]["/infer"].values():
        assert [s for s in operation["responses"] if s != "200" and f"| {s} |" not in page] == []


def test_metrics_are_listed(client: httpx.Client) -> None:
    names = re.findall(r"(?m)^# HELP (aftserve_\w+) ", client.get("/metrics").text)
    own = {name for name in names if not name.endswith("_created")}
    assert [name for name in own if f"`{name}`" not in PAGES["docs/http.md"]] == []


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
def test_tolerances_match_table(precision: str) -> None:
    shown = re.findall(rf"(?m)^\| {precision} \| (\S+) \|", PAGES["docs/numerics.md"])
    assert [float(bound) for bound in shown] == [TOLERANCES[precision].bound]


def test_readme_fits_two_screens() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 120
    assert any(block.page == "README.md" for block in BLOCKS)
