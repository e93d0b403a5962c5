"""Links, files, options, extras and targets that the documentation names are there."""

import re
import tomllib
from functools import lru_cache
from pathlib import Path

import pytest

from docs.pages import BLOCKS, PAGES, REPOSITORY

_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)")
_FILE = re.compile(r"`((?:docs|export|plugins|serve|tests|docker)/[\w./-]+)`")
_EXTRA = re.compile(r"pip install '\.\[([\w,-]+)\]'")
_TARGET = re.compile(r"\bmake ([a-z][\w/-]+)")


@lru_cache
def anchors(path: Path) -> set[str]:
    """The anchors of a Markdown file's headings, as GitHub and MyST make them."""
    headings = re.findall(r"(?m)^#+ (.*)$", path.read_text("utf-8"))
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = REPOSITORY / page
    for link, anchor in _LINK.findall(PAGES[page]):
        target = (here.parent / link).resolve() if link else here
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}#{anchor}"


def test_every_guide_is_in_overview() -> None:
    linked = {link for link, _ in _LINK.findall(PAGES["docs/which-page.md"])}
    guides = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/how-to/")}
    assert guides - linked == set()


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    assert [path for path in _FILE.findall(PAGES[page]) if not (REPOSITORY / path).exists()] == []


def test_named_extras_exist() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    named = {name for match in _EXTRA.findall("".join(PAGES.values())) for name in match.split(",")}
    assert {"client", "cpu", "cuda", "otel", "torch"} <= named
    assert named <= project["optional-dependencies"].keys()


def test_named_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"(?m)^([a-z][\w/-]*):", makefile))
    shown = "".join(block.text for block in BLOCKS if block.language == "sh")
    inline = "".join(re.findall(r"`make [^`]+`", "".join(PAGES.values())))
    assert {"demo", "test"} <= set(_TARGET.findall(shown))
    assert set(_TARGET.findall(shown + inline)) <= targets
